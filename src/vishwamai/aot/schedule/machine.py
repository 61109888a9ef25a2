"""The state of a TensorCore while its scalar unit is followed: the clock, scalar memory, semaphores and the copies from
and to HBM.

Addresses of unknown placement (operands, allocations) are symbols: integers so large that the pointer arithmetic of a
kernel, shifts included, never makes one symbol look like another or like a number.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from vishwamai.core.hardware import TpuChip

MASK32 = 0xFFFFFFFF
GRANULES = {"v4": 512}
"""Bytes that `size_in_granules` of a copy counts in, 32 where not named: what a copy of 4 MiB is given as on each
generation (libtpu 0.0.51).
"""
SYMBOL_BITS = 100
"""Symbols are odd multiples of 2**100."""
POINTER = 1 << 40
"""Values from here on are addresses relative to a symbol."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The constants that are not the compiler's.

    Attributes:
        hbm_efficiency: share of the HBM peak that large copies reach.
        dma_latency: seconds from the issue of a copy to its data, unloaded; from one figure of JAX's Pallas matmul
          guide (v5e, blocks of 128).
        max_steps: bundles with scalar work after which a program is given up (a loop whose bound is not known).
    """

    hbm_efficiency: float = 0.90
    dma_latency: float = 0.55e-6
    max_steps: int = 60_000_000


class _Transfer:
    """A copy, and when its data is there: None while that is not known."""

    arrival: float | None = None


class Machine:
    """One core of `chip` running one program after another.

    Attributes:
        now: the clock, cycles. `dma_wait`, `mxu_stall`: cycles of it spent waiting. `hbm_bytes`: bytes copied to and
          from HBM.
        unknown: counts of the guesses: branches and copies that hang on data which only the device would
          know.
    """

    def __init__(self, chip: TpuChip, core: int = 0, model: Model | None = None):
        self.chip, self.core, self.model = chip, core, model or Model()
        self.bytes_per_cycle = chip.hbm_bandwidth / chip.cores * self.model.hbm_efficiency / chip.clock
        self.granule = GRANULES.get(chip.name, 32)
        self.latency = self.model.dma_latency * chip.clock
        self.now = 0.0
        self.dma_wait = 0.0
        self.mxu_stall = 0.0
        self.hbm_bytes = 0
        self.memory: dict[int, int | bool | None] = {}
        self.unknown: collections.Counter[str] = collections.Counter()
        self._symbols: dict[str, int] = {}
        self._queues: dict[object, collections.deque[tuple[float, _Transfer]]] = collections.defaultdict(
            collections.deque
        )
        self._moving: list[
            tuple[float, int, object]
        ] = []  # a heap: the count of bytes at which the first of each queue is done
        self._copied = self._copied_at = 0.0
        self._order = itertools.count()
        # By semaphore: copies not yet waited for, with what was issued before them; granules issued and waited for.
        self._pending: dict[object, collections.deque[tuple[int, _Transfer]]] = collections.defaultdict(
            collections.deque
        )
        self._issued: dict[object, int] = collections.defaultdict(int)
        self._consumed: dict[object, int] = collections.defaultdict(int)

    def symbol(self, name: str) -> int:
        """The address that stands for `name`."""
        if name not in self._symbols:
            self._symbols[name] = (2 * len(self._symbols) + 1) << SYMBOL_BITS
        return self._symbols[name]

    def symbol_of(self, value: int | None) -> str | None:
        """The name whose symbol, possibly shifted, `value` is relative to."""
        high = (value or 0) >> (SYMBOL_BITS - 10)
        if not high:
            return None
        shift = (high & -high).bit_length() - 1
        base = (value or 0) >> (SYMBOL_BITS - 10 + shift)
        return next((name for name, symbol in self._symbols.items() if symbol >> SYMBOL_BITS == base), None)

    def copy(self, op: str, granules: int | None, semaphore: object, thread: object = 0) -> None:
        """Starts a DMA `dma.<source>_to_<target>` of `granules` in the queue `thread` that adds to `semaphore` when it
        lands.
        """
        size = (granules or 0) * self.granule
        source, _, target = op[4:].partition("_to_")
        transfer = _Transfer()
        if {"hbm", "any"} & {source, target}:
            # Within HBM the data passes twice. CMEM belongs to both cores: one of them copies, over the bandwidth of
            # both.
            share = 2.0 if source == target == "hbm" else 1.0
            if "cmem" in (source, target):
                share, thread = 1.0 / self.chip.cores, "cmem"
            self._advance(self.now)
            self._queues[thread].append((share * size, transfer))
            if len(self._queues[thread]) == 1:
                self._begin(thread)
            self.hbm_bytes += size
        else:
            transfer.arrival = self.now + 200 + size / (20 * self.bytes_per_cycle)
        issued = self._issued[semaphore]
        self._pending[semaphore].append((issued, transfer))
        self._issued[semaphore] = issued + (granules or 0)

    def wait(self, semaphore: object, granules: int | None) -> None:
        """Waits until as much has arrived at `semaphore` as was waited for in all; for the next copy where it is not
        known how much.
        """
        pending = self._pending[semaphore]
        if granules is None and pending:
            self._consumed[semaphore] = pending[0][0] + 1
        self._consumed[semaphore] += granules or 0
        ready = self.now
        while pending and pending[0][0] < self._consumed[semaphore]:
            transfer = pending.popleft()[1]
            if transfer.arrival is None:
                self._advance(math.inf, transfer)
            ready = max(ready, transfer.arrival or 0.0)
        self.dma_wait += ready - self.now
        self.now = ready

    def _advance(self, until: float, transfer: _Transfer | None = None) -> None:
        """Moves the copies under way to the time `until`, or until `transfer` is done.

        Those of one queue move one after another, and the queues share the bandwidth equally: XLA puts the copies of a
        kernel's pipeline in one and those that run in parallel with kernels in others, and one of these does not hold
        up the kernel. `_moved` counts the bytes that each queue has been given, so a copy is done at a count fixed when
        it begins to move.
        """
        while self._moving and (transfer is None or transfer.arrival is None):
            done_at, _, thread = self._moving[0]
            rate = self.bytes_per_cycle / len(self._moving)
            done = self._copied_at + (done_at - self._copied) / rate
            if done > until:
                self._copied += (until - self._copied_at) * rate
                break
            heapq.heappop(self._moving)
            self._copied, self._copied_at = done_at, done
            self._queues[thread].popleft()[1].arrival = done + self.latency
            if self._queues[thread]:
                self._begin(thread)
        if transfer is None:
            self._copied_at = until

    def _begin(self, thread: object) -> None:
        heapq.heappush(self._moving, (self._copied + self._queues[thread][0][0], next(self._order), thread))


def smem_words(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """The 32-bit words of an integer array in scalar memory, as (word index, value).

    Words hold `4 / itemsize` elements. In one axis, element i of a tile of 128 * pack lies in word i % 128; in more,
    rows are packed in pairs or fours and padded to 128 words.
    """
    array = np.asarray(array)
    pack = max(1, 4 // array.dtype.itemsize)
    bits = 8 * array.dtype.itemsize
    mask = (1 << bits) - 1
    words: dict[int, int] = collections.defaultdict(int)
    if array.ndim <= 1:
        if pack == 1:
            yield from ((index, int(value) & MASK32) for index, value in enumerate(array.reshape(-1).tolist()))
            return
        for index, value in enumerate(array.reshape(-1).tolist()):
            tile, rest = divmod(index, 128 * pack)
            words[tile * 128 + rest % 128] |= (int(value) & mask) << (bits * (rest // 128))
        yield from words.items()
        return
    rows, columns = array.shape[-2:]
    row_tiles, column_tiles = -(-rows // pack), -(-columns // 128)
    for (head, row, column), value in np.ndenumerate(array.reshape(-1, rows, columns)):
        word = ((head * row_tiles + row // pack) * column_tiles + column // 128) * 128 + column % 128
        words[word] |= (int(value) & mask) << (bits * (row % pack))
    yield from words.items()
