"""The figures of a profile and their table: one row for each operation, pass and spec, and for each decorated
kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax

from vishwamai.core.errors import KernelError
from vishwamai.measure.peaks import Peaks


@dataclasses.dataclass
class ProfileRow:
    """Everything that was measured of one operation (same spec, same pass), or of one decorated kernel.

    Attributes:
      name: the operation and its pass, or the kernel.
      detail: its implementation and operands.
      calls: how often the block called it; the times are per call, each a median.
      flops: floating-point operations of one call; None where they are not counted.
      nbytes: bytes that one call must move at least; None for a kernel, whose intermediates may stay on the chip.
      memory: bytes that the program holds.
      dtype: whose peak counts.
    """

    name: str
    detail: str
    flops: float | None
    nbytes: int | None
    memory: int
    dtype: str
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> float:
        """Of all calls together."""
        return sum(self.times)

    @property
    def flops_per_second(self) -> float | None:
        return None if self.flops is None else self.flops * self.calls / self.seconds

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.nbytes is None else self.nbytes * self.calls / self.seconds


class Profile:
    """What `profile_kernel` measured.

    Attributes:
      operations: a `ProfileRow` for every operation, pass and spec, in order of their first call.
      kernels: a `ProfileRow` for every decorated kernel, timed whole.
      untimed: operations inside programs that could not be taken apart (a `shard_map`, a program compiled ahead of
        time), with their number.
    """

    def __init__(self, repeats: int, peaks: Callable[[], Peaks]):
        self.repeats = repeats
        self.operations: list[ProfileRow] = []
        self.kernels: list[ProfileRow] = []
        self.untimed: dict[str, int] = {}
        self.inside_kernel = False
        self.programs: dict[Hashable, jax.stages.Compiled] = {}
        self._peaks = peaks
        self._rows: dict[Hashable, ProfileRow] = {}

    @functools.cached_property
    def peaks(self) -> Peaks:
        """The peaks that shares are counted against; asked for (and measured, where they must be) on first use."""
        return self._peaks()

    @property
    def flops(self) -> float:
        """Floating-point operations of all calls that count them."""
        return sum(row.calls * (row.flops or 0) for row in self.operations)

    def record(self, key: Hashable, row: Callable[[], ProfileRow], seconds: float, *, kernel: bool) -> None:
        """Adds one call."""
        if key not in self._rows:
            self._rows[key] = row()
            (self.kernels if kernel else self.operations).append(self._rows[key])
        self._rows[key].times.append(seconds)

    def _too_fast(self, row: ProfileRow) -> str | None:
        """What is wrong with a row whose figures are above the maker's peak; None where nothing is."""
        if row.flops is None or row.nbytes is None or not self.peaks.published:
            return None
        peak, bandwidth = self.peaks.flops(row.dtype), self.peaks.bandwidth(row.nbytes)
        if peak is None or bandwidth is None:
            return None
        share = max(row.flops / peak, row.nbytes / bandwidth) * row.calls / row.seconds
        if share <= 1:
            return None
        return (
            f"{row.name}: {row.seconds / row.calls * 1e6:.1f} us for {row.flops:.3g} FLOP and {row.nbytes} bytes is "
            f"{share:.2f} times the peak ({self.peaks.how}): the clock or the count of its work is wrong, and the "
            "figure is left out."
        )

    def share(self, row: ProfileRow) -> float | None:
        """The roofline's time for one call as a share of the measured one: 1.0 = nothing can be faster. None where the
        peaks are not known.

        Raises:
          KernelError: a figure is above the maker's peak, so the measurement cannot be right.
        """
        if row.flops is None or row.nbytes is None:
            return None
        peak, bandwidth = self.peaks.flops(row.dtype), self.peaks.bandwidth(row.nbytes)
        if peak is None or bandwidth is None:
            return None
        wrong = self._too_fast(row)
        if wrong is not None:
            raise KernelError(wrong)
        return max(row.flops / peak, row.nbytes / bandwidth) * row.calls / row.seconds

    def summary(self) -> str:
        """The table: for each operation its calls, time, GFLOP/s, GB/s, share of the peak and memory; then the kernels,
        timed whole.
        """
        head = ("operation", "calls", "ms", "GFLOP/s", "GB/s", "of peak", "MiB", "implementation and operands")
        lines = [head, *map(self._cells, self.operations)]
        if self.kernels:
            lines += [("whole kernel", *("",) * 7), *map(self._cells, self.kernels)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(c.ljust(w) if i in (0, 7) else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
            for line in lines
        ]
        text.append(f"on {jax.devices()[0].device_kind}: each operation alone, median of {self.repeats} runs")
        if any(row.flops is not None and row.nbytes is not None for row in self.operations):
            text.append(f"of peak: roofline's time / measured time; {self.peaks.how}")
        if any("*" in line[5] for line in lines[1:]):
            text.append("* faster than all that was measured before, so it counts as the peak")
        text += [f"error: {wrong}" for row in self.operations if (wrong := self._too_fast(row)) is not None]
        for name, count in self.untimed.items():
            text.append(f"not timed: {name}, {count} times inside a program that could not be taken apart")
        return "\n".join(text)

    def _cells(self, row: ProfileRow) -> tuple[str, ...]:
        wrong = self._too_fast(row)
        share = None if wrong else self.share(row)
        percent = "error" if wrong else "-" if share is None else f"{share:.1%}" if share <= 1 else "100%*"

        def rate(value: float | None) -> str:
            return "-" if value is None or wrong else f"{value / 1e9:.1f}"

        return (
            row.name,
            str(row.calls),
            f"{row.seconds * 1e3:.3f}",
            rate(row.flops_per_second),
            rate(row.bytes_per_second),
            percent,
            f"{row.memory / 2**20:.1f}",
            row.detail,
        )
