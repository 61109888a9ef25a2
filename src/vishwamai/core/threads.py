"""Which thread this is."""

from __future__ import annotations

import threading


def in_main_thread() -> bool:
    """Whether the main thread asks, which alone gets signals and may say what they do.

    >>> in_main_thread()
    True
    """
    return threading.current_thread() is threading.main_thread()
