"""Compiles a function for a TPU that is not here and says in words whether it fits.

vishwamai check mymodel.layers:block --target v5e
vishwamai check vishwamai:rms_norm --args 'bf16[8192,4096]' --target v6e --target v5p

On a topology such as v5e:2x4, arguments without a sharding lie on every device, and XLA does not split kernels by itself there: give the function's
module an `example_args()` with shardings over a mesh of explicit axes, or wrap the kernels in jax.shard_map.
"""

from __future__ import annotations

import argparse

from vishwamai.cli import function

SUMMARY = "compile a function for a TPU that is not here; memory and errors in words"


def configure(parser: argparse.ArgumentParser) -> None:
    function.add_arguments(parser)
    parser.add_argument(
        "--target",
        action="append",
        metavar="CHIP",
        help='"v4", "v5e", "v5p", "v6e", "tpu7x", or a topology such as "v5e:2x4"; may be given more than once (default: v5e)',
    )


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot import check

    call = function.load_call(arguments.function, arguments.args)
    reports = [check(call.function, *call.args, target=target, **call.kwargs) for target in arguments.target or ["v5e"]]
    print(*reports, sep="\n")
    return 0 if all(report.fits for report in reports) else 1
