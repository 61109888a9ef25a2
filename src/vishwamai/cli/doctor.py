"""Says what this machine has, what is missing, and the command that fixes it.

  vishwamai doctor
  vishwamai doctor --serve DIR

With --serve it measures what bounds a server on this CPU, in less than a minute, and recommends options of serve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vishwamai.cli import doctor_serve, options
from vishwamai.cli.console import tell
from vishwamai.cli.function import CommandError
from vishwamai.core.hardware import GPUS, TPUS, tpu_for
from vishwamai.core.hardware.nodes import memory_nodes, ranges

_NO_MODEL = Path("-")
"""The path of `--serve` without one."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--serve",
        nargs="?",
        const=_NO_MODEL,
        type=Path,
        metavar="MODEL",
        help="measure memory and clocks for a server, of this model if there is one, and recommend its options",
    )
    options.add_json(parser, "with --serve: print one JSON object in place of text, or write it to PATH")


def run(arguments: argparse.Namespace) -> int:
    """Plain text, so that it works where nothing else is installed; 1 where jax finds no device."""
    if arguments.serve is not None:
        return doctor_serve.run(None if arguments.serve == _NO_MODEL else arguments.serve, arguments.json)
    if arguments.json is not None:
        raise CommandError("--json is for the figures of --serve; pass --serve too.")
    from vishwamai.aot.compile import libtpu
    from vishwamai.bench import machine

    tell("Versions")
    for name, version in machine.versions().items():
        tell(f"  {name:22}{version or 'not installed'}")

    cpu = machine.cpu()
    tell("\nCPU")
    memory = f", {cpu.memory / 2**30:.0f} GiB of memory" if cpu.memory else ""
    tell(f"  {cpu.name} ({cpu.architecture}), {cpu.cores} cores for this process{memory}")
    tell(f"  instruction sets      {' '.join(cpu.flags) or 'none that the kernels ask for'}")
    for node in memory_nodes():
        size = f", {node.memory / 2**30:.0f} GiB" if node.memory else ""
        away = f", distances {' '.join(map(str, node.distances))}" if len(node.distances) > 1 else ""
        tell(f"  memory node {node.number:<9} processors {ranges(node.processors)}{size}{away}")
    isa, reason = machine.native()
    tell(f"  native kernels        {f'built, using {isa}' if isa else reason}")

    tell("\nDevices of jax")
    try:
        devices = libtpu.local_devices()
    except RuntimeError as error:  # jax's own, when the platform in JAX_PLATFORMS cannot be initialised
        tell(f"  none: {error}")
        devices = []
    for device in devices:
        tpu = tpu_for(device.device_kind)
        gpu = next((gpu for gpu in GPUS.values() if gpu.is_called(device.device_kind)), None)
        chip = f"  (TPU generation {tpu.name})" if tpu else f"  ({gpu.name}, {gpu.architecture})" if gpu else ""
        tell(f"  {device.id:3}  {device.platform}  {device.device_kind}{chip}")

    tell("\nTPUs that programs can be compiled for here")
    tell(f"  {', '.join(TPUS)}" if libtpu.has_libtpu() else f"  none: {libtpu.install_hint()}")

    tell("\nCommands")
    for command, names in machine.ready().items():
        tell(f"  {command:22}{'lacks ' + ', '.join(names) if names else 'ready'}")

    lacking = machine.missing()
    tell("\nMissing" if lacking else "\nNothing is missing.")
    for item in lacking:
        tell(f"  {item.feature}: would bring {item.brings}\n      {item.command}")
    return 0 if devices else 1
