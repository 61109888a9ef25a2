"""Where a command writes. What an option names is tried while the command line is read, before any work, so that a
wrong path costs none; a default is checked by the command.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vishwamai.cli.function import CommandError
from vishwamai.core import caches
from vishwamai.models.remote import why_not_local


class File(argparse.Action):
    """An option that names a file to write: `parser.add_argument(..., type=Path, action=output.File)`."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        check_file(values, self.option_strings[0])
        setattr(namespace, self.dest, values)


class Directory(argparse.Action):
    """An option that names a directory to write files into."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        check_directory(values, self.option_strings[0])
        setattr(namespace, self.dest, values)


def check_file(path: Path, option: str) -> None:
    """Raises `CommandError` where no file can be written at `path`, which `option` gave."""
    _check_local(path, option)
    try:
        if path.is_dir():
            raise CommandError(f"{option}: {path} is a directory; name a file in it.")
        if caches.is_special(path):  # a device or a pipe, such as /dev/stdout: it is written, and stays
            _check_access(path, option)
            return
        _try_directory(Path(os.path.realpath(path)).parent, path.parent, option)
        _check_access(path, option)
    except OSError as error:
        raise CommandError(f"{option}: {path} cannot be written: {error.strerror}; choose another file.") from error


def check_directory(path: Path, option: str) -> None:
    """Raises `CommandError` where `path` is not a directory, and cannot become one, in which files can be made."""
    _check_local(path, option)
    try:
        ancestor = path.absolute()
        while not _is_there(ancestor):
            ancestor = ancestor.parent
        _try_directory(ancestor, ancestor, option)
    except OSError as error:
        raise CommandError(f"{option}: {path} cannot be made: {error.strerror}; choose another directory.") from error


def _check_local(path: Path, option: str) -> None:
    if reason := why_not_local(path):
        raise CommandError(f"{option}: {reason}.")


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _check_access(path: Path, option: str) -> None:
    if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
        raise CommandError(f"{option}: {path} may not be written; choose another file, or change its permissions.")


def _try_directory(path: Path, name: Path, option: str) -> None:
    """Makes a file in a directory and removes it; errors have its `name`."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise CommandError(f"{option}: the directory {name} {problem}; make it, or choose another.")
    try:
        caches.try_directory(path)
    except OSError as error:
        raise CommandError(
            f"{option}: no file can be made in {name}: {error.strerror}; choose another directory."
        ) from error
