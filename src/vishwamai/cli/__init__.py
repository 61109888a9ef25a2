"""The `vishwamai` command.

Every subcommand is a module of this package with two names, `configure(parser)` (its options) and
`run(arguments) -> int` (its exit status), and a line in `COMMANDS`; nothing else knows them by name. The module of the
command that was asked for is loaded, and no other.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
import textwrap
from collections.abc import Sequence

import vishwamai
from vishwamai.core import logs
from vishwamai.core.environment import libtpu_environment, share_threads
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.interrupt import Terminated, deferred_interrupt, insistent_interrupt, interrupt_ends_process

COMMANDS = {
    "generate": "continue a prompt with a model that Hugging Face's directory holds",
    "serve": "serve a model over HTTP, in OpenAI's form",
    "compile": "compile the programs of a server for a TPU you do not have, so that its start reads them",
    "evaluate": "perplexity of a model on a text, in the form that is served, and its distance from the float model",
    "quantize": "write a model with rounded weights in the form of compressed-tensors",
    "bench": "check and time every operation that this machine can run, compared with the framework's own",
    "doctor": "what this machine has, what is missing, and the command that fixes it",
    "check": "compile a function for a TPU you do not have; memory and errors in words",
    "inspect": "estimate a function's time on a TPU you do not have, and what bounds it",
    "tune": "search the tiles of the kernels for TPUs you do not have",
    "explain": "which implementation runs for every operation in a function, and why not the others",
    "matrix": "the support matrix: which implementation serves which dtype and feature",
    "train": "trains a language model from text files to a checkpoint that serves",
    "plan": "memory and time of a training step, a served model or a function on TPUs you do not have",
    "calibrate": "measures operations and a layer on a TPU next to their estimates, and corrects those",
    "cache": "show or clear what is kept between runs",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
}
"""The subcommands, with their lines in the help."""

EXIT_STATUS = (
    "Exit status: 0 all is well; 1 the command ran and found something wrong; 2 it could not do what it was asked; 130 "
    "stopped by Ctrl-C; 143 stopped by SIGTERM."
)

LONG = frozenset(
    {
        "generate",
        "serve",
        "compile",
        "evaluate",
        "quantize",
        "bench",
        "check",
        "inspect",
        "tune",
        "matrix",
        "train",
        "plan",
        "calibrate",
    }
)
"""Those that take long, and say at once that they have begun: loading jax alone takes a second or more."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """A command's docstring as wide as the terminal; its examples, to be pasted, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            paragraph if paragraph.lstrip().startswith("vishwamai ") else textwrap.fill(paragraph, width)
            for paragraph in paragraphs
        )


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a subcommand."""
    return _parsers(name)[1][name]


def _parsers(subcommand: str | None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command's parser and its subcommands' parsers; only `subcommand` has its options."""
    top = argparse.ArgumentParser(
        prog="vishwamai",
        description=(
            "Transformer kernels on TPU, GPU and CPU, and the system on them: generate, serve, train and plan language "
            "models; bench, check, inspect, tune and explain kernels."
        ),
        epilog=EXIT_STATUS,
    )
    top.add_argument("--version", action="version", version=f"vishwamai {vishwamai.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=_Help)
        if name == subcommand:
            module = importlib.import_module(f"vishwamai.cli.{name}")
            sub.description = module.__doc__
            module.configure(sub)
            _add_log_options(sub)
            sub.set_defaults(run=module.run)
    return top, commands.choices


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log", "what the command says while it works, on standard error")
    group.add_argument(
        "--log-level", choices=logs.LEVELS, default="info", help="info: progress, and a server's requests (info)"
    )
    group.add_argument(
        "--log-format", choices=logs.FORMATS, default="text", help="json: an object a line, warnings and errors too"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; `arguments` default to the process's own.

    Returns:
      0 if all is well, 1 if the command ran and found something wrong, 2 if it could not do what it was asked, 130 if
      it was interrupted, 143 if SIGTERM ended it.
    """
    if arguments is not None:
        return _status(list(arguments))
    share_threads()
    for stream in (sys.stdout, sys.stderr):  # None where it is closed
        if isinstance(stream, io.TextIOWrapper):  # a locale without UTF-8 has no bytes for what a model may write
            stream.reconfigure(errors="backslashreplace")
    try:
        return _status(sys.argv[1:])
    finally:
        interrupt_ends_process()


def _status(arguments: list[str]) -> int:
    # The options before a subcommand take no values, so the first other word is its name.
    subcommand = next((argument for argument in arguments if not argument.startswith("-")), None)
    with logs.configured():
        status, message = _outcome(arguments, subcommand)
        if message is not None:
            logs.report(str(subcommand), message.removeprefix(f"{subcommand}: "), logging.ERROR)
    return status


def _outcome(arguments: list[str], subcommand: str | None) -> tuple[int, str | None]:
    """The exit status of a subcommand, and the error that ended it."""
    try:
        with insistent_interrupt():
            return _run(arguments, subcommand), None
    except VishwamaiError as error:
        return 2, str(error)
    except OSError as error:
        message = _without_room(error)
        if message is None:
            raise
        return 2, message
    except Terminated:
        return 143, "terminated"
    except KeyboardInterrupt:
        return 130, "interrupted"


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""A disk that is full, a quota or a limit that is reached, or a directory for reading only."""


def _without_room(error: OSError) -> str | None:
    """What a command says where a file could not be written for want of room; None for any other error."""
    if error.errno in _NO_ROOM:
        target = error.filename or "a file"
        return f"{target} could not be written: {error.strerror}. Make room, or choose another directory."
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error.strerror):  # tempfile's own words
        return f"temporary files could not be written: {error.strerror}. Make room there, or set TMPDIR to another."
    return None


def _run(arguments: list[str], subcommand: str | None) -> int:
    top, _ = _parsers(subcommand)
    chosen, rest = top.parse_known_args(arguments)
    # argparse does not count positionals after an option to a `nargs="*"` before it.
    if rest and (not hasattr(chosen, "overrides") or any(argument.startswith("-") for argument in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        chosen.overrides += rest
    logs.configure(chosen.log_level, chosen.log_format)
    if subcommand in LONG and not getattr(chosen, "in_process", None):
        from vishwamai.cli.progress import say

        say("loading jax")
    # jax loads libtpu where it is installed, which would otherwise ask a metadata server that a laptop does not have.
    for name, value in libtpu_environment().items():
        os.environ.setdefault(name, value)
    if subcommand in LONG:
        with deferred_interrupt():  # C++ that is being imported prints the traceback of an interrupt, or crashes
            importlib.import_module("jax")
    return chosen.run(chosen)
