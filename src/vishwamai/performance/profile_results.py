"""`ProfileResults`: what `TPUProfiler` measured of a model, and the estimate for a target that stands apart from it."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vishwamai.core.figures import Estimate, Measurement
from vishwamai.core.numbers import human
from vishwamai.measure.flops import ProgramFlops
from vishwamai.measure.trace import OperationTime
from vishwamai.planning.memory.compiler import ProgramMemory

_WIDTH, _SHOWN = 80, 10
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class TargetEstimate:
    """A step on a TPU that is not here, by its compiler; nothing of it was measured.

    Attributes:
      target: the chip.
      step: seconds of a step, by the schedule of the compiled program.
      mfu: share of the chip's published peak that the step's FLOP reach in this time.
      memory: HBM of the compiled program.
      uncertain: figures that the schedule does not tell, so that the time is less certain.
    """

    target: str
    step: Estimate
    mfu: Estimate
    memory: ProgramMemory
    uncertain: tuple[str, ...] = ()

    def __str__(self) -> str:
        less = f"; less certain: {', '.join(self.uncertain)}" if self.uncertain else ""
        return f"estimate for {self.target}: step {self.step}, MFU {self.mfu.value:.1%}, memory {self.memory}{less}"


@dataclasses.dataclass(frozen=True)
class ProfileResults:
    """What `TPUProfiler.profile_execution` found; `print` gives it as a table.

    Attributes:
      name: names of the model and its inputs.
      device: device that it ran on.
      times: seconds of every measured step, in order.
      compiling: seconds of tracing and compiling.
      flops: FLOP of a step. flops_source: how they were counted.
      mfu: share of the devices' peak that the FLOP reach in the median step; None where it is not known.
      peaks: source of the peak, in words: published or measured.
      bandwidth: bytes of arguments and results, moved once, by the median step: the memory moves at least these.
      memory: peak of one device by the plan of the compiled program. memory_parts: its parts.
      device_peak: most bytes that the device's allocator counted; None on devices without a counter.
      operations: time by operation of the traced steps, longest first. The traced steps are not among `times`.
      trace: the file that xprof reads; None where no directory was given.
      busy: warning about other processes on this machine; "" where they used little.
      notes: further remarks.
      estimate: estimate for the profiler's target; None without one.
    """

    name: str
    device: str
    times: tuple[float, ...] = dataclasses.field(repr=False)
    compiling: Measurement
    flops: ProgramFlops
    flops_source: str
    mfu: Measurement | None
    peaks: str
    bandwidth: Measurement
    memory: Estimate
    memory_parts: Mapping[str, Estimate] = dataclasses.field(repr=False)
    device_peak: Measurement | None
    operations: tuple[OperationTime, ...] = dataclasses.field(repr=False)
    trace: Path | None
    busy: str
    notes: tuple[str, ...] = ()
    estimate: TargetEstimate | None = None

    @property
    def step(self) -> Measurement:
        """The median step."""
        return Measurement(statistics.median(self.times), self.device, "s")

    @property
    def percentiles(self) -> dict[int, Measurement]:
        """Step times at 50, 90 and 99 %, between samples by interpolation."""
        return {p: Measurement(float(np.percentile(self.times, p)), self.device, "s") for p in PERCENTILES}

    def __str__(self) -> str:
        lines = _row("profile", f"{self.name}, {len(self.times)} steps on {self.device}")
        if self.busy:
            lines += _row("BUSY MACHINE", f"{self.busy}: times are too long; run it again while nothing else runs.")
        cells = [f"p{p} {measurement.value * 1e3:.3f} ms" for p, measurement in self.percentiles.items()]
        lines += _row(
            "step", f"{', '.join(cells)} (least {min(self.times) * 1e3:.3f}, most {max(self.times) * 1e3:.3f})"
        )
        lines += _row("compilation", f"{self.compiling.value:.3g} s")
        lines += _row("work", f"{self.flops.total:.4g} FLOP a step: {self.flops_source}")
        above = " (ABOVE 100 %, see the notes)" if self.mfu is not None and self.mfu.value > 1 else ""
        share = "not known" if self.mfu is None else f"{self.mfu.value:.1%}{above}"
        lines += _row("MFU", f"{share}; peak: {self.peaks}" if self.peaks else share)
        lines += _row("bandwidth", f"{self.bandwidth.value / 1e9:.3g} GB/s at least (arguments and results, once)")
        parts = ", ".join(f"{name} {human(part.value)}" for name, part in self.memory_parts.items() if part.value)
        device = "" if self.device_peak is None else f"; counted by the device: {human(self.device_peak.value)}"
        lines += _row("memory", f"{human(self.memory.value)} by the compiled program: {parts}{device}")
        if self.operations:
            lines += [
                "",
                f"{'operation (traced steps)':50}{'calls':>8}{'ms':>12}{'share':>10}",
                *map(_line, self._rows()),
            ]
        if self.trace is not None:
            lines += _row("trace", str(self.trace))
        for note in self.notes:
            lines += _row("note", note)
        if self.estimate is not None:
            lines += ["", *textwrap.wrap(str(self.estimate), _WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    def _rows(self) -> list[OperationTime]:
        first, rest = list(self.operations[:_SHOWN]), self.operations[_SHOWN:]
        if rest:
            totals = (
                sum(operation.calls for operation in rest),
                sum(operation.seconds for operation in rest),
                sum(operation.share for operation in rest),
            )
            first.append(OperationTime(f"{len(rest)} others", *totals))
        return first


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(f"{label:13}{text}", _WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False)


def _line(operation: OperationTime) -> str:
    name = operation.name if len(operation.name) <= 49 else f"...{operation.name[-46:]}"
    return f"{name:50}{operation.calls:>8.4g}{operation.seconds * 1e3:>12.4f}{operation.share:>10.1%}"
