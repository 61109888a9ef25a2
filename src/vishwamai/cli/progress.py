"""How far a command is: a bar that moves on a terminal, a line now and then on the standard error of a pipe."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vishwamai.cli.console import console, require_rich
from vishwamai.core import logs
from vishwamai.core.progress import write

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.progress_bar import ProgressBar
    from rich.text import Text

_EVERY = 10.0
"""Seconds between two lines, where there is no terminal."""


def duration(seconds: float) -> str:
    """
    >>> duration(59.6), duration(3.2), duration(4000)
    ('1 min 0 s', '3 s', '1 h 6 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def left(elapsed: float, done: float, total: float) -> float | None:
    """Seconds that the rest takes if it goes on as before; None before anything is done.

    >>> left(10.0, 2, 6), left(10.0, 0, 6)
    (20.0, None)
    """
    return elapsed / done * (total - done) if done > 0 else None


Say = Callable[..., None]
"""A line of progress, and the seconds that are left with it where they are known (`Countdown.say`)."""


def say(text: str) -> None:
    """A line of progress in the log, on standard error: standard output has results only."""
    logs.say(text, f"... {text}")


class _Shown:
    """What both kinds of progress share: a bar, where there is a terminal, which goes away at the end."""

    _bar: Progress | None = None
    _task: Any = None

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class Steps(_Shown):
    """The progress of a command, as a context: `start` names what is done next, `on_case` follows its parts.

    The bar is on standard output where that is a terminal, so that what is printed there stays above it, else on
    standard error where that is one.
    """

    def __init__(self) -> None:
        require_rich()
        self._start = self._printed = 0.0

    def __enter__(self) -> Steps:
        from rich.console import Console

        screen = console() if console().is_terminal else Console(stderr=True)
        if screen.is_terminal and logs.shows_bars():
            self._bar = _bar(screen, sys.stdout.isatty())
            self._bar.start()
        return self

    def start(self, activity: str, total: int = 1) -> None:
        """A new count, in place of the one before."""
        self._start = time.monotonic()
        if self._bar is None:
            self._say(activity)
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(activity, total=total)

    def on_case(self, verb: str) -> Callable[[int, int, str], None]:
        """A callback that moves the bar: `(done, total, name)`."""
        started = False

        def report(done: int, total: int, name: str) -> None:
            nonlocal started
            if not started and done == total:
                return
            if not started:
                self.start(f"{verb} {name}", total)
                started = True
            elif self._bar is not None:
                self._bar.update(self._task, completed=done, total=total, description=f"{verb} {name}")
            elif time.monotonic() - self._printed > _EVERY and done < total:
                rest = left(time.monotonic() - self._start, done, total)
                self._say(f"{verb} {done + 1}/{total} {name}" + (f", {duration(rest)} left" if rest else ""))

        return report

    def _say(self, text: str) -> None:
        self._printed = time.monotonic()
        say(text)


def _bar(screen: Any, redirect: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn
    from rich.text import Text

    class Left(ProgressColumn):
        """The time spent, and what is left of it."""

        def render(self, task: Task) -> Text:
            spent = task.elapsed or 0.0
            rest = left(spent, task.completed, task.total or 1)
            return Text(duration(spent) + (f", {duration(rest)} left" if rest else ""))

    return Progress(
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        Left(),
        _description(),
        console=screen,
        transient=True,
        redirect_stdout=redirect,
        expand=True,
    )


class Countdown(_Shown):
    """The progress of a command that estimates what is left, as a context: `say` tells what is done next.

    On standard error: a bar that fills as time goes by, where that is a terminal and rich is installed, else a line for
    each step.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __enter__(self) -> Countdown:
        if sys.stderr.isatty() and logs.shows_bars() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._bar = _countdown_bar(Console(stderr=True))
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def say(self, text: str, left: float | None = None) -> None:
        """What is done next, and the seconds that are left with it, where known."""
        if self._bar is not None:
            spent = time.monotonic() - self._start
            self._bar.update(self._task, description=text, total=None if left is None else spent + left)
            return
        rest = "" if left is None else f", about {duration(left)} left"
        write(f"{text}{rest}", self._start)


def count_report(progress: Countdown, start: str, text: str) -> Callable[[int, int], None]:
    """Shows how far work is, at most every two seconds.

    Args:
      progress: line or bar that shows it.
      start: text until the first count.
      text: text with two places, for the count and the total.

    Returns:
      A function that work calls with (count, total).
    """
    progress.say(start)
    started = last = time.monotonic()

    def report(count: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 2:
            last = now
            progress.say(text.format(count, total), left(now - started, count, total))

    return report


def _countdown_bar(screen: Any, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A bar whose total is the seconds that the whole is expected to take; None moves it to and fro."""
    from rich.progress import BarColumn, Progress, ProgressColumn
    from rich.text import Text

    class Spent(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            if task.total is not None:
                task.completed = min(task.elapsed or 0.0, task.total)
            return super().render(task)

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            spent = task.elapsed or 0.0
            rest = "" if task.total is None else f", about {duration(max(0.0, task.total - spent))} left"
            return Text(f"{duration(spent)}{rest}")

    return Progress(
        Spent(bar_width=10), Left(), _description(), console=screen, get_time=clock, transient=True, expand=True
    )


def _description() -> Any:
    from rich.progress import TextColumn
    from rich.table import Column

    column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return TextColumn("{task.description}", markup=False, table_column=column)
