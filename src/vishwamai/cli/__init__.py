"""The `vishwamai` command.

Every subcommand is a module of this package with three names: `SUMMARY` (its line in the help), `configure(parser)` (its options) and
`run(arguments) -> int` (its exit status). A new one is added to `COMMANDS`; nothing else knows them by name.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import vishwamai
from vishwamai.aot import libtpu
from vishwamai.core.errors import VishwamaiError

COMMANDS = ("bench", "doctor", "check", "inspect", "tune", "explain", "matrix")


def parser() -> argparse.ArgumentParser:
    """The command's parser, with every subcommand's options."""
    top = argparse.ArgumentParser(
        prog="vishwamai", description="Transformer kernels on TPU, GPU and CPU: measure, check, explain."
    )
    top.add_argument("--version", action="version", version=f"vishwamai {vishwamai.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"vishwamai.cli.{name}")
        sub = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(sub)
        sub.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; `arguments` default to the process's own.

    Returns:
      0 if all is well, 1 if the command ran and found something wrong, 2 if it could not do what it was asked.
    """
    # jax loads libtpu where it is installed, which would otherwise ask a metadata server that a laptop does not have.
    for name, value in libtpu.environment().items():
        os.environ.setdefault(name, value)
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except VishwamaiError as error:
        print(f"vishwamai {chosen.command}: {error}", file=sys.stderr)
        return 2
