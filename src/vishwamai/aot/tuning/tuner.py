"""Searches the tiles of an operation by the compiler's own schedule, for chips that need not be here.

A hill climb from the heuristic's config: every tile doubled and halved, all neighbours compiled together, the fastest
taken, until nothing is faster or the budget of compilations is spent. What the compiler rejects (VMEM, mostly) is out;
what comes within `ENOUGH` of the roofline is good enough. Where a config has tiles of its own for each kernel, one
program steps all of them, for the schedule tells each kernel's time. The winner is written where `core.tuning` looks it
up, with the evidence; cases that a table has already, for the same versions, are passed over, so that an interrupted
run goes on where it was.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.compiled import tracing_for
from vishwamai.aot.schedule import inspection
from vishwamai.aot.tuning import tables
from vishwamai.aot.tuning.climb import climb
from vishwamai.aot.tuning.variations import abreast, adopt, kernels, neighbours, passes
from vishwamai.core import tuning
from vishwamai.core.cases import Case
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import KernelError, VishwamaiError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.interrupt import raise_interrupt
from vishwamai.core.observe import record_plans
from vishwamai.core.op import CallPlan
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree

__all__ = ["Outcome", "Search", "tune", "tune_case"]

ENOUGH = 0.95
"""Efficiency from which the search stops."""
MARGIN = 0.99
"""A config has to take less than this share of the best one's time to replace it: less is within what the estimate can
tell.
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the search found for one case on one chip.

    Attributes:
        op, implementation, key: place in the table; `case`: its name; `target`: the chip.
        config: the best config as a dictionary; `heuristic`: the heuristic's.
        seconds, heuristic_seconds: estimates of forward and backward together; `efficiency`: of the best.
        compilations: how many programs were compiled; `rejected`: configs that the compiler rejected, with its reason.
    """

    op: str
    implementation: str
    key: str
    case: str
    target: str
    config: dict[str, object]
    heuristic: dict[str, object]
    seconds: float
    heuristic_seconds: float
    efficiency: float
    compilations: int
    rejected: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether the best config differs from the heuristic's."""
        return self.config != self.heuristic

    def entry(self) -> dict[str, object]:
        """What the table holds; of the heuristic's config only what the best one has otherwise."""
        differing = {name: value for name, value in self.heuristic.items() if value != self.config[name]}
        return {
            "config": self.config,
            **({"heuristic": differing} if differing else {}),
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
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the kernel that each part of the config is for, where there is one for each."""


class Search:
    """The search for one case on one chip."""

    def __init__(self, case: Case, target: str, budget: int, workers: int):
        self.case, self.budget, self.workers = case, budget, workers
        self.chip: TpuChip = Target.parse_chip(target)
        self.target = self.chip.name
        self.compilations = 0
        self.rejected: list[str] = []
        self.plan = _plan(case, self.target)
        self.choice = next(choice for choice in self.plan.choices if choice.platform in ("tpu", None))
        self.aim = Target("tpu", self.chip)
        self.passes = passes(self.choice.config)
        self.kernels = kernels(self.choice.config)

    def _program(self, config: object, backward: bool) -> inspection.Inspection:
        case, name = self.case, self.choice.implementation.name
        arrays = arguments(case)
        differentiated = case.differentiable

        def forward(**values: object) -> PyTree:
            return case.run(values, implementation=name, config=config)

        def forward_and_backward(
            values: Mapping[str, object], fixed: dict[str, object], cotangents: AnyArray
        ) -> tuple[PyTree, PyTree]:
            out, pull = jax.vjp(lambda v: forward(**v, **fixed), values)
            return out, pull(cotangents)

        if not backward:
            return inspection.Inspection(forward, kwargs=arrays, target=self.target, name=case.name)
        values = {key: arrays[key] for key in differentiated}
        fixed = {key: array for key, array in arrays.items() if key not in differentiated}
        # Cotangents come from outside, as in training: made here they would cost a pass over HBM of their own.
        with tracing_for(self.target):
            cotangents = jax.eval_shape(lambda v, f: forward(**v, **f), values, fixed)
        return inspection.Inspection(
            forward_and_backward, (values, fixed, cotangents), target=self.target, name=f"{case.name} backward"
        )

    def _illegal(self, program: inspection.Inspection) -> str | None:
        """Why the kernel cannot be traced with these tiles: each kernel knows its own rules, and tracing asks it."""
        try:
            with tracing_for(self.target):
                jax.eval_shape(program.fn, *program.args, **program.kwargs)
        except Exception as error:
            raise_interrupt()
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return None

    def evaluate(self, configs: Sequence[Any], backward: bool) -> list[_Trial]:
        """The trials of those configs that compile; the others are noted in `rejected`."""
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
                self.rejected.append(f"{_short(config)}: {reason}")
        if not programs:
            return []
        self.compilations += len(programs)
        trials = []
        for config, schedule in zip(tried, inspection.inspect_many(programs, workers=self.workers)):
            if isinstance(schedule, VishwamaiError):
                self.rejected.append(f"{_short(config)}: {str(schedule).splitlines()[0][:200]}")
            else:
                trials.append(_Trial(config, schedule.seconds, schedule.efficiency, self._parts(schedule)))
        return trials

    def _parts(self, schedule: inspection.KernelSchedule) -> dict[str, float]:
        """Seconds of each of `kernels`: of the Pallas programs that bear its name, and of those without a name of
        another for the first.
        """
        parts = dict.fromkeys(self.kernels, 0.0)
        for program in schedule.programs:
            if parts and schedule.kind(program) == "pallas":
                named = next((kernel for kernel in self.kernels if kernel in program.name), self.kernels[0])
                parts[named] += program.cycles / schedule.chip.clock
        return parts

    def climb(self, start: object, fields: Sequence[str], backward: bool) -> tuple[_Trial, _Trial]:
        """The best trial and the heuristic's own, over the named fields.

        Raises:
            KernelError: the heuristic's own config does not compile.
        """
        climbed = climb(
            start,
            lambda configs: self.evaluate(configs, backward),
            lambda config: neighbours(config, fields, self.plan.spec, self.aim),
            MARGIN,
            lambda trial: trial.efficiency >= ENOUGH,
        )
        if climbed is None:
            raise KernelError(
                f"tune: {self.case.op} {self.case.name!r} does not compile for {self.target}: {self.rejected[-1:]}"
            )
        return climbed

    def climb_abreast(self) -> tuple[_Trial, _Trial]:
        """`climb` for configs with tiles of its own for each kernel: every program steps them all, and each kernel
        keeps what serves it best.

        Raises:
            KernelError: the heuristic's own config does not compile.
        """
        best, heuristic = self.climb(self.choice.config, (), bool(self.case.differentiable))
        seen = {best.config}
        while best.efficiency < ENOUGH and self.compilations < self.budget - 1:
            fresh = [
                config for config in abreast(best.config, self.kernels, self.plan.spec, self.aim) if config not in seen
            ]
            seen.update(fresh)
            self.budget -= 1  # one program is kept for what is best of each
            trials = self.evaluate(fresh, bool(self.case.differentiable))
            self.budget += 1
            config = best.config
            for kernel in self.kernels:
                fastest = min(trials, key=lambda trial: trial.parts[kernel], default=best)
                if fastest.parts[kernel] < MARGIN * best.parts[kernel]:
                    config = adopt(config, fastest.config, kernel, self.plan.spec, self.aim)
            if config == best.config:
                break
            seen.add(config)
            trial_of_both = [t for t in trials if t.config == config] or self.evaluate(
                [config], bool(self.case.differentiable)
            )
            if not trial_of_both or trial_of_both[0].seconds >= MARGIN * best.seconds:
                break
            best = trial_of_both[0]
        return best, heuristic

    def run(self) -> Outcome:
        """Forward first and backward next where the config has fields for each, else both at once. The last program
        holds both passes.
        """
        config = self.choice.config
        differentiable = bool(self.case.differentiable)
        if "backward" in self.passes:
            climbs = [(False, self.passes["forward"]), (True, self.passes["backward"])][: 2 if differentiable else 1]
        else:
            climbs = [(differentiable, self.passes.get("forward", []))]
        saved, budget = 0.0, self.budget
        if self.kernels:
            best, heuristic = self.climb_abreast()
            return self._outcome(best, heuristic.seconds)
        for done, (backward, fields) in enumerate(climbs, start=1):
            self.budget = budget * done // len(climbs)  # the first pass leaves the second its share
            best, heuristic = self.climb(config, fields, backward)
            config = best.config
            saved += heuristic.seconds - best.seconds
        return self._outcome(best, best.seconds + saved)

    def _outcome(self, best: _Trial, heuristic_seconds: float) -> Outcome:
        return Outcome(
            op=self.plan.op.name,
            implementation=self.choice.implementation.name,
            key=self.plan.spec.tuning_key(),
            case=self.case.name,
            target=self.target,
            config=dataclasses.asdict(best.config),
            heuristic=dataclasses.asdict(self.choice.config),
            seconds=best.seconds,
            heuristic_seconds=heuristic_seconds,
            efficiency=best.efficiency,
            compilations=self.compilations,
            rejected=tuple(self.rejected),
        )


def _short(config: Any) -> str:
    return " ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config))


def arguments(case: Case) -> dict[str, np.ndarray | jax.ShapeDtypeStruct]:
    """The case's arrays: shapes, but values of the 32-bit integers, which steer kernels (page tables, lengths)."""
    rng = np.random.default_rng(0)
    indices = {name: init.make(rng) for name, init in case.arrays.items() if init.dtype == "int32"}
    return dict(case.shapes()) | indices


def _plan(case: Case, target: str) -> CallPlan:
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
        directory: folder of the tables; default: the user's own, `vishwamai.core.tuning.user_directory()`.
        budget: programs to compile for each case and chip at most.
        workers: compiler processes at a time.
        again: search also what the tables have.
        progress: called with (done, total, what was just done).

    Returns:
        one outcome for each case and chip that was searched; an error where there was nothing to tune or nothing
        compiled.

    Raises:
        DeviceError: libtpu is missing, or the tables cannot be written.
    """
    place = tuning.writable_directory(directory)
    work = [(case, Target.parse_chip(target).name) for target in targets for case in cases]
    outcomes: list[Outcome | KernelError] = []
    for done, (case, target) in enumerate(work, start=1):
        if not again and tables.is_stored(place, case, target):
            progress(done, len(work), f"{target} {case.op} {case.name}: in the table")
            continue
        try:
            outcome = tune_case(case, target, budget, workers)
        except KernelError as error:
            outcomes.append(error)
            progress(done, len(work), f"{target} {case.op} {case.name}: {error}")
            continue
        tables.write(place, target, outcome.op, outcome.implementation, outcome.key, outcome.entry())
        tuning.reload()
        outcomes.append(outcome)
        gain = outcome.heuristic_seconds / outcome.seconds if outcome.seconds else 1.0
        progress(
            done,
            len(work),
            f"{target} {case.op} {case.name}: {outcome.seconds * 1e6:.1f} us (estimate), {gain:.2f} x the heuristic, "
            f"{outcome.efficiency:.0%} of the roofline, {outcome.compilations} compiled",
        )
    return outcomes
