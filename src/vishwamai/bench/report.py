"""The report: one value with everything that was measured, its JSON form, and what it says in short.

The JSON's `schema` is `SCHEMA`; within one number fields are only added. Times are seconds, sizes bytes, rates per
second.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vishwamai.bench import machine
from vishwamai.bench.model import ModelResult
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.runner import CaseMeasurement
from vishwamai.bench.targets import TargetRow
from vishwamai.core import caches
from vishwamai.core.errors import KernelError
from vishwamai.core.numbers import human
from vishwamai.measure.machine_peaks import MachinePeaks
from vishwamai.measure.timing import Timing

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
    "vs best peer",
    "memory",
)
"""Columns of the page's table of measurements."""

WITHHELD = "held back"
"""In place of a figure that means nothing."""


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Everything that one run of the benchmark found.

    Attributes:
      created: when, ISO 8601 with the time zone.
      versions: version of Python and of each package; `cpu` and `devices`: the machine.
      command: how the benchmark was called.
      load: the machine's load average over the last minute when the run ended, None where the system does not say:
        above the number of cores it means that others were working here too.
      selection: which cases were asked for: "quick", "small" or "all".
      done: the steps that were run, as `runner.Step.key` names them; `wanted`: how many there are in all. Fewer were
        done than wanted where the run was interrupted, or its time was over.
    """

    created: str
    command: str
    versions: dict[str, str | None]
    cpu: machine.Cpu
    devices: tuple[str, ...]
    load: float | None
    peaks: MachinePeaks
    measurements: tuple[CaseMeasurement, ...]
    targets: tuple[TargetRow, ...]
    model: ModelResult | None
    notes: tuple[str, ...] = ()
    selection: str = "small"
    done: tuple[tuple[str, str, bool], ...] = ()
    planned: int = 0

    @property
    def wrong(self) -> list[CaseMeasurement]:
        """Our implementations whose numbers are wrong."""
        return [m for m in self.measurements if m.framework == "vishwamai" and m.numbers and not m.numbers.right]

    @property
    def right(self) -> bool:
        """Every number of ours that was looked at is right."""
        return not self.wrong and (self.model is None or self.model.right)


@dataclasses.dataclass(frozen=True)
class Standing:
    """What runs in a case when nothing is named, compared with the fastest peer: it is `ratio` times as fast."""

    op: str
    case: str
    candidate: str
    peer: str
    ratio: float


def standings(measurements: Sequence[CaseMeasurement]) -> list[Standing]:
    """Every case whose ratio is not held back, the slowest first."""
    rows = [
        Standing(m.op, m.case, m.candidate, *m.best_peer) for m in measurements if m.default and m.best_peer is not None
    ]
    return sorted(rows, key=lambda row: row.ratio)


def score(measurements: Sequence[CaseMeasurement]) -> str:
    """Wins and losses, in one sentence."""
    rows = standings(measurements)
    withheld = sum(1 for m in measurements if m.default and m.withheld)
    losses = sum(1 for standing in rows if standing.ratio < 1)
    text = f"against the best peer: {len(rows) - losses} wins, {losses} losses"
    return text + (f", {withheld} held back" if withheld else "")


def banners(measurements: Sequence[CaseMeasurement], versions: Mapping[str, str | None]) -> list[str]:
    """What a reader must know before any figure."""
    texts = []
    withheld = [m for m in measurements if m.default and m.withheld]
    if withheld:
        compared = len(withheld) + len(standings(measurements))
        reasons = ", ".join(sorted({m.withheld for m in withheld})[-3:])
        texts.append(
            f"BUSY MACHINE: the ratios of {len(withheld)} of {compared} cases are held back ({reasons}); run it again "
            "while nothing else runs."
        )
    over = [m for m in measurements if m.overshot]
    if over:
        names = ", ".join(dict.fromkeys(f"{m.op}: {m.case}" for m in over))
        texts.append(
            f"{len(over)} {'timing was' if len(over) == 1 else 'timings were'} above the measured peak, which was "
            f"therefore measured too low; no share is shown of {names}."
        )
    if versions.get("torch") is None and any(m.framework == "jax" for m in measurements):
        texts.append("The peer is jax alone, which is weak on CPUs; make bench TORCH=yes adds torch.")
    return texts


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """`value` in JSON's own types; a number that is not finite becomes its name."""
    if isinstance(value, Timing):
        return {"median": value.median, "best": value.best, "spread": value.spread, **_fields(value)}
    if isinstance(value, CaseMeasurement):
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


def to_json(report: BenchReport) -> dict[str, Any]:
    """The report in JSON's own types."""
    return {"schema": SCHEMA, "right": report.right, **_plain(report)}


def write_json(report: BenchReport, path: Path) -> None:
    """Writes the report as JSON; a file of that name is replaced whole."""
    caches.write(path, json.dumps(to_json(report), indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What an interrupted run had found, read back from its JSON."""

    selection: str
    versions: dict[str, str | None]
    cpu: str
    done: tuple[tuple[str, str, bool], ...]
    measurements: tuple[CaseMeasurement, ...]
    peaks: MachinePeaks


def read_json(path: Path) -> Earlier:
    """Reads what `write_json` wrote.

    Raises:
      KernelError: it is not a report of this version.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["schema"] != SCHEMA:
            raise ValueError(f"its schema is {saved['schema']!r}, not {SCHEMA!r}")
        peaks = saved["peaks"]
        cached = {int(size): rate for size, rate in peaks["cached"].items()}
        return Earlier(
            saved["selection"],
            saved["versions"],
            saved["cpu"]["name"],
            tuple((op, case, gradients) for op, case, gradients in saved["done"]),
            tuple(map(_measurement, saved["measurements"])),
            MachinePeaks(peaks["flops"], peaks["bandwidth"], peaks["how"], cached),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KernelError(f"{path} is not a report to go on with: {type(error).__name__}: {error}") from error


def _measurement(saved: dict[str, Any]) -> CaseMeasurement:
    def of(kind: Any, values: dict[str, Any]) -> Any:
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in names})

    numbers, timing = saved["numbers"], saved["timing"]
    if numbers is not None:  # a number that is not finite was written by its name
        numbers = of(Numbers, {**numbers, "error": float(numbers["error"]), "allowed": float(numbers["allowed"])})
    if timing is not None:
        timing = Timing(tuple(timing["samples"]), timing["calls_per_sample"])
    return dataclasses.replace(of(CaseMeasurement, saved), numbers=numbers, timing=timing)


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
    return "" if value is None else human(value)


def best_peer(m: CaseMeasurement) -> str:
    """How many times as fast as the best peer, "1.70x torch gelu"; empty where there is none."""
    if m.withheld:
        return WITHHELD
    return "" if m.best_peer is None else f"{m.best_peer[1]:.2f}x {m.best_peer[0]}"


def share(m: CaseMeasurement) -> str:
    """The share of the peak, "62%"."""
    return WITHHELD if m.overshot else "" if m.share is None else f"{m.share:.0%}"


def best_rate(m: CaseMeasurement, peaks: MachinePeaks) -> str:
    """The rate of what bounds the work here: "312 GFLOP/s" or "14.2 GB/s"."""
    by_memory = m.bytes_moved / peaks.bandwidth_for(m.bytes_moved) > m.flops / peaks.peak(m.dtype)
    return f"{rate(m.bytes_per_second)} GB/s" if by_memory else f"{rate(m.flops_per_second)} GFLOP/s"


def figures(m: CaseMeasurement, timing: Timing) -> tuple[str, ...]:
    """A timed measurement's cells from "median" on."""
    return (
        seconds(timing.median),
        f"{timing.spread:.0%}",
        rate(m.flops_per_second),
        rate(m.bytes_per_second),
        share(m),
        best_peer(m),
        size(m.memory),
    )


def groups(measurements: Sequence[CaseMeasurement]) -> dict[tuple[str, str], list[CaseMeasurement]]:
    """Measurements by (op, case), in order."""
    grouped: dict[tuple[str, str], list[CaseMeasurement]] = {}
    for m in measurements:
        grouped.setdefault((m.op, m.case), []).append(m)
    return grouped


def estimates(rows: Sequence[TargetRow]) -> str:
    """Where the estimates of the rows come from: "the compiler's schedule", or "nothing"."""
    kinds = dict.fromkeys(row.estimate for row in rows if row.estimate)
    return "the compiler's " + " or ".join(kinds) if kinds else "nothing"


def target_problems(rows: Sequence[TargetRow]) -> list[str]:
    """What the rows say of programs that did not compile or have no time: a line for all chips that say the same."""
    chips: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.problem:
            chips.setdefault((row.op, row.case, row.problem), []).append(row.target)
    return [f"{op}: {case}, {', '.join(names)}: {problem}" for (op, case, problem), names in chips.items()]


def target_words(row: TargetRow | None) -> tuple[str, str]:
    """(what a cell says, its colour); None for a case that was not compiled and has no stored schedule."""
    if row is None:
        return "not known", "yellow"
    if not row.compiles:
        return "does not compile", "red"
    if not row.fits:
        return f"{size(row.hbm)} of HBM do not fit", "red"
    if row.vmem is None:
        return f"{row.implementation}, {size(row.hbm)} HBM", "yellow"
    speed = "" if row.seconds is None else f", {seconds(row.seconds)} ({row.roofline / row.seconds:.0%})"
    return f"{size(row.vmem)}{speed}", "green"


def target_cell(row: TargetRow | None) -> tuple[str, str]:
    """The same in few words: the time and its share of the roofline."""
    if row is None:
        return "not known", "yellow"
    if not row.compiles:
        return "fails", "red"
    if not row.fits:
        return "does not fit", "red"
    if row.seconds is None:
        return row.implementation, "yellow"
    return f"{seconds(row.seconds)} {row.roofline / row.seconds:.0%}", "green"
