"""Memory of this process that the allocator keeps although it was freed."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable


def give_back() -> None:
    """Gives memory that was freed back to the system. Compilers leave much of it, in pieces that glibc keeps for later.

    Elsewhere than on glibc, garbage is collected, and that is all.
    """
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no glibc; on Windows None is not a library
        return None
