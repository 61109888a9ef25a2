"""The state of a TensorCore while its scalar unit is followed: the clock, scalar memory, semaphores and the pipe to HBM.

Addresses of unknown placement (operands, allocations) are symbols: integers so large that the pointer arithmetic of a kernel, shifts included,
never makes one symbol look like another or like a number.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses

from vishwamai.core.hardware import Chip

MASK32 = 0xFFFFFFFF
GRANULES = {"v4": 512}
"""Bytes that `size_in_granules` of a copy counts in, 32 where not named: what a copy of 4 MiB is given as on each generation (libtpu 0.0.51)."""
SYMBOL_BITS = 100
"""Symbols are odd multiples of 2**100."""
POINTER = 1 << 40
"""Values from here on are addresses relative to a symbol."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The constants that are not the compiler's.

    Attributes:
        hbm_efficiency: share of the HBM peak that large copies reach.
        dma_latency: seconds from the issue of a copy to its data, unloaded; from one figure of JAX's Pallas matmul guide (v5e, blocks of 128).
        max_steps: bundles with scalar work after which a program is given up (a loop whose bound is not known).
    """

    hbm_efficiency: float = 0.90
    dma_latency: float = 0.55e-6
    max_steps: int = 60_000_000


class Machine:
    """One core of `chip` running one program after another.

    Attributes:
        now: the clock, cycles. `dma_wait`, `mxu_stall`: cycles of it spent waiting. `hbm_bytes`: bytes copied to and from HBM.
        unknown: what had to be guessed, counted: branches and copies that hang on data which only the device would know.
    """

    def __init__(self, chip: Chip, core: int = 0, model: Model | None = None):
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
        self._pipe_free = 0.0
        self._symbols: dict[str, int] = {}
        self._arrivals: dict[object, list[tuple[int, float]]] = collections.defaultdict(list)
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

    def copy(self, op: str, granules: int | None, semaphore: object) -> None:
        """Starts a DMA `dma.<source>_to_<target>` of `granules` that adds to `semaphore` when it lands."""
        size = (granules or 0) * self.granule
        source, _, target = op[4:].partition("_to_")
        if {"hbm", "any"} & {source, target}:
            # One pipe per core: copies queue for bandwidth and overlap in latency. Within HBM the data passes twice.
            passes = 2 if source == target == "hbm" else 1
            self._pipe_free = max(self.now, self._pipe_free) + passes * size / self.bytes_per_cycle
            arrival = self._pipe_free + self.latency
            self.hbm_bytes += size
        else:
            arrival = self.now + 200 + size / (20 * self.bytes_per_cycle)
        arrivals = self._arrivals[semaphore]
        arrivals.append(((arrivals[-1][0] if arrivals else 0) + (granules or 0), arrival))

    def wait(self, semaphore: object, granules: int | None) -> None:
        """Waits until as much has arrived at `semaphore` as was waited for in all."""
        self._consumed[semaphore] += granules or 0
        arrivals = self._arrivals.get(semaphore)
        if not arrivals:
            return
        index = min(bisect.bisect_left(arrivals, (self._consumed[semaphore], -1)), len(arrivals) - 1)
        if arrivals[index][1] > self.now:
            self.dma_wait += arrivals[index][1] - self.now
            self.now = arrivals[index][1]
        if index > 4096:
            del arrivals[: index - 1]
