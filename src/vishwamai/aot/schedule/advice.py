"""From the counts of a schedule to words: what bounds the program, and what to try."""

from __future__ import annotations

from vishwamai.aot.schedule.estimate import ScheduleEstimate
from vishwamai.aot.schedule.times import TOP, ProgramTime
from vishwamai.core.numbers import human

BUSY = 0.75
"""Share of the cycles from which a unit counts as what bounds a program."""

_UNITS = {
    "VALU": (
        "the vector ALUs: fold constants into operands, drop masks on inner blocks, use bfloat16 arithmetic from v6e on"
    ),
    "EUP": (
        "the transcendental unit: fewer exp, tanh or reciprocals (exp2 with the factor folded in, one reciprocal per "
        "row)"
    ),
    "XLU": (
        "the cross-lane units: fewer reductions over lanes, transposes and broadcasts along lanes; reduce over "
        "sublanes or by a matrix product"
    ),
    "VLOAD": "loads from VMEM: keep more in registers, reuse what is loaded, avoid strided access",
    "VSTORE": "stores to VMEM: accumulate in registers or fewer times in scratch",
}


def advise(schedule: ScheduleEstimate) -> tuple[str, ...]:
    """What bounds `schedule` and what to try, most important first."""
    advice: list[str] = []
    programs = [program for program in schedule.programs if program.name != TOP]
    total = schedule.simulation.cycles
    if not programs or not total:
        return ("nothing runs: the compiler folded the program into constants or copies.",)
    advice += _cores(schedule)
    hottest = programs[0]
    advice += _program(schedule, hottest)
    advice += _work(schedule)
    fusions = sum(program.cycles for program in programs if schedule.kind(program) == "xla" and program is not hottest)
    if schedule.kind(hottest) == "pallas" and fusions > 0.1 * total:
        advice.append(
            f"{fusions / total:.0%} of the time goes to XLA around the kernel (copies, transposes, casts): fuse them "
            "into it, or keep the layout that it wants."
        )
    top = next((program.cycles for program in schedule.programs if program.name == TOP), 0.0)
    if top > 0.2 * total:
        advice.append(
            f"{top / total:.0%} of the time is between programs (launches and waits): give one call more work."
        )
    return tuple(advice)


def _cores(schedule: ScheduleEstimate) -> list[str]:
    cores = schedule.simulation.core_cycles
    if len(cores) < 2 or min(cores) >= 0.9 * max(cores):
        return []
    return [
        f"the cores are out of balance ({min(cores):.0f} against {max(cores):.0f} cycles): give the kernel a leading "
        "grid dimension marked "
        '"parallel" that splits the work evenly.'
    ]


def _program(schedule: ScheduleEstimate, program: ProgramTime) -> list[str]:
    """What bounds one program."""
    advice = []
    cycles = program.cycles or 1.0
    matrix = program.utilisation("MXU")
    wait, stall = program.dma_wait / cycles, program.matrix_stall / cycles
    busiest = max(_UNITS, key=program.utilisation)
    if matrix >= BUSY:
        advice.append(
            f"{program.name} is bound by the matrix units, busy {matrix:.0%} of the time: only fewer products help."
        )
    elif wait >= 0.3:
        advice.append(_copies(schedule, program, wait))
    elif program.utilisation(busiest) >= BUSY:
        advice.append(f"{program.name} is bound ({program.utilisation(busiest):.0%} busy) by {_UNITS[busiest]}.")
    else:
        advice.append(
            f"{program.name} is bound by latency: the matrix units are busy {matrix:.0%}, {busiest} "
            f"{program.utilisation(busiest):.0%}, the rest waits on results. Unroll, take larger tiles, or issue the "
            "next step's products before this step's vector work."
        )
    if stall > 0.1:
        advice.append(
            f"{stall:.0%} of its time waits for products: interleave independent work between a product and its use."
        )
    slots = program.units["VSTORE:SPILL"] + program.units["VLOAD:FILL"]
    if slots > 0.1 * cycles:
        advice.append(
            f"registers spill ({program.spills} spills and {program.fills} fills in the code, {slots / cycles:.1f} a "
            "cycle): smaller tiles in the innermost loop, or fewer values kept across it."
        )
    return advice


def _copies(schedule: ScheduleEstimate, program: ProgramTime, wait: float) -> str:
    traffic, useful = schedule.simulation.hbm_bytes, schedule.roofline.bytes
    start = f"{program.name} waits for HBM {wait:.0%} of the time"
    if traffic > 1.5 * useful:
        return (
            f"{start} and moves {human(traffic)} where {human(useful)} would do: larger blocks, or an order of the "
            "grid that reuses them."
        )
    if schedule.efficiency > 0.8:
        return (
            f"{start} at {schedule.efficiency:.0%} of the bandwidth bound: only fewer bytes help (narrower dtypes, "
            "fusing with its neighbours)."
        )
    per_call = program.hbm_bytes / max(1, program.calls)
    return (
        f"{start} though it moves little more than it must ({human(per_call)} a call): larger blocks per step or more "
        "buffers hide the latency."
    )


def _work(schedule: ScheduleEstimate) -> list[str]:
    issued, useful = sum(schedule.simulation.flops.values()), schedule.roofline.flops
    if schedule.flops_source == "given" and useful and issued > 1.3 * useful:
        return [
            f"the matrix units are given {issued / useful:.1f} times the useful work: dimensions under "
            f"{schedule.chip.mxu_size} are padded, or masked blocks are computed."
        ]
    return []
