"""The page of a `Schedule`: what the units do block by block, the roofline with the program on it, what bounds it and
what to try.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from vishwamai import reports
from vishwamai.aot.schedule.advice import advise
from vishwamai.aot.schedule.estimate import SHOWN_UNITS, ScheduleEstimate
from vishwamai.aot.schedule.times import TOP, Block, ProgramTime
from vishwamai.core import caches
from vishwamai.reports import Markup, charts

SHOWN_BLOCKS = 60
"""Blocks of a program that its timeline draws, the hottest ones, in the order of the code."""

_COLUMNS = (
    *("program", "kind", "calls", "time", "share"),
    *SHOWN_UNITS,
    *("DMA wait", "MXU stall", "spills / fills"),
)


def write(schedule: ScheduleEstimate, path: str | os.PathLike[str]) -> None:
    """Writes the page; it holds everything it needs.

    Raises:
        UnsupportedError: Jinja2 is not installed.
    """
    page = reports.render(
        "aot/schedule/report.html",
        title=f"{schedule.name} on {schedule.target}",
        facts=_headline(schedule),
        advice=advise(schedule),
        columns=_COLUMNS,
        rows=[_row(schedule, program) for program in schedule.programs[:20]],
        roofline=_roofline(schedule),
        timelines=[_timeline(program, schedule) for program in schedule.programs[:3] if program.name != TOP],
        guessed=schedule.guessed[:12],
    )
    caches.write(pathlib.Path(path), page)


def _headline(schedule: ScheduleEstimate) -> list[tuple[str, str]]:
    bound = schedule.roofline
    return [
        (_time(schedule.seconds), "estimated device time"),
        (_time(bound.seconds), f"roofline, by {bound.by}"),
        (f"{schedule.efficiency:.0%}", "of the roofline"),
        (
            f"{bound.flops / schedule.seconds / 1e12:.1f} TFLOP/s" if schedule.seconds else "-",
            f"FLOP {schedule.flops_source}",
        ),
        (f"{schedule.simulation.hbm_bytes / 2**20:.1f} MiB", f"moved; {bound.bytes / 2**20:.1f} MiB useful"),
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _row(schedule: ScheduleEstimate, program: ProgramTime) -> Sequence[str]:
    cycles = program.cycles or 1
    return [
        program.name,
        schedule.kind(program),
        str(program.calls),
        _time(program.cycles / schedule.chip.clock),
        f"{program.cycles / (schedule.simulation.cycles or 1):.1%}",
        *(f"{program.utilisation(unit):.0%}" for unit in SHOWN_UNITS),
        f"{program.dma_wait / cycles:.0%}",
        f"{program.matrix_stall / cycles:.0%}",
        f"{program.spills} / {program.fills}",
    ]


def _roofline(schedule: ScheduleEstimate) -> Markup:
    bound = schedule.roofline
    ridge = bound.peak / bound.bandwidth
    intensity = bound.intensity if bound.bytes else ridge
    low, high = min(intensity, ridge) / 20, max(intensity, ridge) * 20
    achieved = bound.flops / schedule.seconds if schedule.seconds else 0.0
    roof = [(x, min(bound.peak, x * bound.bandwidth) / 1e12) for x in (low, ridge, high)]
    mark = f"{schedule.name}: {schedule.efficiency:.0%}"
    curves = [
        charts.Curve(f"{schedule.chip.name} device", roof, "soft"),
        charts.Curve(mark, [(intensity, achieved / 1e12)], "c4", marks=["circle"]),
    ]
    return charts.lines(curves, x="useful FLOP per useful byte of HBM", y="TFLOP/s", log=True, height=320)


def _shares(block: Block, program: ProgramTime) -> list[float]:
    cycles = block.length + block.stall or 1.0
    busy = {"MXU": block.matrix, "XLU": block.crosslane}
    return [
        busy[unit] / cycles if unit in busy else block.units[unit] / (cycles * max(1, program.capacity[unit]))
        for unit in SHOWN_UNITS
    ]


def _timeline(program: ProgramTime, schedule: ScheduleEstimate) -> tuple[str, Markup]:
    """(the program, its units by blocks, the blocks as wide as the time that they take)."""
    blocks = sorted([block for block in program.blocks if block.cycles][:SHOWN_BLOCKS], key=lambda block: block.address)
    edges = [0.0]
    for block in blocks:
        edges.append(edges[-1] + block.cycles / schedule.chip.clock * 1e6)
    columns = [_shares(block, program) for block in blocks]
    notes = [
        f"block {block.address:#x}: {block.length} bundles x {block.passes}, {block.stall:.0f} stalled a pass, "
        f"{block.cycles / (program.cycles or 1):.0%} of the time"
        for block in blocks
    ]
    values = [[column[row] for column in columns] for row in range(len(SHOWN_UNITS))]
    waiting = f"waiting for HBM, left out: {program.dma_wait / (program.cycles or 1):.0%}"
    return f"{program.name} ({waiting})", charts.shares(SHOWN_UNITS, edges, values, notes, x="time in its blocks, us")
