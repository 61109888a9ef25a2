"""A training step of Llama 3.1 8B next to MaxText's own, by their compiled programs for a TPU slice that is not here.

Both programs: AdamW in float32, products in bfloat16, gradients added up in bfloat16, FSDP over all devices, rows of
2048 tokens, everything recomputed in the backward pass. Memory is the compiler's; the time is that of
`planning.time.program_time` for both: kernels by their schedules, links by the model, every loop as often as it runs.
XLA's fusions have the cycles that it estimates, or the time of their schedules; MaxText gets the shorter one. Ours has
schedules alone where jaxlib cannot read the cycles back, on v5p and v6e. MaxText is compiled as it is, with XLA's
windowed einsum off, and on v5p and v6e also with its collectives on the SparseCores, as ours are. "compile" are the CPU
seconds of all threads; tracing is not in them.

MaxText has an environment of its own (Python 3.12 or newer: `pip install --no-deps maxtext==0.2.5`, and what its
requirements list but the linters, jinja2 and libtpu), whose Python is named:

    python benchmarks/plans.py maxtext --maxtext maxtext-env/bin/python --targets v5e:4x4,v5p:2x2x4,v6e:4x4
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from subjects.plans.published import LLAMA_8B

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.options.config import option_text
from vishwamai.aot.schedule.dump import dump_flags
from vishwamai.core.environment import libtpu_environment
from vishwamai.core.target import Target, devices_of
from vishwamai.planning.memory.allocation import training_config
from vishwamai.planning.memory.compiler import TEXT, Compiler
from vishwamai.planning.time.program_time import StepTime, time_program, written_time
from vishwamai.planning.training import trace_training
from vishwamai.training.compiling import ON_SPARSE_CORES

TOPOLOGIES = {"v5e:4x4": "v5e-16", "v5p:2x2x4": "v5p-32", "v6e:4x4": "v6e-16"}
"""How MaxText names the slices."""

LENGTH = 2048
WAYS: dict[str, dict[str, Any]] = {
    "MaxText": {},
    "MaxText, no windowed einsum": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000},
}
WAYS["MaxText, no windowed einsum, SparseCores"] = WAYS["MaxText, no windowed einsum"] | ON_SPARSE_CORES
"""Options of libtpu, by the name of a row; the last ones for chips whose SparseCores take collectives."""


def maxtext(python: str, target: str, rows: int, options: Mapping[str, Any]) -> tuple[StepTime, float]:
    """Its step, and the CPU seconds that its compilation took."""
    flags = (f"--{name}={option_text(value)}" for name, value in options.items())
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        settings = {
            "compile_topology": TOPOLOGIES[target],
            "compile_topology_num_slices": 1,
            "model_name": "llama3.1-8b",
            "per_device_batch_size": rows,
            "max_target_length": LENGTH,
            "remat_policy": "full",
            "dataset_type": "synthetic",
            "enable_checkpointing": "false",
        }
        run = subprocess.run(
            [
                python,
                str(pathlib.Path(__file__).parents[2] / "engines" / "maxtext_compile.py"),
                folder,
                *(f"{key}={value}" for key, value in settings.items()),
            ],
            env=os.environ
            | libtpu_environment()
            | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1"}
            | {"LIBTPU_INIT_ARGS": " ".join((dump_flags(directory), *flags))},
            capture_output=True,
            text=True,
            check=False,
        )
        facts_path = directory / "told.json"
        if run.returncode or not facts_path.exists():
            sys.exit(f"MaxText was not compiled:\n{(run.stdout + run.stderr)[-2000:]}")
        facts: dict[str, Any] = json.loads(facts_path.read_text())
        device_at = {(*device.coords, device.core_on_chip): device for device in libtpu.devices_for(target)}
        devices = [device_at[tuple(place)] for place in facts["devices"]]
        by_cycles = written_time(directory, target, devices, facts["memory"])
        (directory / TEXT).unlink(missing_ok=True)
        by_schedules = written_time(directory, target, devices, facts["memory"])
        return min(by_cycles, by_schedules, key=lambda estimate: estimate.step.value), facts["compile_cpu_seconds"]


def ours(target: str, rows: int) -> tuple[StepTime | None, float]:
    """No time where it does not fit; the CPU seconds are those of the compiler's process, its start included."""
    model = LLAMA_8B | {"max_position_embeddings": LENGTH}
    keys = {"remat": "full", "model": {"reduce_dtype": "bfloat16"}}
    config = training_config(model, keys, target, rows * devices_of(target), LENGTH)
    program = trace_training(config, target)  # which asks a process of its own about the options
    before = _children()
    with Compiler(timeout=7200) as compiler:
        step_time = time_program(compiler, program)[1]
    return step_time, _children() - before


def _ways(target: str) -> dict[str, dict[str, Any]]:
    sparse = Target.parse_chip(target).sparse_collectives
    return {name: options for name, options in WAYS.items() if sparse or not ON_SPARSE_CORES.keys() <= options.keys()}


def _children() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(name: str, step_time: StepTime, compiled: float) -> None:
    """One row, and its parts; the time of a program that was compiled before is kept."""
    seconds = f", {compiled:.0f} CPU seconds to compile" if compiled > 1 else ", compiled before"
    print(
        f"{name}: {step_time.step.value:.3f} s, {step_time.memory.total.value / 2**30:.2f} GiB{seconds}\n{step_time}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e:4x4", help=f"of {', '.join(TOPOLOGIES)}")
    parser.add_argument("--rows", type=int, default=2, help="on each device")
    parser.add_argument("--maxtext", metavar="PYTHON", help="of an environment with MaxText; left out: ours alone")
    chosen = parser.parse_args()
    for target in chosen.targets.split(","):
        if target not in TOPOLOGIES:
            parser.error(f"--targets: MaxText's name of {target} is not known; pass some of {', '.join(TOPOLOGIES)}.")
    for target in chosen.targets.split(","):
        mine, seconds = ours(target, chosen.rows)
        if mine is None:
            print(f"{target}: ours does not fit")
            continue
        show(f"{target}: vishwamai", mine, seconds)
        for name, options in _ways(target).items() if chosen.maxtext else ():
            theirs, compiled = maxtext(chosen.maxtext, target, chosen.rows, options)
            show(f"{target}: {name}", theirs, compiled)
            time, memory = mine.step.value / theirs.step.value, mine.memory.total.value / theirs.memory.total.value
            print(f"{target}: ours / {name}: {time:.3f} of the time, {memory:.3f} of the memory", flush=True)
