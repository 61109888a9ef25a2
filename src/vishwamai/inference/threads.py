"""Threads with a stack that is larger than that of a trial of a grammar (`server.compilation`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

STACK = 64 << 20
"""Bytes of address space; a thread takes memory for what it uses of it."""


@contextlib.contextmanager
def roomy_stack() -> Iterator[None]:
    """Threads that start in this context have a stack of `STACK` bytes.

    >>> with roomy_stack():
    ...     threading.stack_size() >> 20
    64
    """
    before = threading.stack_size(STACK)
    try:
        yield
    finally:
        threading.stack_size(before)
