"""The terminal: lines as wide as it is, and rich's console and tables, or the command that installs them."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vishwamai.cli.function import CommandError
from vishwamai.core.installing import install_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def tell(text: object) -> None:
    """Prints lines. On a terminal those that are wider are broken between words; in a pipe each stays whole."""
    lines = str(text).split("\n")
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in broken(line, width)]
    print(*lines, sep="\n", flush=True)


def broken(line: str, width: int) -> list[str]:
    """The line in parts of at most `width` columns. The others begin under its last column, or two columns further in
    than it begins itself.

    >>> print(*broken("  xla   could serve, but another is preferred", 32), sep="\\n")
      xla   could serve, but another
            is preferred
    """
    if len(line) <= width:
        return [line]
    begins = len(line) - len(line.lstrip())
    columns = re.match(rf".{{{begins},30}}\S {{2,}}(?=\S)", line)
    indent = columns.end() if columns and columns.end() <= width // 2 else min(begins + 2, width // 2)
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def require_rich() -> None:
    """Raises `CommandError`, with the command that fixes it, where rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"tables and progress bars need the package rich: {install_line('cli')}.")


@functools.cache
def console() -> Console:
    """The console of standard output; a pipe or a file gets 160 columns, so that no table is squeezed."""
    require_rich()
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


def table(title: str, columns: Sequence[str], right: frozenset[str] = frozenset()) -> Table:
    """An empty table; the columns in `right` hold numbers."""
    require_rich()
    from rich import box
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result
