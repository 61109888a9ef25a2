"""A request to stop: SIGTERM or Ctrl-C lets the step end and saves; a second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from vishwamai.core.threads import in_main_thread


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. Outside the main thread, which alone gets signals, it stays unset."""
    asked = threading.Event()
    if not in_main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        # A second SIGTERM is often the first one, sent to the parent too, which passes it on; SIGKILL ends at once.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        restore()
