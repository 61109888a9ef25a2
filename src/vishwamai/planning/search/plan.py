"""The search for settings with which a training step fits: pruned by formulas, probed, and the best one verified."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vishwamai.core.errors import VishwamaiError
from vishwamai.models.storage import KEEP
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.search.advice import narrower_moments
from vishwamai.planning.search.candidates import SHORTEST, Candidate, candidates, front
from vishwamai.planning.time.pace import Pace, timed
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.speed import training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.model import with_local_model
from vishwamai.training.remat import fitting_policy, memory_limit
from vishwamai.training.slices import checked_for

MARGIN = 1.15
"""A candidate is pruned where the analytic estimate exceeds the limit by more: the bound of its error."""

FINALISTS = 3
"""Meshes whose programs are compiled, of which the fastest one is chosen."""

LISTED = 200
"""Candidates that a plan lists, besides those of the Pareto front."""

NOT_TRIED = (
    f"compiled programs of all but {FINALISTS} meshes: their times are formulas",
    f"mesh.sequence that cuts rows into pieces of fewer than {SHORTEST} tokens",
    "pipelines of other sizes and schedules than those of the configuration",
    "other batch sizes, sequence lengths, optimizers and precisions of products",
    "moments of the optimizer in fewer bits, where something fits without",
    "remat: offload; lists of activations",
)
"""What a search leaves out, in words."""


class Reporter(Protocol):
    """Called with a line of text before each step that takes time, and the seconds that are left, where known."""

    def __call__(self, text: str, left: float | None = None) -> None: ...


def _silent(text: str, left: float | None = None) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found for one target.

    Attributes:
      candidates: the chosen one, the others that were tried, then the rest in the order of preference: at most
        `LISTED`, and the Pareto front. chosen: None where none fits.
      pruned: number of those that were too large by formulas alone.
      unprobed: number of those that the compiler was not asked about.
      count: number of candidates.
      interrupted: only what was tried until then is in it.
    """

    target: str
    limit: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    pruned: int
    unprobed: int
    count: int
    interrupted: bool = False


@dataclasses.dataclass(frozen=True)
class _Question:
    """What `plan_training` asks of a target, the same in each round. `finalists`: meshes that are compiled."""

    target: str
    search: bool
    verify: bool
    time: bool
    finalists: int
    compiler: Compiler
    report: Reporter
    on_tried: Callable[[Candidate], None]


def plan_training(
    config: TrainConfig,
    target: str,
    *,
    search: bool = False,
    verify: bool = True,
    time: bool = True,
    finalists: int = FINALISTS,
    compiler: Compiler | None = None,
    report: Reporter = _silent,
    on_tried: Callable[[Candidate], None] = lambda candidate: None,
) -> Plan:
    """Finds how a training step fits a target.

    Args:
      config: the step; without `search`, as it is. target: a chip or slice.
      search: try every candidate; where none fits, every one with the optimizer's moments in bfloat16, then in 8 bits.
      verify: compile the chosen one, which takes as long as that takes. With `search` and `time` those are the fastest
        meshes by formulas, `finalists` of them, of which the fastest is chosen.
      time: estimate its time from the compiled program, too; candidates are then tried in the order of their times by
        formulas.
      compiler: the process to ask; None starts one.
      report: called before each step that takes time, with the seconds that are left by the time that others took.
      on_tried: called with each candidate that the compiler was asked about, as soon as it has answered;
        `plan_of_tried` makes a plan of those, for a search that is interrupted.

    Raises:
      ConfigError: the batch or the mesh does not suit the target.
      DeviceError: libtpu is missing, or the target is unknown.
    """
    config = with_local_model(config, weights=config.lora.quantize == KEEP)
    config = checked_for(target, config, search=search)
    finalists = finalists if search and verify and time else 1
    with contextlib.nullcontext(compiler) if compiler is not None else Compiler() as process:
        limit = memory_limit(config.remat)
        if limit is not None:

            def needs(policy: str) -> int:
                report(f"{target}: probing remat={policy}, for remat={config.remat}")
                program = trace_training(dataclasses.replace(config, remat=policy), target)
                return int(process.probe(program).total.value)

            config = dataclasses.replace(config, remat=fitting_policy(limit, needs))
        question = _Question(target, search, verify, time, finalists, process, report, on_tried)
        plan = _planned(config, question)
        for narrow in narrower_moments(config) if search else ():
            if plan.chosen is not None:
                break
            report(f"{target}: nothing fits; the optimizer's moments in {narrow.optimizer.moment_dtype}")
            plan = _joined(_planned(narrow, question), plan)
    return plan


def _joined(last: Plan, before: Plan) -> Plan:
    """Two rounds of a search as one plan, the last one first."""
    every = (*last.candidates, *before.candidates)
    best = front(every)
    return dataclasses.replace(
        last,
        candidates=tuple(candidate for i, candidate in enumerate(every) if i < LISTED or i in best),
        pruned=last.pruned + before.pruned,
        unprobed=last.unprobed + before.unprobed,
        count=last.count + before.count,
    )


def _planned(config: TrainConfig, question: _Question) -> Plan:
    """One round of `plan_training`."""
    target, search = question.target, question.search
    every = list(candidates(config, target)) if search else [config]
    question.report(f"{target}: {len(every)} {'candidates' if search else 'configuration'}, by formulas")
    estimated = []
    for choice in every:
        memory = training_memory(choice, target)
        estimated.append(
            Candidate(choice, target, memory.limit, memory.total, formula=training_time(choice, target, memory))
        )
    if search and question.time:
        estimated.sort(key=lambda candidate: candidate.formula.value if candidate.formula else 0.0)
    eligible: list[Candidate] = []
    pruned: list[Candidate] = []
    for choice in estimated:
        (pruned if search and choice.analytic.value > MARGIN * choice.limit else eligible).append(choice)
    tried = _tried(eligible, question)
    order = _ranked(tried.values())
    listing = [*order, *(c for i, c in enumerate(eligible) if i not in tried), *pruned]
    best = front(listing)
    listed = tuple(c for i, c in enumerate(listing) if i < LISTED or i in best)
    left = len(eligible) - len(tried)
    return Plan(target, estimated[0].limit, listed, _chosen(order), len(pruned), left, len(estimated))


def _ranked(tried: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit first, the fastest of them first."""

    def preferred(candidate: Candidate) -> tuple[bool, bool, float]:
        return not candidate.fits, candidate.time is None, 0.0 if candidate.time is None else candidate.time.step.value

    return sorted(tried, key=preferred)


def _chosen(order: Sequence[Candidate]) -> Candidate | None:
    return order[0] if order and order[0].fits else None


def plan_of_tried(tried: Sequence[Candidate]) -> Plan:
    """What a search that was interrupted has found: the candidates of one target that the compiler was asked about, one
    or more.
    """
    order = _ranked(tried)
    return Plan(order[0].target, order[0].limit, tuple(order), _chosen(order), 0, 0, len(order), interrupted=True)


def _tried(eligible: Sequence[Candidate], question: _Question) -> dict[int, Candidate]:
    """What the compiler says of candidates, by their places, until enough of them with different meshes fit."""
    tried: dict[int, Candidate] = {}
    too_large: dict[tuple[int, ...], float] = {}
    done: set[MeshSection] = set()
    fastest, pace, finalists = math.inf, Pace(question.verify), question.finalists
    for place, candidate in enumerate(eligible):
        mesh, formula = candidate.config.mesh, candidate.formula
        if formula is not None and formula.value >= fastest:
            break  # docs/planning-time.md: formulas are below the compiled programs' times, and one has reached this
        axes = mesh.expert, mesh.sequence, mesh.tensor
        if mesh in done or candidate.analytic.value >= too_large.get(axes, math.inf):
            continue
        try:
            candidate = _compiled(candidate, question, finalists, pace)
        except VishwamaiError as error:
            if not question.search:
                raise
            candidate = dataclasses.replace(candidate, declined=str(error).splitlines()[0][:200])
        tried[place] = candidate
        question.on_tried(candidate)
        if candidate.declined:
            done.add(mesh)
        elif not candidate.fits:
            too_large[axes] = candidate.analytic.value
        else:
            done.add(mesh)
            fastest = min(fastest, math.inf if candidate.time is None else candidate.time.step.value)
            finalists -= 1
            if not finalists:
                break
    return tried


def _compiled(candidate: Candidate, question: _Question, finalists: int, pace: Pace) -> Candidate:
    """The candidate with its probe; where it fits, with its compiled program's figures. `finalists`: those left."""
    target, compiler = candidate.target, question.compiler
    question.report(f"{target}: probing {candidate.name} ({candidate.analytic})", pace.left(finalists))
    with timed(pace.probes):
        program = trace_training(candidate.config, target)
        candidate = dataclasses.replace(candidate, probe=compiler.probe(program).total)
    if not (candidate.fits and question.verify):
        return candidate
    question.report(f"{target}: compiling {candidate.name} ({candidate.probe})", pace.left(finalists, probed=True))
    with timed(pace.compilations):
        if not question.time:
            return dataclasses.replace(candidate, verified=compiler.verify(program).total)
        memory, time = time_program(compiler, program)
    return dataclasses.replace(candidate, verified=memory.total, time=time)
