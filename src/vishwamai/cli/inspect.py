"""Estimates how a function runs on a TPU you do not have: time, units, roofline, what bounds it and what to try.

vishwamai inspect vishwamai:rms_norm --args 'bf16[8192,4096], bf16[4096]' \\
    --target v5e
vishwamai inspect mymodel.layers:block --target v6e --report block.html \\
    --flops 2.2e12
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
from collections.abc import Sequence

from vishwamai import reports
from vishwamai.cli import function, options, output
from vishwamai.cli.console import tell
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Steps


def configure(parser: argparse.ArgumentParser) -> None:
    function.add_arguments(parser)
    options.add_target(parser, '"v4", "v5e", "v5p", "v6e" or "tpu7x" (default: v5e)')
    parser.add_argument("--flops", type=float, help="useful FLOP of the call; default: the compiler's count")
    parser.add_argument(
        "--bytes", type=float, help="useful bytes to and from HBM; default: all arguments and results once"
    )
    parser.add_argument(
        "--report",
        metavar="OUT.html",
        type=pathlib.Path,
        action=output.File,
        help="also write a page; with several targets, one each: OUT-<target>.html",
    )
    options.add_json(parser, "print the figures as JSON in place of the tables, or write them to PATH next to them")


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot import Inspection, KernelSchedule, inspect_many
    from vishwamai.aot.schedule.inspection import check_one_device

    targets = arguments.target or ["v5e"]
    for target in targets:
        check_one_device("inspect", target)
    figures: pathlib.Path | None = arguments.json
    pages = _pages(arguments.report, targets)
    if pages and importlib.util.find_spec(reports.NEEDED) is None:
        raise CommandError(f"{reports.install_hint()}.")
    for path in pages:
        output.check_file(path, "--report")
    for option in ("flops", "bytes"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < float("inf"):
            raise CommandError(f"--{option} is {value}; pass a positive number.")
    call = function.load_call(arguments.function, arguments.args)
    entries = []
    status = 0
    with Steps() as steps:
        on_case = steps.on_case(f"compiling {call.name} for")
        for done, target in enumerate(targets):
            on_case(done, len(targets), target)
            case = Inspection(
                call.function, call.args, call.kwargs, target, arguments.flops, arguments.bytes, name=call.name
            )
            (schedule,) = inspect_many([case])
            if not isinstance(schedule, KernelSchedule):
                tell(f"{call.name} on {target}: {schedule}\n")
                status = 1
                continue
            if figures != options.STDOUT:
                tell(f"{schedule.table()}\n")
            entries.append(schedule.as_dict())
            if pages:
                schedule.report(pages[done])
            if figures is not None and figures != options.STDOUT:  # after each, so that an interrupt loses none
                options.write_json(entries, figures, indent=1)
    if figures == options.STDOUT:
        options.write_json(entries, options.STDOUT, indent=1)
    return status


def _pages(report: pathlib.Path | None, targets: Sequence[str]) -> list[pathlib.Path]:
    """Where the page of each target goes."""
    if report is None:
        return []
    if len(targets) == 1:
        return [report]
    return [report.with_stem(f"{report.stem}-{target.replace(':', '-')}") for target in targets]
