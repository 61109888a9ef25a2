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


@contextlib.contextmanager
def insistent_interrupt() -> Iterator[None]:
    """Makes SIGTERM an exception, `Terminated`, as Ctrl-C is one, and lets either come again every second until it
    leaves this block: Python drops one that is raised in a callback or a destructor, such as jax's of the garbage
    collector. Outside the main thread nothing changes; nor does SIGTERM where the parent lets it be ignored.
    """
    if not in_main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    kind: type[KeyboardInterrupt] = KeyboardInterrupt

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal kind
        if number != signal.SIGALRM:
            kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise kind

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
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_taken(stop: KeyboardInterrupt) -> int:
    """Ends the coming again, and gives the exit status: who has caught the interrupt needs time to save what there is.
    The next one interrupts that, too.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 143 if isinstance(stop, Terminated) else 130


def interrupt_ends_process() -> None:
    """From here on Ctrl-C ends the process at once. For the end of a command: what the interpreter still closes would
    print a traceback for each callback that an exception meets.
    """
    if in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
