"""Compiles every Triton kernel, in the shapes of real models, with whatever Triton is installed, for Hopper and for the
MI300: does it compile, does it spill?

`make triton-newest` runs it with the newest release. It needs no GPU; the exit code is 1 if a kernel does not compile
or spills more than the pinned release's does (which spills nothing but what tests/gpu/test_gpu_code.py names).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from importlib import metadata

import jax

from vishwamai.aot.compile.gpu import Code, RecordedLaunch, inspect_launch, launches
from vishwamai.aot.compile.gpu_survey import model_cases
from vishwamai.core.errors import DeviceError

TARGETS: dict[str, int | str] = {"sm_90a": 90, "gfx942": "gfx942"}


def kernels(few: bool) -> dict[RecordedLaunch, str]:
    """Every launch of every model's shape, once, by the name of its case; `few`: of one case of each operation."""
    cases: dict[RecordedLaunch, str] = {}
    seen: set[str] = set()
    for case in model_cases():
        if few and case.op in seen:
            continue
        seen.add(case.op)
        for recorded in launches(case):
            key = dataclasses.replace(recorded, launch=dataclasses.replace(recorded.launch, grid=()))
            cases.setdefault(key, f"{case.op}: {case.name}")
    return cases


def compiled(recorded: RecordedLaunch, target: int | str) -> Code | str:
    """The code, or the first line of what the compiler says against it."""
    if isinstance(target, str):
        # An MI300 has 64 KiB of shared memory, where a Hopper multiprocessor has 227: fewer buffers.
        how = dataclasses.replace(recorded.launch, stages=min(2, recorded.launch.stages))
        recorded = dataclasses.replace(recorded, launch=how)
    import triton

    try:
        return inspect_launch(recorded, target)
    except (DeviceError, RuntimeError, triton.TritonError) as error:  # the compiler's own complaints
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="one model of each operation")
    options = parser.parse_args()
    print(f"triton {metadata.version('triton')}, jax {jax.__version__}", flush=True)
    every = kernels(options.few)
    bad = 0
    for name, target in TARGETS.items():
        start, outcome = time.perf_counter(), Counter()
        for recorded, case in every.items():
            code = compiled(recorded, target)
            if isinstance(code, str):
                outcome["failed"] += 1
                print(f"{name}  {case}  {recorded.launch.kernel.name}  {code}", flush=True)
            elif code.spill:
                outcome["spilled"] += 1
                print(f"{name}  {case}  {code.kernel}  spills {code.spill} bytes", flush=True)
            else:
                outcome["clean"] += 1
        print(f"{name}: {dict(outcome)} of {len(every)} launches, {time.perf_counter() - start:.0f} s", flush=True)
        bad += outcome["failed"] + (outcome["spilled"] if name == "sm_90a" else 0)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
