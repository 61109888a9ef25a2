"""Memory of this process: what the allocator keeps although it was freed, and what garbage collection visits."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator


def give_back() -> None:
    """Gives memory that was freed back to the system. Compilers leave much of it, in pieces that glibc keeps for later.

    Elsewhere than on glibc, garbage is collected, and that is all.
    """
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """In the block, collections of garbage leave out what existed before it.

    A full collection visits the objects of a server's libraries, programs and tokenizer. With a tiny model that took
    0.1 to 0.4 s of a CPU, and no thread of Python goes on meanwhile.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no glibc; on Windows None is not a library
        return None
