"""A request to stop: SIGTERM or Ctrl-C lets the step end and saves; a second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from vishwamai.core.threads import in_main_thread


@dataclasses.dataclass(frozen=True)
class Stopped:
    """The end of a run before its last step.

    Attributes:
      step: steps taken, whose state the newest checkpoint holds.
      signal: number of the signal; SIGTERM in a process that stopped because another got a signal.
    """

    step: int
    signal: int = signal.SIGTERM

    @property
    def status(self) -> int:
        """The exit status of a process that this signal ends, as shells count: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + self.signal


class StopRequest(threading.Event):
    """An event that a signal sets; `number` is that of the first signal."""

    number: int = signal.SIGTERM


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """An event that SIGTERM and SIGINT set. Outside the main thread, which alone gets signals, it stays unset."""
    request = StopRequest()
    if not in_main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        if not request.is_set():
            request.number = number
        request.set()
        # A second SIGTERM is often the first one, sent to the parent too, which passes it on; SIGKILL ends at once.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
