"""Ctrl-C and SIGTERM that reach the command, so that it ends its processes and removes its temporary files."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from vishwamai.core.threads import in_main_thread


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C cleans up, it cleans up too."""


_pending: type[KeyboardInterrupt] | None = None
"""The interrupt of `insistent_interrupt` that has not left its block yet."""

_deferred = False
"""Whether it waits for the end of a `deferred_interrupt`."""


@contextlib.contextmanager
def insistent_interrupt() -> Iterator[None]:
    """Makes SIGTERM an exception, `Terminated`, as Ctrl-C is one, and lets either come again every second until it
    leaves this block: Python drops one that is raised in a callback or a destructor, such as jax's of the garbage
    collector. Outside the main thread nothing changes; nor does SIGTERM where the parent lets it be ignored.
    """
    if not in_main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _pending
        if number != signal.SIGALRM:
            _pending = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if _pending is not None and not _deferred:  # an alarm may come after who has caught the interrupt
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            raise _pending

    def report(dropped: sys.UnraisableHookArgs) -> None:
        if not (dropped.exc_type and issubclass(dropped.exc_type, KeyboardInterrupt)):
            hook(dropped)

    signals = [signal.SIGINT, signal.SIGALRM]
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signals.append(signal.SIGTERM)
    before = {number: signal.signal(number, interrupt) for number in signals}
    hook, sys.unraisablehook = sys.unraisablehook, report
    try:
        yield
    except Exception:
        raise_interrupt()
        raise
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        _end_repetition()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Lets an interrupt of `insistent_interrupt` wait until this block has ended."""
    global _deferred
    _deferred = True
    try:
        yield
    finally:
        _deferred = False
    raise_interrupt()


def raise_interrupt() -> None:
    """Raises the interrupt that a library turned into another exception, such as jax's `is_constant_dim`, which takes
    whatever is raised in it for a no. For an `except Exception` that would count the other exception as a result.

    Raises:
      KeyboardInterrupt: `insistent_interrupt` has raised it, and it has neither left that block nor been caught by who
        called `interrupt_taken`.
    """
    if _pending is not None:
        raise _pending


def _end_repetition() -> None:
    global _pending
    _pending = None
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt_taken(stop: KeyboardInterrupt) -> int:
    """Ends the coming again, and gives the exit status: who has caught the interrupt needs time to save what there is.
    The next one interrupts that, too.
    """
    if hasattr(signal, "setitimer"):
        _end_repetition()
    return 143 if isinstance(stop, Terminated) else 130


def interrupt_ends_process() -> None:
    """From here on Ctrl-C ends the process at once. For the end of a command: what the interpreter still closes would
    print a traceback for each callback that an exception meets.
    """
    if in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
