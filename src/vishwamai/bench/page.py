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


def write(bench_report: BenchReport, path: Path) -> None:
    """Writes the page; a file of that name is replaced whole.

    Args:
      bench_report: the report.
      path: the file to write, about 100 KB.
    """
    caches.write(path, render(bench_report))


def render(bench_report: BenchReport) -> str:
    """The page's text."""
    timed = [m for m in bench_report.measurements if m.timing is not None]
    mistakes = [f"{m.op}, {m.case}, {m.candidate}: {m.numbers.detail if m.numbers else ''}" for m in bench_report.wrong]
    return reports.render(
        "bench/report.html",
        title="vishwamai bench",
        bench_report=bench_report,
        right=bench_report.right,
        checked=sum(1 for m in bench_report.measurements if m.framework == "vishwamai" and m.numbers),
        wrong=mistakes,
        banners=_banners(bench_report),
        facts=_facts(bench_report),
        where=f"{bench_report.cpu.name}, {bench_report.cpu.cores} cores; jax on {', '.join(bench_report.devices)}",
        standings=_standings(bench_report),
        roofline=plots.roofline(timed, bench_report.peaks) if timed else None,
        operations=[_operation(bench_report, op) for op in dict.fromkeys(m.op for m in bench_report.measurements)],
        columns=report.COLUMNS,
        model=None if bench_report.model is None else _model(bench_report.model),
        targets=_targets(bench_report.targets) if bench_report.targets else None,
        machine=_machine(bench_report),
    )


def _facts(bench_report: BenchReport) -> list[tuple[str, str]]:
    peaks = [
        (f"{report.rate(bench_report.peaks.peak(d))} GFLOP/s", f"peak measured here, {d}")
        for d in bench_report.peaks.flops
    ]
    standings = report.standings(bench_report.measurements)
    wins = [
        (
            f"{sum(standing.ratio >= 1 for standing in standings)} of {len(standings)}",
            "cases as fast as the best peer, or faster",
        )
    ]
    return [
        *(wins if standings else []),
        *peaks,
        (f"{report.rate(bench_report.peaks.best_bandwidth)} GB/s", "memory, measured here"),
    ]


def _banners(bench_report: BenchReport) -> list[str]:
    texts = report.banners(bench_report.measurements, bench_report.versions)
    if len(bench_report.done) < bench_report.planned:
        texts.insert(0, f"{len(bench_report.done)} of {bench_report.planned} cases were run; --resume goes on.")
    return texts


def _standings(bench_report: BenchReport) -> dict[str, Any]:
    rows = [
        [
            (f"{standing.ratio:.2f}x", "good" if standing.ratio >= 1 else "bad"),
            standing.peer,
            f"{standing.op}: {standing.case}",
            (standing.candidate, "soft"),
        ]
        for standing in report.standings(bench_report.measurements)
    ]
    title = report.score(bench_report.measurements).capitalize()
    return {"title": title, "columns": ("times as fast", "as", "case", "by"), "rows": rows}


def _operation(bench_report: BenchReport, op: str) -> dict[str, Any]:
    mine = [m for m in bench_report.measurements if m.op == op]
    rows, kinds = [], []
    for (_, case), group in report.groups(mine).items():
        for i, m in enumerate(group):
            kinds.append("default" if m.default else "")
            rows.append(_cells(m, case if i == 0 else ""))
    return {"op": op, "bars": plots.bars([m for m in mine if m.timing is not None]), "rows": rows, "kinds": kinds}


def _cells(m: CaseMeasurement, case: str) -> list[Cell]:
    numbers = ("", "") if m.numbers is None else ("right", "good") if m.numbers.right else ("WRONG", "bad")
    style = "" if m.framework == "vishwamai" else "soft"
    first: list[Cell] = [case, (m.candidate, style), numbers]
    if m.timing is None:
        why = m.note or (m.numbers.detail if m.numbers else "")
        return [*first, "", (f"not timed: {why}", "soft"), *[""] * (len(report.COLUMNS) - 5)]
    return [*first, *((figure, style) for figure in report.figures(m, m.timing))]


def _model(result: ModelResult) -> dict[str, Any]:
    rows = [
        [
            a.peer,
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


def _targets(target_rows: Sequence[TargetRow]) -> dict[str, Any]:
    chips = list(dict.fromkeys(r.target for r in target_rows))
    by_place = {(r.op, r.case, r.target): r for r in target_rows}
    styles = {"green": "good", "red": "bad", "yellow": "warn"}
    rows = []
    for op, case in sorted(dict.fromkeys((r.op, r.case) for r in target_rows), key=lambda key: key[0]):
        words = [report.target_words(by_place.get((op, case, chip))) for chip in chips]
        rows.append([f"{op}: {case}", *((text, styles[colour]) for text, colour in words)])
    problems = report.target_problems(target_rows)
    return {"columns": ["case", *chips], "rows": rows, "problems": problems, "estimates": report.estimates(target_rows)}


def _machine(bench_report: BenchReport) -> dict[str, Any]:
    flops = [
        [f"product, {dtype}", library, f"{report.rate(value)} GFLOP/s"]
        for dtype, rates in bench_report.peaks.flops.items()
        for library, value in rates.items()
    ]
    memory = [
        ["memory, read and write", library, f"{report.rate(value)} GB/s"]
        for library, value in bench_report.peaks.bandwidth.items()
    ]
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in bench_report.versions.items() if version),
        "flags": " ".join(bench_report.cpu.flags) or "none known",
        "load": ""
        if bench_report.load is None
        else f" Load average over the last minute of the run: {bench_report.load:.1f}.",
        "columns": ("what", "by", "best sample"),
        "rows": [*flops, *memory],
    }
