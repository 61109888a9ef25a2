"""Kernels and their peers on TPUs you do not have: the compiler's own schedule of each program, followed by the same
simulator.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from vishwamai.aot import Inspection, KernelSchedule, inspect_many
from vishwamai.aot.schedule.times import TOP
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.hardware import TPUS
from vishwamai.core.types import PyTree

OURS = "vishwamai"
MOVES = re.compile(r"copy|transpose|reshape|pad|bitcast|slice|concatenate")
"""How the names begin that XLA gives to what only moves data."""
Call = tuple[str, Callable[..., Any]]
Row = tuple[str, float, int]
"""A program of a schedule, or several of one name: its name, seconds of all calls, how many there are."""


def parser(doc: str | None, targets: Iterable[str] = TPUS, **choices: Iterable[str]) -> argparse.ArgumentParser:
    """`--targets`, and an option for each of `choices`: comma-separated, all of them by default."""
    arguments_parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in {"targets": targets, **choices}.items():
        arguments_parser.add_argument(f"--{name}", default=list(values), type=lambda text: text.split(","))
    return arguments_parser


def with_gradient(call: Callable[..., PyTree], outputs: bool = False) -> Callable[..., PyTree]:
    """The program of forward and backward pass together: of the arrays and a cotangent; `outputs`: it returns the
    forward's result, too.
    """

    def run(*arguments: object, **how: object) -> PyTree:
        *arrays, cotangent = arguments
        y, pull = jax.vjp(lambda *arrays: call(*arrays, **how), *arrays)
        gradients = pull(cotangent)
        return (y, gradients) if outputs else gradients

    return run


def seconds(programs: Sequence[Inspection]) -> dict[str, float | str]:
    """Estimated seconds of each program by its name, or in a few words why the compiler made none."""
    return seconds_of({str(program.name): schedule for program, schedule in zip(programs, inspect_many(programs))})


def seconds_of(schedules: Mapping[str, KernelSchedule | VishwamaiError]) -> dict[str, float | str]:
    """`seconds` of programs that were inspected; a program that the compiler left in part has no time."""
    return {name: _seconds(schedule) for name, schedule in schedules.items()}


def _seconds(schedule: KernelSchedule | VishwamaiError) -> float | str:
    if isinstance(schedule, VishwamaiError):
        return str(schedule).splitlines()[0][:60]
    left_out = [gap for gap in schedule.simulation.unknown if re.match(r"program (?!iota).* is not in the dump", gap)]
    return left_out[0] if left_out else schedule.seconds


def inspected(calls: Iterable[Call], arrays: Sequence[object], target: str, flops: float) -> dict[str, float | str]:
    """`seconds` of several calls with the same arrays."""
    return seconds([Inspection(call, arrays, target=target, flops=flops, name=name) for name, call in calls])


def layout_copies(rows: Iterable[Row]) -> tuple[float, list[str]]:
    """Seconds of what only moves data, and its rows in words, the longest first.

    >>> layout_copies([("fusion.1", 1.0, 1), ("copy.3", 2e-6, 1), ("transpose_copy", 4e-6, 2)])
    (6e-06, ['transpose_copy 4 us (2 calls)', 'copy.3 2 us (1 calls)'])
    """
    moves = sorted((row for row in rows if MOVES.match(row[0])), key=lambda row: -row[1])
    return sum(row[1] for row in moves), [in_words(*row) for row in moves]


def in_words(name: str, seconds: float, calls: int) -> str:
    """A row for a reader."""
    return f"{name} {seconds * 1e6:.0f} us ({calls} calls)"


def around(schedule: KernelSchedule, smallest: float = 1e-3) -> list[str]:
    """What XLA adds around kernels, in words: first what only moves data, then all else above a share of the time."""
    clock, total = schedule.simulation.chip.clock, schedule.seconds
    rows = [
        (program.name, program.cycles / clock, program.calls)
        for program in schedule.simulation.programs
        if program.name not in schedule.pallas
    ]
    lost, moves = layout_copies(rows)
    rest = sorted((row for row in rows if not MOVES.match(row[0])), key=lambda row: -row[1])
    waited = next((p.dma_wait / clock for p in schedule.simulation.programs if p.name == TOP), 0.0)
    lines = [f"moved: {lost * 1e6:.0f} us, {lost / total:.1%}; the top level waits {waited * 1e6:.0f} us for copies"]
    lines += [f"  {text}" for text in moves]
    lines += [f"other: {in_words(*row)}, {row[1] / total:.1%}" for row in rest if row[1] > smallest * total]
    return lines


def best_peer(times: Mapping[str, float | str]) -> tuple[str, float] | None:
    """(name, seconds) of the fastest program that is not ours; None where no peer compiled."""
    peers = {name: time for name, time in times.items() if name != OURS and isinstance(time, float)}
    return min(peers.items(), key=lambda peer: peer[1], default=None)


def other_peers(times: Mapping[str, float | str], best: str) -> dict[str, float]:
    """The best seconds of each peer except `best`, by its name without the sizes of tiles that end it.

    >>> other_peers({"a 512/512": 2e-3, "a 256/512": 3e-3, "b 512": 5e-3, "b 256": 4e-3}, "a 512/512")
    {'b': 0.004}
    """
    others: dict[str, float] = {}
    for name, time in times.items():
        peer = _without_tiles(name)
        if name != OURS and isinstance(time, float) and peer != _without_tiles(best):
            others[peer] = min(time, others.get(peer, time))
    return others


def _without_tiles(name: str) -> str:
    return re.sub(r" [\d/]+$", "", name)


class PeerTable:
    """A line for each problem, with our time, the best peer's, their ratio and the other peers' best times; then the
    ratios' means by group.
    """

    def __init__(self, head: str):
        self.ratios: dict[str, list[float]] = {}
        print(f"{head}{'ours, ms':>9}{'best peer, ms':>15}{'ratio':>7}  best peer")

    def line(self, label: str, group: str, times: Mapping[str, float | str]) -> None:
        """Prints one problem; `group`: whose mean its ratio enters."""
        mine, best = times[OURS], best_peer(times)
        if isinstance(mine, str) or best is None:
            rest = {name: time for name, time in times.items() if name != OURS}
            print(f"{label}{mine if isinstance(mine, str) else rest}", flush=True)
            return
        ratio = mine / best[1]
        self.ratios.setdefault(group, []).append(ratio)
        rest = "".join(f"; {name} {time * 1e3:.3f}" for name, time in other_peers(times, best[0]).items())
        print(f"{label}{mine * 1e3:>9.3f}{best[1] * 1e3:>15.3f}{ratio:>7.3f}  {best[0]}{rest}", flush=True)

    def means(self) -> None:
        """Prints the geometric mean of each group."""
        for group, values in self.ratios.items():
            mean, worst, count = statistics.geometric_mean(values), max(values), len(values)
            print(f"{group}: ours / best peer, geometric mean {mean:.3f}, worst {worst:.3f}, {count} cases (estimates)")
