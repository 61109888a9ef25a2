"""Compiles the cases of `vishwamai bench` for TPUs and stores their schedules, which its table of TPUs shows.

    python tools/bench_schedules.py                     # what is not stored yet, of every chip; hours
    python tools/bench_schedules.py v5e --ops gemm      # one chip, one operation
    python tools/bench_schedules.py v5e --anew          # after a change of kernels
    python tools/bench_schedules.py --limit 60          # no case for longer than a minute

The first case of every operation comes first, on every chip. It writes after every case and may be stopped at any time.
A program that has compiled within the limit, but whose schedule was not followed to its end, gets a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

from vishwamai import aot
from vishwamai.bench import runner, schedules, targets
from vishwamai.core.cases import Case
from vishwamai.core.hardware import TPUS
from vishwamai.ops import catalogue


def make(operation: catalogue.Operation, case: Case, target: str, version: str, limit: float | None = None) -> None:
    """Compiles one case for one chip and stores its row; before its schedule is followed one that says that it was not
    followed `limit` so many seconds.
    """
    row = targets.compile_case(operation, case, target)
    if limit is not None and not row.problem:
        why = f"not timed: its schedule was not followed to its end within {limit:g} s"
        schedules.write(target, version, [dataclasses.replace(row, problem=why)], schedules.directory())
    row = targets.scheduled([row], [(operation, case)], 1)[0]
    schedules.write(target, version, [row], schedules.directory())
    print(f"{target}: {operation.name}: {case.name}: {row.seconds}", flush=True)


def make_within(seconds: float, operation: str, case: str, target: str) -> None:
    """`make` in a process of its own, which ends, its compilers with it, after `seconds`."""
    command = [sys.executable, __file__, target, "--ops", operation, "--case", case, "--anew", "--within", str(seconds)]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            why = f"exit status {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            why = f"not ended after {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode != 0:
        print(f"{target}: {operation}: {case}: no time, {why}", flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"chips: {', '.join(TPUS)} (default: all)")
    parser.add_argument("--ops", help="these operations only, such as attention,norm")
    parser.add_argument("--case", help="the case of this name only")
    parser.add_argument("--anew", action="store_true", help="what is stored already, too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--limit", type=float, help="seconds for a case and chip; what takes longer has no time")
    parser.add_argument("--within", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    version = str(aot.versions()["libtpu"])
    operations = catalogue.chosen(arguments.ops.split(",") if arguments.ops else None)
    start = time.monotonic()
    for operation, case in runner.by_turns(runner.planned(operations, runner.BenchSettings.all())):
        if arguments.case not in (None, case.name):
            continue
        for target in arguments.targets or TPUS:
            stored = schedules.stored(operation.name, case.name, target)
            if stored is not None and schedules.libtpu(target) == version and not arguments.anew:
                continue
            if time.monotonic() - start > 60 * arguments.minutes:
                return
            if arguments.limit is None:
                make(operation, case, target, version, arguments.within)
            else:
                make_within(arguments.limit, operation.name, case.name, target)


if __name__ == "__main__":
    sys.exit(main())
