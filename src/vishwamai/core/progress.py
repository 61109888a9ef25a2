"""What long work is doing, on stderr, once it takes longer than a second."""

from __future__ import annotations

import threading
import time

from vishwamai.core import logs

_EVERY, _AGAIN = 1.0, 10.0
"""Seconds after which new words are shown, and after which the same ones are shown again."""


def write(text: str, start: float) -> None:
    """A line of the log, after the seconds since `start`, a time of `time.monotonic`."""
    logs.say(text, f"[{time.monotonic() - start:4.0f} s] {text}")


class Progress:
    """A context whose `say` tells what is being done; a thread writes it, so that silent work shows, too.

    >>> with Progress("profile") as progress:  # over within a second, so nothing is shown
    ...     progress.say("compiling")
    """

    def __init__(self, name: str):
        self._name, self._text = name, "starting"
        self._start, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def say(self, text: str) -> None:
        """What is being done from now on."""
        self._text = text

    def _show(self) -> None:
        printed, printed_at = "", 0.0
        while not self._over.wait(_EVERY):
            now = time.monotonic()
            if self._text != printed or now - printed_at >= _AGAIN:
                printed, printed_at = self._text, now
                write(f"{self._name}: {printed}", self._start)
