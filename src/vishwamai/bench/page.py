"""The report as one HTML file that needs nothing else: what `report.html` next to this file shows, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vishwamai import reports
from vishwamai.bench import plots, report
from vishwamai.bench.model import NAME, ModelResult
from vishwamai.bench.report import BenchReport
from vishwamai.bench.runner import CaseMeasurement
from vishwamai.bench.targets import TargetRow
from vishwamai.core import caches

Cell = str | tuple[str, str]
"""A text, or (text, class)."""


def write(made: BenchReport, path: Path) -> None:
    """Writes the page; a file of that name is replaced whole.

    Args:
      made: the report.
      path: the file to write, about 100 KB.
    """
    caches.write(path, render(made))


def render(made: BenchReport) -> str:
    """The page's text."""
    timed = [m for m in made.measurements if m.timing is not None]
    found = [f"{m.op}, {m.case}, {m.candidate}: {m.numbers.what if m.numbers else ''}" for m in made.wrong]
    return reports.render(
        "bench/report.html",
        title="vishwamai bench",
        made=made,
        right=made.right,
        checked=sum(1 for m in made.measurements if m.framework == "vishwamai" and m.numbers),
        wrong=found,
        banners=_banners(made),
        facts=_facts(made),
        where=f"{made.cpu.name}, {made.cpu.cores} cores; jax on {', '.join(made.devices)}",
        standings=_standings(made),
        roofline=plots.roofline(timed, made.peaks) if timed else None,
        operations=[_operation(made, op) for op in dict.fromkeys(m.op for m in made.measurements)],
        columns=report.COLUMNS,
        model=None if made.model is None else _model(made.model),
        targets=_targets(made.targets) if made.targets else None,
        machine=_machine(made),
    )


def _facts(made: BenchReport) -> list[tuple[str, str]]:
    peaks = [(f"{report.rate(made.peaks.peak(d))} GFLOP/s", f"peak measured here, {d}") for d in made.peaks.flops]
    found = report.standings(made.measurements)
    wins = [(f"{sum(one.ratio >= 1 for one in found)} of {len(found)}", "cases as fast as the best peer, or faster")]
    return [
        *(wins if found else []),
        *peaks,
        (f"{report.rate(made.peaks.best_bandwidth)} GB/s", "memory, measured here"),
    ]


def _banners(made: BenchReport) -> list[str]:
    said = report.banners(made.measurements, made.versions)
    if len(made.done) < made.wanted:
        said.insert(0, f"{len(made.done)} of {made.wanted} cases were run; --resume goes on.")
    return said


def _standings(made: BenchReport) -> dict[str, Any]:
    rows = [
        [
            (f"{one.ratio:.2f}x", "good" if one.ratio >= 1 else "bad"),
            one.peer,
            f"{one.op}: {one.case}",
            (one.candidate, "soft"),
        ]
        for one in report.standings(made.measurements)
    ]
    title = report.score(made.measurements).capitalize()
    return {"title": title, "columns": ("times as fast", "as", "case", "by"), "rows": rows}


def _operation(made: BenchReport, op: str) -> dict[str, Any]:
    mine = [m for m in made.measurements if m.op == op]
    rows, kinds = [], []
    for (_, case), found in report.groups(mine).items():
        for i, m in enumerate(found):
            kinds.append("default" if m.default else "")
            rows.append(_cells(m, case if i == 0 else ""))
    return {"op": op, "bars": plots.bars([m for m in mine if m.timing is not None]), "rows": rows, "kinds": kinds}


def _cells(m: CaseMeasurement, case: str) -> list[Cell]:
    numbers = ("", "") if m.numbers is None else ("right", "good") if m.numbers.right else ("WRONG", "bad")
    who = "" if m.framework == "vishwamai" else "soft"
    first: list[Cell] = [case, (m.candidate, who), numbers]
    if m.timing is None:
        why = m.note or (m.numbers.what if m.numbers else "")
        return [*first, "", (f"not timed: {why}", "soft"), *[""] * (len(report.COLUMNS) - 5)]
    return [*first, *((figure, who) for figure in report.figures(m, m.timing))]


def _model(result: ModelResult) -> dict[str, Any]:
    rows = [
        [
            a.other,
            str(a.sentences),
            f"{a.cosine:.7f}",
            f"{a.error:.2e}",
            ("right", "good") if a.right else ("WRONG", "bad"),
        ]
        for a in result.agreements
    ]
    columns = ("other", "sentences", "least cosine", "max abs error", "numbers")
    return {
        "name": NAME,
        "columns": columns,
        "rows": rows,
        "bars": plots.model_bars(result) if result.speeds else "",
    }


def _targets(found: Sequence[TargetRow]) -> dict[str, Any]:
    chips = list(dict.fromkeys(r.target for r in found))
    by_place = {(r.op, r.case, r.target): r for r in found}
    styles = {"green": "good", "red": "bad", "yellow": "warn"}
    rows = []
    for op, case in sorted(dict.fromkeys((r.op, r.case) for r in found), key=lambda key: key[0]):
        words = [report.target_words(by_place.get((op, case, chip))) for chip in chips]
        rows.append([f"{op}: {case}", *((text, styles[colour]) for text, colour in words)])
    problems = report.target_problems(found)
    return {"columns": ["case", *chips], "rows": rows, "problems": problems, "estimates": report.estimates(found)}


def _machine(made: BenchReport) -> dict[str, Any]:
    flops = [
        [f"product, {dtype}", who, f"{report.rate(value)} GFLOP/s"]
        for dtype, found in made.peaks.flops.items()
        for who, value in found.items()
    ]
    memory = [
        ["memory, read and write", who, f"{report.rate(value)} GB/s"] for who, value in made.peaks.bandwidth.items()
    ]
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items() if version),
        "flags": " ".join(made.cpu.flags) or "none known",
        "load": "" if made.load is None else f" Load average over the last minute of the run: {made.load:.1f}.",
        "columns": ("what", "by", "best sample"),
        "rows": [*flops, *memory],
    }
