"""The page of a plan: candidates by memory and time of a step, as one file without other resources."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vishwamai import reports
from vishwamai.core import caches
from vishwamai.core.errors import ConfigError
from vishwamai.planning.search.candidates import Candidate, front
from vishwamai.planning.search.plan import Plan
from vishwamai.reports import charts

_COLUMNS = ("settings", "front", "memory, GiB", "level", "step, s", "step's level", "tokens/s a chip", "MFU")
_COST = "USD per million tokens"
_DRAWN = 1.25
"""Candidates beyond so many times the memory of a device are counted and not drawn: the axis is for what fits."""


def write_page(plans: Sequence[Plan], path: str | os.PathLike[str], price: float | None = None) -> None:
    """Writes the page of the plans of one configuration; `price`: USD for a chip and hour.

    Raises:
      ConfigError: the file cannot be written.
      UnsupportedError: Jinja2 is not installed.
    """
    page = reports.render(
        "planning/search/plan.html", title="Plan of a training step", sections=[_section(plan, price) for plan in plans]
    )
    try:
        caches.write(Path(path), page)
    except OSError as error:
        raise ConfigError(f"plan: the page {os.fspath(path)} cannot be written: {error}") from error


def _section(plan: Plan, price: float | None) -> dict[str, object]:
    best = front(plan.candidates)
    facts = []
    if plan.chosen is not None and plan.chosen.speed is not None:
        speed = plan.chosen.speed
        facts = [
            (plan.chosen.name, "chosen"),
            (str(speed.step), "a step"),
            (f"{speed.tokens_per_chip.value:.0f}", "tokens/s a chip"),
            (f"{speed.mfu.value:.1%}", f"MFU, of {speed.peak / 1e12:.0f} TFLOP/s ({speed.dtype})"),
        ]
        if price is not None:
            facts.append((f"{speed.cost(price).value:.4g}", f"{_COST}, at {price:g} USD a chip-hour"))
    columns = [*_COLUMNS, *([_COST] if price is not None else [])]
    return {
        "target": plan.target,
        "facts": facts,
        "figure": _chart(plan, best),
        "columns": columns,
        "numbers": [name for name in columns if name not in ("settings", "front", "level", "step's level")],
        "rows": [_cells(candidate, index in best, price) for index, candidate in enumerate(plan.candidates)],
    }


def _chart(plan: Plan, best: set[int]) -> reports.Markup:
    """Memory against time by formulas, with the front; the chosen one by its compiled program, too."""

    def curve(name: str, colour: str, mark: str, indexed: Sequence[tuple[int, Candidate]]) -> charts.Curve:
        timed = [(candidate, candidate.formula.value) for _, candidate in indexed if candidate.formula is not None]
        points = [(candidate.analytic.value / 2**30, seconds) for candidate, seconds in timed]
        notes = [f"{candidate.name}: {candidate.analytic}, {candidate.formula}" for candidate, _ in timed]
        return charts.Curve(name, points, colour, [mark] * len(points), notes=notes)

    every = list(enumerate(plan.candidates))
    large = [(i, candidate) for i, candidate in every if not candidate.fits]
    near = [(i, candidate) for i, candidate in large if candidate.analytic.value <= _DRAWN * plan.limit]
    far = len(large) - len(near)
    curves = [
        curve("too large" + (f" ({far} more are further right)" if far else ""), "soft", "square", near),
        curve("fits", "c1", "circle", [(i, candidate) for i, candidate in every if candidate.fits and i not in best]),
        curve("Pareto front", "c0", "diamond", [(i, candidate) for i, candidate in every if i in best]),
    ]
    chosen = plan.chosen
    if chosen is not None and chosen.time is not None:
        point = (chosen.best.value / 2**30, chosen.time.step.value)
        note = f"{chosen.name}: {chosen.best}, {chosen.time.step}"
        curves.append(charts.Curve("chosen, by its compiled program", [point], "c4", ["star"], notes=[note]))
    top = max((seconds for part in curves for _, seconds in part.points), default=1.0)
    limit = plan.limit / 2**30
    line = charts.Curve(f"what a device holds: {limit:.2f} GiB", [(limit, 0.0), (limit, top)], "c3", dash="5 4")
    visible = [part for part in (*curves, line) if part.points]
    return charts.lines(visible, x="HBM of one device, GiB", y="a step, s", zero=True)


def _cells(candidate: Candidate, on_front: bool, price: float | None) -> list[str]:
    cells = [candidate.name, "yes" if on_front else "", f"{candidate.best.value / 2**30:.2f}", candidate.best.level]
    if candidate.speed is None:
        return cells + ["-"] * (4 + (price is not None))
    speed = candidate.speed
    cells += [f"{speed.step.value:.3g}", speed.step.level, f"{speed.tokens_per_chip.value:.0f}"]
    cells.append(f"{speed.mfu.value:.1%}")
    return cells + ([f"{speed.cost(price).value:.4g}"] if price is not None else [])
