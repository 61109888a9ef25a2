"""Searches the tiles of operations for TPUs you do not have, by the schedule that their compiler makes.

Every case is written as soon as it is searched, and the tables' own are passed over: after Ctrl-C, the same command
goes on.

vishwamai tune --ops norm --target v5e --target v6e
vishwamai tune --quick
vishwamai tune --check
"""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from vishwamai.cli import options, output
from vishwamai.cli.console import tell
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Steps
from vishwamai.core import logs
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.core.interrupt import interrupt_taken
from vishwamai.core.target import Target

if TYPE_CHECKING:
    from vishwamai.core.cases import Case
    from vishwamai.ops.catalogue import Operation


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="A,B", help="these operations only (default: all that have a TPU kernel)")
    options.add_target(parser, f"which chips (default: {', '.join(TPUS)})")
    parser.add_argument("--cases", help="only cases whose name contains this")
    parser.add_argument(
        "--directory",
        type=pathlib.Path,
        help="where the tables go (default: the user's own, VISHWAMAI_TUNING_DIR)",
    )
    parser.add_argument(
        "--budget", type=int, default=24, help="programs to compile for each case and chip at most (default: 24)"
    )
    parser.add_argument("--workers", type=int, default=1, help="compiler processes at a time (default: 1)")
    parser.add_argument("--again", action="store_true", help="search also what the tables have")
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "search nothing: estimate what the tables have again, those that ship unless --directory names others; "
            "fails where an entry is stale"
        ),
    )
    parser.add_argument("--quick", action="store_true", help="one case of each op, one chip (v5e), three programs each")


def _operations(names: str | None) -> list[Operation]:
    """The operations that are named; without names, those with a kernel whose tiles the compiler's schedule can
    rank.
    """
    from vishwamai.ops.catalogue import chosen

    if names is not None:
        return chosen(names.split(","))
    return [op for op in chosen(None) if any(impl.platform == "tpu" for impl in op.op.implementations)]


def _cases(operation: Operation, pattern: str | None, quick: bool) -> list[Case]:
    cases = [case for case in operation.cases if "model" in case.tags]
    if pattern:
        cases = [case for case in cases if pattern in case.name]
    return cases[:1] if quick else cases


def _check(arguments: argparse.Namespace, targets: list[str]) -> int:
    """Estimates the entries of the tables again and tells which no longer stand."""
    from vishwamai.aot.tuning.recheck import recheck
    from vishwamai.aot.tuning.tables import entries, shipped

    names = {operation.name for operation in _operations(arguments.ops)}
    stored = [
        entry
        for entry in entries(arguments.directory or shipped())
        if entry.target in targets and entry.op in names and (arguments.cases or "") in entry.evidence["case"]
    ]
    stale = 0
    with Steps() as steps:
        on_case = steps.on_case("checking")
        for done, entry in enumerate(stored):
            on_case(done, len(stored), str(entry))
            try:
                verdict = recheck(entry, arguments.workers)
            except KernelError as error:
                complaint, summary = str(error), ""
            else:
                complaint, summary = verdict.complaint, f"{entry}: {verdict.seconds * 1e6:.1f} us (estimate), stands"
            stale += complaint is not None
            tell(complaint or summary)
    tell(f"{len(stored)} entries, {stale} stale" + ("; search those again with --again." if stale else "."))
    return 1 if stale else 0


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot.tuning.tuner import Outcome, tune

    names = ["v5e"] if arguments.quick else arguments.target or TPUS
    targets = [Target.parse_chip(name).name for name in names]
    for option in ("budget", "workers"):
        if getattr(arguments, option) < 1:
            raise CommandError(f"--{option} is {getattr(arguments, option)}; pass a whole number from 1 on.")
    if arguments.check:
        return _check(arguments, targets)
    if arguments.directory is not None:
        output.check_directory(arguments.directory, "--directory")
    operations = _operations(arguments.ops)
    cases = [case for op in operations for case in _cases(op, arguments.cases, arguments.quick)]
    if not cases:
        names = ", ".join(op.name for op in operations)
        raise CommandError(f"--cases: no case of {names} has {arguments.cases!r} in its name.")
    names = [f"{target} {case.op}: {case.name}" for target in targets for case in cases]
    finished = 0
    with Steps() as steps:
        on_case = steps.on_case("tuning")
        on_case(0, len(names), names[0])

        def on_outcome(done: int, total: int, text: str) -> None:
            nonlocal finished
            finished = done
            on_case(done, total, names[done] if done < total else "done")
            tell(text)

        try:
            outcomes = tune(
                cases,
                targets,
                directory=arguments.directory,
                budget=3 if arguments.quick else arguments.budget,
                workers=arguments.workers,
                again=arguments.again,
                progress=on_outcome,
            )
        except KeyboardInterrupt as stop:
            status = interrupt_taken(stop)
            again = ", without --again for what is left" if arguments.again else ""
            logs.report(
                "tune",
                f"interrupted after {finished} of {len(names)} cases, which are in the tables; the same command goes "
                f"on{again}.",
            )
            return status
    tuned = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    better = sum(outcome.changed for outcome in tuned)
    tell(
        f"{len(tuned)} searched, {better} better than the heuristic, {len(outcomes) - len(tuned)} without tiles to "
        "search."
    )
    return 0
