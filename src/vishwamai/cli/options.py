"""The options that several commands share, with one spelling: `--target CHIP` and `--json [PATH]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vishwamai.cli import output
from vishwamai.cli.function import CommandError
from vishwamai.core import caches

STDOUT = Path("-")
"""The path of `--json` without one."""


class _Targets(argparse.Action):
    """Collects the names of an option that is repeated, or has commas between its names."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        names = [name.strip() for name in str(values).split(",") if name.strip()]
        if not names:
            raise CommandError(f'{self.option_strings[0]} is {values!r}; name a chip, such as "v5e".')
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *names])


def add_target(parser: argparse.ArgumentParser, help: str, metavar: str = "CHIP") -> None:
    """`--target`, whose attribute is a list of names, or None; `--targets` is its older spelling."""
    repeats = f"{help}; may be given more than once"
    parser.add_argument("--target", action=_Targets, metavar=metavar, help=repeats)
    parser.add_argument("--targets", action=_Targets, dest="target", metavar=metavar, help=argparse.SUPPRESS)


class _Json(output.File):
    """A path that ends in .json, which cannot be an argument of the command that follows by mistake."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if values == STDOUT:
            setattr(namespace, self.dest, values)
            return
        super().__call__(parser, namespace, values, option)
        if values.suffix != ".json" and not caches.is_special(values):
            raise CommandError(
                f"--json: {values} does not end in .json; name such a file, or write the other arguments of the "
                "command before --json."
            )


def add_json(parser: argparse.ArgumentParser, help: str, default: Path | None = None) -> None:
    """`--json [PATH]`, whose attribute is a path, `STDOUT` where none is named, or `default` without the option."""
    parser.add_argument(
        "--json",
        nargs="?",
        metavar="PATH",
        type=Path,
        action=_Json,
        const=default or STDOUT,
        default=default,
        help=help,
    )


def write_json(value: object, path: Path, indent: int | None = 2) -> None:
    """Writes a value where `--json` says."""
    text = json.dumps(value, indent=indent)
    if path == STDOUT:
        print(text, file=sys.stdout, flush=True)
    else:
        caches.write(path, text + "\n")
