"""Rates of this host's processors and memory in seconds: copies of one processor and of all, and steadiness of clocks.

NumPy and hashlib release the interpreter's lock, so a thread on each processor does for both. Nothing here needs jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

COPY_BYTES = 32 << 20
"""Bytes of the array that a processor copies: beyond its share of most caches."""
_BLOCK = bytes(1 << 18)


@dataclasses.dataclass(frozen=True)
class Clocks:
    """How steady the processors' speed is, by a fixed piece of arithmetic.

    Attributes:
      all_cores: speed of a processor while all work, as a share of its speed while it works alone.
      slow: share of the pieces that took more than 1.2 times the median.
    """

    all_cores: float
    slow: float


def copy_rate(processors: Sequence[int], seconds: float, nbytes: int = COPY_BYTES) -> float:
    """Bytes/s that are read and written by copies, a thread on each processor.

    Args:
      processors: numbers of the processors.
      seconds: time for the copies.
      nbytes: bytes of the array that each thread copies.
    """
    size = max(1, nbytes // 8)

    def prepare() -> Callable[[], object]:
        source, target = np.ones(size), np.ones(size)
        return lambda: np.copyto(target, source)

    return sum(16 * size / statistics.median(samples) for samples in _on_each(processors, seconds, prepare))


def clocks(processors: Sequence[int], seconds: float) -> Clocks:
    """Half of the time with one processor, half with all."""

    def prepare() -> Callable[[], object]:
        return lambda: hashlib.sha256(_BLOCK).digest()

    single = statistics.median(_on_each(processors[:1], seconds / 2, prepare)[0])
    busy = _on_each(processors, seconds / 2, prepare)
    medians = [statistics.median(samples) for samples in busy]
    slow = [sample > 1.2 * median for samples, median in zip(busy, medians) for sample in samples]
    return Clocks(min(1.0, single / statistics.median(medians)), sum(slow) / len(slow))


def _on_each(
    processors: Sequence[int], seconds: float, prepare: Callable[[], Callable[[], object]]
) -> list[list[float]]:
    """Seconds of each call of the work, for each processor; all begin at once."""
    results: list[list[float]] = [[] for _ in processors]
    barrier = threading.Barrier(len(processors))

    def work(index: int) -> None:
        with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux, or denied: where the system likes
            os.sched_setaffinity(0, {processors[index]})  # of this thread
        call = prepare()
        call()
        barrier.wait()
        end = time.perf_counter() + seconds
        while not results[index] or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            results[index].append(time.perf_counter() - start)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(processors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
