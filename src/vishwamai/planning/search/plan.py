"""The search for settings with which a training step fits: pruned by formulas, probed, and the best one verified."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from vishwamai.core.errors import ConfigError, VishwamaiError
from vishwamai.core.figures import Estimate
from vishwamai.core.numbers import divisors
from vishwamai.core.target import devices_of
from vishwamai.models.parameters import split_units
from vishwamai.models.storage import KEEP
from vishwamai.planning.memory.analytic import described, training_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.search.advice import narrower_moments
from vishwamai.planning.search.controller import REMAT
from vishwamai.planning.time.pace import Pace, timed
from vishwamai.planning.time.program_time import StepTime, time_program
from vishwamai.planning.time.speed import Speed, training_speed, training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.model import with_local_model
from vishwamai.training.remat import fitting_policy, memory_limit
from vishwamai.training.sharding import UNGATHERED, mesh_text, row_parts
from vishwamai.training.slices import checked_for, why_no_stages

MARGIN = 1.15
"""A candidate is pruned where the analytic estimate exceeds the limit by more: the bound of its error."""

FINALISTS = 3
"""Meshes whose programs are compiled, of which the fastest one is chosen."""

LISTED = 200
"""Candidates that a plan lists, besides those of the Pareto front."""

SHORTEST = 128
"""Tokens of the shortest piece of a row that the search gives to a device; shorter ones leave lanes of a TPU idle."""

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
class Candidate:
    """One way to compute the step, with what is known of its memory.

    Attributes:
      config: the configuration with the candidate's mesh, remat and microbatches. target: the slice.
      analytic, probe, verified: bytes of one device; None where that level was not asked.
      limit: bytes that the compiler lets one device use.
      formula: seconds of a step by formulas. time: by the compiled program; None where it was not made.
      declined: why the compiler does not take its program; "" where it does, or was not asked.
    """

    config: TrainConfig
    target: str
    limit: int
    analytic: Estimate
    probe: Estimate | None = None
    verified: Estimate | None = None
    formula: Estimate | None = None
    time: StepTime | None = None
    declined: str = ""

    @property
    def best(self) -> Estimate:
        """The estimate of the strongest level."""
        return self.verified or self.probe or self.analytic

    @property
    def fits(self) -> bool:
        """Whether one device holds the step, by the strongest level."""
        return not self.declined and self.best.value <= self.limit

    @property
    def step(self) -> Estimate | None:
        """Seconds of a step, of the strongest level."""
        return self.formula if self.time is None else self.time.step

    @property
    def speed(self) -> Speed | None:
        """What its time means; None where it has none."""
        return None if self.step is None else training_speed(self.config, self.target, self.step)

    @property
    def name(self) -> str:
        """Its settings in words."""
        sizes = vars(self.config.mesh).items()
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes if axis in ("data", "fsdp") or size > 1)
        moments = self.config.optimizer.moment_dtype
        narrow = "" if moments == "float32" else f" moments={moments}"
        return f"{mesh} remat={self.config.remat} microbatches={self.config.microbatches}{narrow}"


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


def front(candidates: Sequence[Candidate]) -> set[int]:
    """Which candidates fit and have no other that fits with less memory and less time: the Pareto front.

    Memory and time are those by formulas, so that all are compared alike.

    >>> config = TrainConfig()
    >>> def one(memory, seconds):
    ...     time = Estimate(seconds, "analytic", "s")
    ...     return Candidate(config, "v5e", 10, Estimate(memory, "analytic"), formula=time)
    >>> sorted(front([one(1, 3), one(2, 2), one(2, 3), one(11, 1)]))
    [0, 1]
    """
    points = {
        i: (c.analytic.value, c.formula.value) for i, c in enumerate(candidates) if c.fits and c.formula is not None
    }
    best: set[int] = set()
    last = (-1.0, math.inf)
    for i, point in sorted(points.items(), key=lambda item: item[1]):
        if point[1] < last[1] or point == last:
            best.add(i)
            last = point
    return best


def meshes(config: TrainConfig, target: str) -> list[MeshSection]:
    """Every mesh of all devices of a target that the model and the batch allow, those that split the model least first.

    Sizes of `pipeline`, `expert`, `sequence` and `tensor` above 1 stay as the configuration has them.

    Raises:
      ConfigError: the configuration's sizes do not divide the devices, or no mesh divides the batch.

    >>> from vishwamai.planning.memory.allocation import llama_like, training_config
    >>> config = training_config(llama_like(256, 512), {}, "v5e:2x2", batch_size=4, sequence_length=512)
    >>> [mesh_text(mesh) for mesh in meshes(config, "v5e:2x2")][:3]
    ['mesh.data=4', 'mesh.data=2 times mesh.fsdp=2', 'mesh.fsdp=4']
    """
    devices, fixed = devices_of(target), dataclasses.replace(config.mesh, data=1, fsdp=1)
    if devices % math.prod(vars(fixed).values()):
        raise ConfigError(f"config: {mesh_text(fixed)} does not divide the {devices} devices of {target}.")
    sizes, stages = _sizes(config, devices), config.mesh.pipeline
    sections = []
    for expert, sequence, tensor in itertools.product(sizes["expert"], sizes["sequence"], sizes["tensor"]):
        others, odd = divmod(devices, stages * expert * sequence * tensor)
        if odd or config.batch_size % (others * expert):
            continue
        for fsdp in divisors(others):
            sizes_of = {"pipeline": stages, "expert": expert, "sequence": sequence, "tensor": tensor}
            sections.append(MeshSection(data=others // fsdp, fsdp=fsdp, **sizes_of))
    if not sections:
        least = row_parts(fixed) * devices // math.prod(vars(fixed).values())
        raise ConfigError(
            f"config: batch_size={config.batch_size} is not a multiple of the {least} devices of {target} that split "
            "it, and no mesh.sequence or mesh.tensor that the model allows leaves fewer."
        )
    return sorted(sections, key=lambda mesh: (mesh.expert * mesh.sequence * mesh.tensor, mesh.fsdp))


def _sizes(config: TrainConfig, devices: int) -> dict[str, list[int]]:
    """The sizes of the axes that split the model, or rows, which divide what they split."""
    model, length = described(config), config.data.sequence_length
    allowed: dict[str, int] = dict.fromkeys(("expert", "sequence", "tensor"), 1)
    units = split_units(model)
    for axis, split in UNGATHERED.items():
        allowed[axis] = math.gcd(*(units[name][1] for name in split if name in units)) or 1
    if length % (2 * SHORTEST) == 0:  # zig-zag order cuts a device's part in two
        allowed["sequence"] = length // (2 * SHORTEST)
    choices = {axis: divisors(math.gcd(most, devices)) for axis, most in allowed.items()}
    return {
        axis: sizes if vars(config.mesh)[axis] == 1 else [vars(config.mesh)[axis]] for axis, sizes in choices.items()
    }


def candidates(config: TrainConfig, target: str) -> Iterator[TrainConfig]:
    """Every mesh, policy and number of microbatches with the same global batch, the preferred ones first.

    The fewest microbatches come first, then what recomputes least, then the mesh that splits and gathers least. Those
    that the stages of `mesh.pipeline` cannot compute are left out.

    Raises:
      VishwamaiError: as `meshes`; and as `training.slices.check_stages`, where stages can compute none.

    >>> from vishwamai.planning.memory.allocation import llama_like, training_config
    >>> config = training_config(llama_like(256, 512), {}, "v5e:2x2", batch_size=4, sequence_length=512)
    >>> found = list(candidates(config, "v5e:2x2"))
    >>> found[0].mesh.data, found[0].remat, found[0].microbatches
    (4, 'none', 1)
    """
    sections = meshes(config, target)
    rows = {mesh: config.batch_size // row_parts(mesh) for mesh in sections}
    pinned = config.optimization.gradient_checkpointing is not None
    reason, none = None, True
    for microbatches in divisors(config.batch_size):
        for remat in (config.remat,) if pinned else REMAT:
            for mesh in sections:
                if rows[mesh] % microbatches:
                    continue
                candidate = dataclasses.replace(config, mesh=mesh, remat=remat, microbatches=microbatches)
                reason = why_no_stages(candidate)
                if reason is None:
                    none = False
                    yield candidate
    if none and reason is not None:
        raise why_no_stages(config) or reason


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
