"""A schedule as plain text and as plain values."""

from __future__ import annotations

import dataclasses

from vishwamai.aot.schedule.advice import advise
from vishwamai.aot.schedule.estimate import SHOWN_UNITS, ScheduleEstimate
from vishwamai.aot.schedule.times import TOP
from vishwamai.core.numbers import human


def table(schedule: ScheduleEstimate) -> str:
    """The schedule as plain text."""
    bound, chip = schedule.roofline, schedule.chip
    lines = [
        f"{schedule.name} on {schedule.target} (estimate from the compiled schedule; see docs/aot.md for its error)",
        f"  time       {_time(schedule.seconds)} at {chip.clock / 1e9:.2f} GHz; roofline {_time(bound.seconds)} by "
        f"{bound.by}; efficiency {schedule.efficiency:.0%}",
        f"  work       {bound.flops / 1e9:.2f} GFLOP ({schedule.flops_source}), {human(bound.bytes)} useful, "
        f"{human(schedule.simulation.hbm_bytes)} moved; "
        f"{bound.flops / schedule.seconds / 1e12 if schedule.seconds else 0:.1f} TFLOP/s",
    ]
    if len(schedule.simulation.core_cycles) > 1:
        lines.append("  cores      " + ", ".join(f"{cycles:.0f} cycles" for cycles in schedule.simulation.core_cycles))
    lines.append("")
    lines += _columns(schedule)
    for program in schedule.programs[:3]:
        if program.blocks and program.name != TOP:
            hot = program.blocks[0]
            share = hot.cycles / program.cycles if program.cycles else 0
            lines.append(
                f"  hottest block of {program.name}: {hot.address:#x}, {hot.length} bundles x {hot.passes}"
                f"{f' + {hot.stall:.0f} stalled' if hot.stall else ''}, {share:.0%} of its time"
            )
    lines += ["", *(f"  * {advice}" for advice in advise(schedule))]
    if schedule.guessed:
        lines.append("  guessed: " + "; ".join(schedule.guessed[:4]) + (" ..." if len(schedule.guessed) > 4 else ""))
    if schedule.warning:
        lines.append(f"  note: {schedule.warning}")
    return "\n".join(lines)


def as_dict(schedule: ScheduleEstimate) -> dict[str, object]:
    """Everything as plain values, for JSON."""
    return {
        "name": schedule.name,
        "target": schedule.target,
        "estimate_seconds": schedule.seconds,
        "cycles": schedule.simulation.cycles,
        "core_cycles": list(schedule.simulation.core_cycles),
        "efficiency": schedule.efficiency,
        "roofline": dataclasses.asdict(schedule.roofline)
        | {"seconds": schedule.roofline.seconds, "by": schedule.roofline.by},
        "flops_source": schedule.flops_source,
        "hbm_bytes": schedule.simulation.hbm_bytes,
        "advice": list(advise(schedule)),
        "guessed": list(schedule.guessed),
        "programs": [
            {
                "name": program.name,
                "kind": schedule.kind(program),
                "calls": program.calls,
                "cycles": program.cycles,
                "dma_wait": program.dma_wait,
                "matrix_stall": program.matrix_stall,
                "spills": program.spills,
                "fills": program.fills,
                "vmem": schedule.vmem.get(program.name),
                "utilisation": {unit: round(program.utilisation(unit), 4) for unit in SHOWN_UNITS},
            }
            for program in schedule.programs
        ],
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _columns(schedule: ScheduleEstimate) -> list[str]:
    """The programs' times, and below them their units: two tables, each of at most 80 columns."""
    total = schedule.simulation.cycles or 1
    programs = schedule.programs[:12]
    names = [program.name if len(program.name) <= 28 else f"{program.name[:27]}…" for program in programs]
    times = [["program", "kind", "calls", "time", "share", "VMEM"]]
    units = [["program", *(u.removeprefix("V") if u != "VALU" else u for u in SHOWN_UNITS)]]
    units[0] += ["wait", "stall", "spills"]
    for name, program in zip(names, programs):
        vmem = schedule.vmem.get(program.name)
        cycles = program.cycles or 1
        times.append(
            [
                name,
                schedule.kind(program),
                str(program.calls),
                _time(program.cycles / schedule.chip.clock),
                f"{program.cycles / total:.0%}",
                human(vmem) if vmem is not None else "",
            ]
        )
        units.append(
            [
                name,
                *(f"{program.utilisation(unit):.0%}" for unit in SHOWN_UNITS),
                f"{program.dma_wait / cycles:.0%}",
                f"{program.matrix_stall / cycles:.0%}",
                str(program.spills + program.fills),
            ]
        )
    return [*_aligned(times, left=2), "", *_aligned(units, left=1)]


def _aligned(rows: list[list[str]], left: int) -> list[str]:
    """Lines of the rows, the first `left` columns to the left and the others, which hold numbers, to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + " ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
