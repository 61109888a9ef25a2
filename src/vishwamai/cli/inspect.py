"""Estimates how a function runs on a TPU that is not here: time, units, roofline, what bounds it and what to try.

vishwamai inspect vishwamai:rms_norm --args 'bf16[8192,4096], bf16[4096]' --target v5e
vishwamai inspect mymodel.layers:block --target v6e --report block.html --flops 2.2e12
"""

from __future__ import annotations

import argparse
import json
import pathlib

from vishwamai.cli import function

SUMMARY = "estimate a function's time on a TPU that is not here, and what bounds it"


def configure(parser: argparse.ArgumentParser) -> None:
    function.add_arguments(parser)
    parser.add_argument(
        "--target",
        action="append",
        metavar="CHIP",
        help='"v4", "v5e", "v5p", "v6e" or "tpu7x"; may be given more than once (default: v5e)',
    )
    parser.add_argument("--flops", type=float, help="useful FLOP of the call; default: the compiler's count")
    parser.add_argument(
        "--bytes", type=float, help="useful bytes to and from HBM; default: all arguments and results once"
    )
    parser.add_argument(
        "--report", metavar="OUT.html", help="also write a page; with several targets, one each: OUT-<target>.html"
    )
    parser.add_argument("--json", metavar="OUT.json", help="also write the figures")


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot import Case, Schedule, inspect_many

    call = function.load_call(arguments.function, arguments.args)
    targets = arguments.target or ["v5e"]
    cases = [
        Case(call.function, call.args, call.kwargs, target, arguments.flops, arguments.bytes, name=call.name)
        for target in targets
    ]
    written = []
    status = 0
    for target, found in zip(targets, inspect_many(cases)):
        if not isinstance(found, Schedule):
            print(f"{call.name} on {target}: {found}\n")
            status = 1
            continue
        print(f"{found.table()}\n")
        written.append(found.as_dict())
        if arguments.report:
            path = pathlib.Path(arguments.report)
            found.report(path if len(targets) == 1 else path.with_stem(f"{path.stem}-{target}"))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(written, indent=1) + "\n")
    return status
