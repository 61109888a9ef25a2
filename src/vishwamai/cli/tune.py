"""Searches the tiles of operations for TPUs that are not here, by the schedule that their compiler makes.

vishwamai tune --ops norm --targets v5e,v6e
vishwamai tune --quick
vishwamai tune --check
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
from typing import Any

from vishwamai.cli.console import console, progress
from vishwamai.cli.function import CommandError
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import CHIPS, chip

SUMMARY = "search the tiles of the kernels for TPUs that are not here"
OPS = ("attention", "gated", "loss", "matmul", "moe", "norm", "paged_attention", "rope", "softmax", "sparse")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(OPS), help=f"which, comma-separated (default: {','.join(OPS)})")
    parser.add_argument(
        "--targets", default=",".join(CHIPS), help=f"which chips, comma-separated (default: {','.join(CHIPS)})"
    )
    parser.add_argument("--cases", help="only cases whose name contains this")
    parser.add_argument(
        "--directory", type=pathlib.Path, help="where the tables go (default: the user's own, VISHWAMAI_TUNING_DIR)"
    )
    parser.add_argument(
        "--budget", type=int, default=24, help="programs to compile for each case and chip at most (default: 24)"
    )
    parser.add_argument("--workers", type=int, default=1, help="compiler processes at a time (default: 1)")
    parser.add_argument("--again", action="store_true", help="search also what the tables have")
    parser.add_argument(
        "--check",
        action="store_true",
        help="search nothing: estimate what the tables have again, those that ship unless --directory names others; fails where an entry is stale",
    )
    parser.add_argument("--quick", action="store_true", help="one case of each op, one chip (v5e), three programs each")


def _cases(op: str, wanted: str | None, quick: bool) -> list[Any]:
    if op not in OPS:
        raise CommandError(f"--ops: there is no operation {op!r}; there are {', '.join(OPS)}.")
    cases = [case for case in importlib.import_module(f"vishwamai.ops.{op}.cases").CASES if "model" in case.tags]
    if wanted:
        cases = [case for case in cases if wanted in case.name]
    return cases[:1] if quick else cases


def _check(arguments: argparse.Namespace, targets: list[str]) -> int:
    """Estimates the entries of the tables again and tells which no longer stand."""
    from vishwamai.aot.recheck import recheck
    from vishwamai.aot.tables import entries, shipped

    wanted = [
        entry
        for entry in entries(arguments.directory or shipped())
        if entry.target in targets
        and entry.op in arguments.ops.split(",")
        and (arguments.cases or "") in entry.evidence["case"]
    ]
    stale = 0
    with progress() as bar:
        task = bar.add_task("checking", total=len(wanted))
        for entry in wanted:
            try:
                found = recheck(entry, arguments.workers)
            except KernelError as error:
                complaint, said = str(error), ""
            else:
                complaint, said = found.complaint, f"{entry}: {found.seconds * 1e6:.1f} us (estimate), stands"
            stale += complaint is not None
            bar.advance(task)
            console().print(complaint or said, highlight=False)
    console().print(f"{len(wanted)} entries, {stale} stale" + ("; search those again with --again." if stale else "."))
    return 1 if stale else 0


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot.tuner import Outcome, tune

    targets = ["v5e"] if arguments.quick else arguments.targets.split(",")
    for target in targets:
        chip(target)
    if arguments.check:
        return _check(arguments, targets)
    cases = [case for op in arguments.ops.split(",") for case in _cases(op, arguments.cases, arguments.quick)]
    if not cases:
        raise CommandError(f"--cases: no case of {arguments.ops} has {arguments.cases!r} in its name.")
    with progress() as bar:
        task = bar.add_task("tuning", total=len(cases) * len(targets))

        def tell(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total)
            console().print(text, highlight=False)

        outcomes = tune(
            cases,
            targets,
            directory=arguments.directory,
            budget=3 if arguments.quick else arguments.budget,
            workers=arguments.workers,
            again=arguments.again,
            progress=tell,
        )
    tuned = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    better = sum(outcome.changed for outcome in tuned)
    console().print(
        f"{len(tuned)} searched, {better} better than the heuristic, {len(outcomes) - len(tuned)} without tiles to search."
    )
    return 0
