"""The report: one value with everything that was measured, its JSON form, and what it says in short.

The JSON's `schema` is `SCHEMA`; within one number fields are only added. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vishwamai.bench import machine
from vishwamai.bench.model import ModelResult
from vishwamai.bench.peaks import Peaks
from vishwamai.bench.runner import Measurement
from vishwamai.bench.targets import TargetRow
from vishwamai.bench.timing import Timing

SCHEMA = "vishwamai-bench/1"

COLUMNS = (
    "case",
    "candidate",
    "numbers",
    "median",
    "spread",
    "GFLOP/s",
    "GB/s",
    "of peak",
    "vs jax",
    "vs torch",
    "memory",
)
"""Columns of the table of measurements, on the page and on the terminal."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that one run of the benchmark found.

    Attributes:
      created: when, ISO 8601 with the time zone.
      versions: of Python and the packages; `cpu` and `devices`: the machine.
      command: how the benchmark was called.
      load: the machine's load average over the last minute when the run ended, None where the system does not say: above the number of cores it
        means that others were working here too.
    """

    created: str
    command: str
    versions: dict[str, str | None]
    cpu: machine.Cpu
    devices: tuple[str, ...]
    load: float | None
    peaks: Peaks
    measurements: tuple[Measurement, ...]
    targets: tuple[TargetRow, ...]
    model: ModelResult | None
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[Measurement]:
        """Our implementations whose numbers are wrong."""
        return [m for m in self.measurements if m.framework == "vishwamai" and m.numbers and not m.numbers.right]

    @property
    def right(self) -> bool:
        """Every number of ours that was looked at is right."""
        return not self.wrong and (self.model is None or self.model.right)


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """`value` in JSON's own types; a number that is not finite becomes its name."""
    if isinstance(value, Timing):
        return {"median": value.median, "best": value.best, "spread": value.spread, **_fields(value)}
    if isinstance(value, Measurement):
        rates = {"flops_per_second": value.flops_per_second, "bytes_per_second": value.bytes_per_second}
        return _fields(value) | rates
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def to_json(report: Report) -> dict[str, Any]:
    """The report in JSON's own types."""
    return {"schema": SCHEMA, "right": report.right, **_plain(report)}


def write_json(report: Report, path: Path) -> None:
    """Writes the report as JSON."""
    path.write_text(json.dumps(to_json(report), indent=1) + "\n", encoding="utf-8")


# --- Figures in words, shared by the terminal and the page ------------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.0123), seconds(4.56e-6), seconds(2.5), seconds(None)
    ('12.3 ms', '4.56 us', '2.5 s', '')
    """
    if value is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def rate(value: float | None) -> str:
    """
    >>> rate(1.234e12), rate(56.78e9), rate(0.5e9)
    ('1230', '56.8', '0.5')
    """
    return "" if value is None else f"{float(f'{value / 1e9:.3g}'):g}"


def size(value: float | None) -> str:
    """
    >>> size(1536), size(3 << 30), size(None)
    ('1.5 KiB', '3.0 GiB', '')
    """
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.1f} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    raise AssertionError


def ratio(measurement: Measurement, framework: str, peers: Sequence[Measurement]) -> str:
    """How many times as fast as the framework's own, "1.7x"; empty where that cannot be said."""
    names = [p.candidate for p in peers if p.framework == framework and p.candidate in measurement.ratios]
    return f"{measurement.ratios[names[0]]:.2f}x" if names else ""


def figures(m: Measurement, timing: Timing, peers: Sequence[Measurement]) -> tuple[str, ...]:
    """A timed measurement's cells from "median" on; `peers` are the measurements of its case."""
    return (
        seconds(timing.median),
        f"{timing.spread:.0%}",
        rate(m.flops_per_second),
        rate(m.bytes_per_second),
        f"{m.share:.0%}",
        ratio(m, "jax", peers),
        ratio(m, "torch", peers),
        size(m.memory),
    )


def groups(measurements: Sequence[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    """Measurements by (op, case), in order."""
    found: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        found.setdefault((m.op, m.case), []).append(m)
    return found


def estimates(rows: Sequence[TargetRow]) -> str:
    """Where the estimates of the rows come from: "the compiler's cost model", "the compiler's schedule" or both."""
    kinds = dict.fromkeys(row.estimate for row in rows if row.estimate)
    return "the compiler's " + " or ".join(kinds) if kinds else "nothing"


def target_words(row: TargetRow) -> tuple[str, str]:
    """(what a cell says, its colour)."""
    if not row.compiles:
        return "does not compile", "red"
    if not row.fits:
        return f"{size(row.hbm)} of HBM do not fit", "red"
    if row.vmem is None:
        return f"{row.implementation}, {size(row.hbm)} HBM", "yellow"
    speed = "" if row.seconds is None else f", {seconds(row.seconds)} ({row.roofline / row.seconds:.0%})"
    return f"{size(row.vmem)}{speed}", "green"
