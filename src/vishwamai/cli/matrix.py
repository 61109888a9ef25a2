"""Prints which implementation serves which dtype and feature, as the implementations themselves say over the contract's
cases.

"partly" means that some of the cases with the feature are declined; the numbered reasons stand under the table.
"""

from __future__ import annotations

import argparse

from vishwamai.cli import options


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="A,B", help="these operations only")
    options.add_target(parser, 'what serves this TPU, GPU or CPU ("v5e", "h100", "cpu:avx2"); default: every chip')
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--summary", action="store_true", help="only which implementations there are, as Markdown")


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot.compile import libtpu
    from vishwamai.bench import matrix
    from vishwamai.cli.progress import Steps
    from vishwamai.core.target import Target
    from vishwamai.ops import catalogue

    chosen = catalogue.chosen(None if arguments.ops is None else arguments.ops.split(","))
    if arguments.summary:
        print(matrix.summary(chosen))
        return 0
    targets = [Target.parse(name) for name in arguments.target or []] or [None]
    libtpu.local_devices()
    if arguments.markdown:
        for target in targets:
            print(matrix.markdown(matrix.matrix([operation.name for operation in chosen], target)))
        return 0
    cases = [(target, operation) for target in targets for operation in chosen]
    with Steps() as steps:
        on_case = steps.on_case("asking the kernels of")
        for done, (target, operation) in enumerate(cases):
            on_case(done, len(cases), operation.name)
            title = operation.name if len(targets) == 1 else f"{operation.name} on {target}"
            _print_table(title, matrix.rows_of(operation, target))
    return 0


def _print_table(op: str, rows: list) -> None:
    from vishwamai.cli.console import console, table, tell

    names = list(rows[0].cells)
    out = table(op, [op, *names])
    style = {"yes": "green", "no": "red", "partly": "yellow"}
    reasons: dict[str, None] = {}
    for row in rows:
        out.add_row(row.feature, *(f"[{style[row.cells[name].mark]}]{row.cells[name].mark}[/]" for name in names))
        for name in names:
            reasons |= dict.fromkeys(f"{name}: {reason}" for reason in row.cells[name].reasons)
    console().print(out)
    for reason in reasons:
        tell(f"  {reason}")
