"""Compiles all programs of a server for a TPU you do not have, so that its start reads them.

  vishwamai compile DIR --target v6e-4 --output programs
  vishwamai serve DIR --programs programs

The first command runs on any Linux machine with libtpu and reads headers of the model only; the second one runs on the
TPU. Options of the model and of sizes are those of `serve`, and have to be the same there. --target cpu compiles for
this machine. Without --mesh, a slice of several chips is split by the axis tensor.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vishwamai.cli import model, model_options, options, output, serve
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown, left
from vishwamai.core.numbers import human


def configure(parser: argparse.ArgumentParser) -> None:
    model_options.add_model_options(parser, sequences=serve.SEQUENCES)
    model_options.add_adapter_sizes(parser, "none")
    parser.add_argument(
        "--target",
        required=True,
        metavar="CHIP",
        help='"v5e", "v5p", "v6e", "tpu7x", a slice such as "v6e-4" or "v6e:2x2", or "cpu", which is this machine',
    )
    parser.add_argument(
        "--output", "-o", type=Path, action=output.Directory, required=True, metavar="OUT", help="the new directory"
    )
    options.add_json(parser, "what was written, in JSON: on standard output, or in a file")


def run(arguments: argparse.Namespace) -> int:
    model.require_packages()
    if arguments.output.exists() and any(arguments.output.iterdir()):
        raise CommandError(f"--output: {arguments.output} is not empty; choose a new directory.")
    adapters = model_options.adapter_sizes(arguments, 0)
    target = _target(arguments)
    planned = model.plan(arguments, adapters, target)
    from vishwamai.inference.program_sets import write_set

    start = time.monotonic()
    with Countdown() as progress:

        def on_program(done: int, total: int, name: str) -> None:
            if name:
                rest = left(time.monotonic() - start, done, total)
                progress.say(f"compiling {done + 1}/{total}: {name}", rest)

        entries = write_set(planned, arguments.output, on_program)
    seconds, size = time.monotonic() - start, sum(entry.bytes for entry in entries)
    where = target or "this machine"
    if arguments.json is None:
        print(f"{arguments.output}: {len(entries)} programs for {where}, {human(size)}, compiled in {seconds:.0f} s")
        return 0
    programs = [{"name": entry.name, "bytes": entry.bytes, "seconds": entry.seconds} for entry in entries]
    values = {"output": str(arguments.output), "target": where, "mesh": planned.mesh, "bytes": size, "seconds": seconds}
    options.write_json({**values, "programs": programs}, arguments.json)
    return 0


def _target(arguments: argparse.Namespace) -> str | None:
    """The TPU or the slice, None for this machine; a slice of several devices gets a mesh where no option has one."""
    import jax

    from vishwamai.aot.compile import libtpu
    from vishwamai.core.target import Target

    if Target.parse(arguments.target).platform == "cpu":
        libtpu.local_devices()
        if jax.default_backend() != "cpu":
            raise CommandError(
                f"--target {arguments.target}: JAX uses the {jax.default_backend()} of this machine; set "
                "JAX_PLATFORMS=cpu, or name the TPU."
            )
        if arguments.mesh is not None:
            raise CommandError("--target cpu compiles for one device, because jaxlib mixes up collectives of several.")
        return None
    name = Target.parse_tpu(arguments.target).name
    count = len(libtpu.devices_for(str(name)))
    if count > 1 and arguments.mesh is None:
        arguments.mesh = f"tensor={count}"
    return name
