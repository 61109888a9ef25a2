"""Compiles a function for a TPU you do not have and says in words whether it fits.

vishwamai check mymodel.layers:block --target v5e
vishwamai check vishwamai:rms_norm --args 'bf16[8192,4096]' \\
    --target v6e --target v5p

On a topology such as v5e:2x4, arguments without a sharding lie on every device, and XLA does not split kernels by
itself there: give the function's module an `example_args()` with shardings over a mesh of explicit axes, or wrap the
kernels in jax.shard_map.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile

from vishwamai.cli import function, options
from vishwamai.cli.console import tell
from vishwamai.cli.progress import Steps
from vishwamai.core import logs
from vishwamai.core.target import Target


def configure(parser: argparse.ArgumentParser) -> None:
    function.add_arguments(parser)
    slices = '"v4", "v5e", "v5p", "v6e", "tpu7x", or a slice such as "v5e:2x4" or "v5litepod-8" (default: v5e)'
    options.add_target(parser, slices)
    # What Python says then goes to this file descriptor; C++ code has stderr to itself.
    parser.add_argument("--in-process", type=int, metavar="FD", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    targets = arguments.target or ["v5e"]
    if arguments.in_process is not None:
        sys.stderr = os.fdopen(arguments.in_process, "w", buffering=1)
        return _check(arguments, targets)
    function.load_call(arguments.function, arguments.args)  # what is wrong with it is said once
    for target in targets:
        Target.parse_tpu(target)
    status = 0
    with Steps() as steps:
        on_case = steps.on_case("compiling for")
        for done, target in enumerate(targets):
            on_case(done, len(targets), target)
            status = max(status, _check_apart(arguments, target))
    return status


def _check(arguments: argparse.Namespace, targets: list[str]) -> int:
    from vishwamai.aot import check
    from vishwamai.aot.compile.libtpu import stderr_has_a_reader

    stderr_has_a_reader()
    call = function.load_call(arguments.function, arguments.args)
    reports = [check(call.function, *call.args, target=target, **call.kwargs) for target in targets]
    print(*reports, sep="\n", flush=True)
    for target, report in zip(targets, reports):
        if any(problem.kind == "hbm" for problem in report.problems):
            _explain(call, target)
    return 0 if all(report.fits for report in reports) else 1


def _explain(call: function.BoundCall, target: str) -> None:
    """Prints the contents of the memory at the peak, and which changes make it fit."""
    from vishwamai.planning.search.diagnosis import explain_memory

    print(explain_memory(call.function, *call.args, target=target, **call.kwargs))


def _check_apart(arguments: argparse.Namespace, target: str) -> int:
    """Checks in a process of its own, which libtpu may end: a failed check of its C++ code is not an exception. What
    C++ code prints, stack traces among it, is left out.
    """
    options = [] if arguments.args is None else ["--args", arguments.args]
    with tempfile.TemporaryFile("w+") as words:
        command = ["check", arguments.function, *options, "--target", target, "--in-process", str(words.fileno())]
        process = subprocess.run(
            [sys.executable, "-m", "vishwamai.cli", *command],
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[words.fileno()],
        )
        words.seek(0)
        said_in_python = words.read()
    if process.stdout:
        tell(process.stdout.removesuffix("\n"))
    if said_in_python:
        logs.say(said_in_python.removesuffix("\n"), level=logging.ERROR)
    if process.returncode >= 0:
        if process.returncode > 1 and not said_in_python:  # it ended before it could say why
            logs.say(process.stderr.removesuffix("\n"), level=logging.ERROR)
        return process.returncode
    from vishwamai.aot.compile import child

    message = (
        f"{target}: the compiler ended its process {child.ending(process.returncode)}, an error of libtpu: "
        f"{child.last_words(process.stderr) or 'it gave no reason'}"
    )
    logs.report("check", message, logging.ERROR)
    return 2
