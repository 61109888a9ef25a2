"""Searches the tiles of an operation by the compiler's own schedule, for chips that need not be here.

A hill climb from the heuristic's config: every tile doubled and halved, all neighbours compiled together, the fastest taken, until nothing is
faster or the budget of compilations is spent. What the compiler refuses (VMEM, mostly) is out; what comes within `ENOUGH` of the roofline is good
enough. The winner is written where `core.tuning` looks it up, with the evidence; cases that a table has already, for the same versions, are passed
over, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vishwamai.aot import libtpu, schedule, tables
from vishwamai.aot.compile import tracing_for
from vishwamai.core import tuning
from vishwamai.core.cases import Case
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import KernelError, VishwamaiError
from vishwamai.core.hardware import Chip, chip
from vishwamai.core.op import Plan, record_plans

__all__ = ["Outcome", "Search", "neighbours", "tune", "tune_case"]

ENOUGH = 0.95
"""Efficiency from which the search stops."""
MARGIN = 0.99
"""A config has to take less than this share of the best one's time to replace it: less is within what the estimate can tell."""
_BACKWARD = "backward_"
_NO_TILES = ("vmem_bytes", "buffers", "cores")
"""Ends of the names of integers that are no tiles: plans of memory, counts of buffers, of which the compiler takes one or two, and the chip's cores."""
_VMEM = _NO_TILES[0]
_UNLIMITED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the search found for one case on one chip.

    Attributes:
        op, implementation, key: where the table keeps it; `case`: its name; `target`: the chip.
        config: the best config as a dictionary; `heuristic`: the heuristic's.
        seconds, heuristic_seconds: estimates of forward and backward together; `efficiency`: of the best.
        compilations: how many programs were compiled; `refused`: configs that the compiler refused, with its reason.
    """

    op: str
    implementation: str
    key: str
    case: str
    target: str
    config: dict[str, Any]
    heuristic: dict[str, Any]
    seconds: float
    heuristic_seconds: float
    efficiency: float
    compilations: int
    refused: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether the best config differs from the heuristic's."""
        return self.config != self.heuristic

    def entry(self) -> dict[str, Any]:
        """What the table holds; of the heuristic's config only what the best one has otherwise."""
        other = {name: value for name, value in self.heuristic.items() if value != self.config[name]}
        return {
            "config": self.config,
            **({"heuristic": other} if other else {}),
            "estimate_us": round(self.seconds * 1e6, 2),
            "heuristic_us": round(self.heuristic_seconds * 1e6, 2),
            "efficiency": round(self.efficiency, 3),
            "case": self.case,
            "versions": libtpu.versions(),
        }


@dataclasses.dataclass(frozen=True)
class _Trial:
    config: Any
    seconds: float
    efficiency: float


class Search:
    """The search for one case on one chip."""

    def __init__(self, case: Case, target: str, budget: int, workers: int):
        self.case, self.target, self.budget, self.workers = case, target, budget, workers
        self.chip: Chip = chip(target)
        self.compilations = 0
        self.refused: list[str] = []
        self.plan = _plan(case, target)
        self.choice = next(choice for choice in self.plan.choices if choice.platform in ("tpu", None))
        self.split = any(name.startswith(_BACKWARD) for name in tiles(self.choice.config))

    def _program(self, config: Any, backward: bool) -> schedule.Case:
        case, name = self.case, self.choice.implementation.name
        arrays = arguments(case)
        moved = case.differentiable

        def forward(**values: Any) -> Any:
            return case.run(values, implementation=name, config=config)

        def both(values: dict[str, Any], fixed: dict[str, Any], cotangents: Any) -> Any:
            out, pull = jax.vjp(lambda v: forward(**v, **fixed), values)
            return out, pull(cotangents)

        if not backward:
            return schedule.Case(forward, kwargs=arrays, target=self.target, name=case.name)
        values = {key: arrays[key] for key in moved}
        fixed = {key: array for key, array in arrays.items() if key not in moved}
        # Cotangents come from outside, as in training: made here they would cost a pass over HBM of their own.
        with tracing_for(self.target):
            cotangents = jax.eval_shape(lambda v, f: forward(**v, **f), values, fixed)
        return schedule.Case(both, (values, fixed, cotangents), target=self.target, name=f"{case.name} backward")

    def _illegal(self, program: schedule.Case) -> str | None:
        """Why the kernel cannot be traced with these tiles: each kernel knows its own rules, and tracing asks it."""
        try:
            with tracing_for(self.target):
                jax.eval_shape(program.fn, *program.args, **program.kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return None

    def evaluate(self, configs: Sequence[Any], backward: bool) -> list[_Trial]:
        """The trials of those configs that compile; the others are noted in `refused`."""
        programs, tried = [], []
        for config in configs:
            if len(programs) == self.budget - self.compilations:
                break
            program = self._program(config, backward)
            reason = self._illegal(program)
            if reason is None:
                programs.append(program)
                tried.append(config)
            else:
                self.refused.append(f"{_short(config)}: {reason}")
        if not programs:
            return []
        self.compilations += len(programs)
        trials = []
        for config, found in zip(tried, schedule.inspect_many(programs, workers=self.workers)):
            if isinstance(found, VishwamaiError):
                self.refused.append(f"{_short(config)}: {str(found).splitlines()[0][:200]}")
            else:
                trials.append(_Trial(config, found.seconds, found.efficiency))
        return trials

    def climb(self, start: Any, fields: Sequence[str], backward: bool) -> tuple[_Trial, _Trial]:
        """The best trial and the heuristic's own, over the named fields.

        Raises:
            KernelError: the heuristic's own config does not compile.
        """
        first = self.evaluate([start], backward)
        if not first:
            raise KernelError(
                f"tune: {self.case.op} {self.case.name!r} does not compile for {self.target}: {self.refused[-1:]}"
            )
        best = heuristic = first[0]
        seen = {start}
        while best.efficiency < ENOUGH and self.compilations < self.budget:
            fresh = [config for config in neighbours(best.config, fields, self.chip) if config not in seen]
            seen.update(fresh)
            if not fresh:
                break
            trials = self.evaluate(fresh, backward)
            fastest = min(trials, key=lambda trial: trial.seconds, default=best)
            if fastest.seconds >= MARGIN * best.seconds:
                break
            best = fastest
        return best, heuristic

    def run(self) -> Outcome:
        """Forward first and backward next where the config has fields for each, else both at once. The last program holds both passes."""
        config = self.choice.config
        names = list(tiles(config))
        passes = [False, True] if self.split and self.case.differentiable else [bool(self.case.differentiable)]
        saved, budget = 0.0, self.budget
        for done, backward in enumerate(passes, start=1):
            self.budget = budget * done // len(passes)  # the first pass leaves the second its share
            fields = [n for n in names if n.startswith(_BACKWARD) == backward] if self.split else names
            best, heuristic = self.climb(config, fields, backward)
            config = best.config
            saved += heuristic.seconds - best.seconds
        return Outcome(
            op=self.plan.op.name,
            implementation=self.choice.implementation.name,
            key=self.plan.spec.tuning_key(),
            case=self.case.name,
            target=self.target,
            config=dataclasses.asdict(config),
            heuristic=dataclasses.asdict(self.choice.config),
            seconds=best.seconds,
            heuristic_seconds=best.seconds + saved,
            efficiency=best.efficiency,
            compilations=self.compilations,
            refused=tuple(self.refused),
        )


def _short(config: Any) -> str:
    return " ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config))


def arguments(case: Case) -> dict[str, Any]:
    """The case's arrays: shapes, but values of the 32-bit integers, which steer kernels (page tables, lengths)."""
    rng = np.random.default_rng(0)
    given = {name: init.make(rng) for name, init in case.arrays.items() if init.dtype == "int32"}
    return dict(case.shapes()) | given


def _plan(case: Case, target: str) -> Plan:
    """The plan of the case's first op call, as the heuristic alone would choose it."""
    with tracing_for(target), kernel_config(target=target, auto_optimize=False):
        plans = record_plans(case.run, case.shapes())
    plan = next((plan for plan in plans if plan.op.name == case.op), None)
    if plan is None:
        raise KernelError(f"tune: case {case.name!r} calls no {case.op}.")
    served = next(choice for choice in plan.choices if choice.platform in ("tpu", None))
    if served.config is None or not dataclasses.is_dataclass(served.config):
        raise KernelError(
            f"tune: {case.op} {case.name!r} runs {served.implementation.name!r} on {target}, which has no tiles."
        )
    return plan


def tiles(config: Any) -> dict[str, int]:
    """The tile sizes of a config by field; those in a tuple as `field.index`. Not a tile: flags, `_NO_TILES`, and what stands for "no limit"."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            found |= {f"{field.name}.{index}": part for index, part in enumerate(value)}
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and not field.name.endswith(_NO_TILES)
            and value < _UNLIMITED
        ):
            found[field.name] = value
    return found


def _resized(config: Any, sizes: dict[str, int], one: Chip) -> Any:
    """The config with other tiles, and memory planned for them: no buffer grows faster than a tile does."""
    before = tiles(config)
    values: dict[str, Any] = {}
    for name, size in sizes.items():
        field, _, index = name.partition(".")
        if index:
            old = values.get(field, getattr(config, field))
            values[field] = tuple(size if i == int(index) else part for i, part in enumerate(old))
        else:
            values[field] = size
    for field in dataclasses.fields(config):
        if _VMEM in field.name:
            mine = [n for n in sizes if n.startswith(_BACKWARD) == field.name.startswith(_BACKWARD)]
            growth = math.prod(max(1.0, sizes[name] / before[name]) for name in mine)
            values[field.name] = min(
                int(getattr(config, field.name) * growth), max(one.vmem_bytes * 3 // 4, getattr(config, field.name))
            )
    return dataclasses.replace(config, **values)


def neighbours(config: Any, fields: Iterable[str], one: Chip) -> Iterator[Any]:
    """Configs that differ from `config` by a factor of two in one of `fields` (as `tiles` names them), or in two against one another.

    First come those that cut one axis otherwise (`block_q` against `panel_q`) and need no more memory, so that a small budget tells most. Those that
    the config's own rules refuse (a `KernelError` of its constructor) are left out.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Tiles:
        ...     block: int
        ...     unroll: int
        >>> sorted((t.block, t.unroll) for t in neighbours(Tiles(256, 1), ["block", "unroll"], chip("v5e")))
        [(128, 1), (128, 2), (256, 2), (512, 1)]
    """
    now, names = tiles(config), list(fields)
    pairs = [(a, b) for a in names for b in names if a != b]
    of_one_axis = [(a, b) for a, b in pairs if a.rpartition("_")[2] == b.rpartition("_")[2]]
    steps = [{a: now[a] * 2, b: now[b] // 2} for a, b in of_one_axis]
    steps += [{name: size} for name in reversed(names) for size in (now[name] // 2, now[name] * 2)]
    steps += [{a: now[a] * 2, b: now[b] // 2} for a, b in pairs if (a, b) not in of_one_axis]
    for step in steps:
        if all(step.values()):
            try:
                yield _resized(config, step, one)
            except KernelError:
                continue


def tune_case(case: Case, target: str, budget: int = 24, workers: int = 1) -> Outcome:
    """Searches the tiles of one case for one chip.

    Args:
        case: the call to tune for, forward and backward.
        target: "v4", "v5e", "v5p", "v6e" or "tpu7x".
        budget: programs to compile at most.
        workers: compiler processes at a time.

    Raises:
        DeviceError: libtpu is missing.
        KernelError: the case has nothing to tune on this chip, or its heuristic config does not compile.
    """
    return Search(case, target, budget, workers).run()


def tune(
    cases: Iterable[Case],
    targets: Sequence[str],
    *,
    directory: pathlib.Path | None = None,
    budget: int = 24,
    workers: int = 1,
    again: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[Outcome | KernelError]:
    """Tunes cases for chips and writes the tables.

    Args:
        cases: the calls to tune for, such as those of an op that are tagged "model".
        targets: the chips.
        directory: where the tables go; default: the user's own, `vishwamai.core.tuning.user_directory()`.
        budget: programs to compile for each case and chip at most.
        workers: compiler processes at a time.
        again: search also what the tables have.
        progress: called with (done, total, what was just done).

    Returns:
        one outcome for each case and chip that was searched; an error where there was nothing to tune or nothing compiled.

    Raises:
        DeviceError: libtpu is missing.
    """
    place = directory or tuning.user_directory()
    work = [(case, target) for target in targets for case in cases]
    found: list[Outcome | KernelError] = []
    for done, (case, target) in enumerate(work, start=1):
        if not again and tables.known(place, case, target):
            progress(done, len(work), f"{target} {case.op} {case.name}: in the table")
            continue
        try:
            outcome = tune_case(case, target, budget, workers)
        except KernelError as error:
            found.append(error)
            progress(done, len(work), f"{target} {case.op} {case.name}: {error}")
            continue
        tables.write(place, target, outcome.op, outcome.implementation, outcome.key, outcome.entry())
        tuning.reload()
        found.append(outcome)
        gain = outcome.heuristic_seconds / outcome.seconds if outcome.seconds else 1.0
        progress(
            done,
            len(work),
            f"{target} {case.op} {case.name}: {outcome.seconds * 1e6:.1f} us (estimate), {gain:.2f} x the heuristic, "
            f"{outcome.efficiency:.0%} of the roofline, {outcome.compilations} compiled",
        )
    return found
