"""The search for settings with which a training step fits: pruned by formulas, probed, and the best one verified."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from vishwamai.core.errors import ConfigError
from vishwamai.core.numbers import divisors
from vishwamai.planning.analytic import training_memory
from vishwamai.planning.compiler import Compiler
from vishwamai.planning.controller import REMAT
from vishwamai.planning.figures import Estimate
from vishwamai.planning.program_time import StepTime, time_program
from vishwamai.planning.speed import Speed, training_speed, training_time
from vishwamai.planning.training import devices_of, trace_training
from vishwamai.training.config import TrainConfig
from vishwamai.training.mesh import row_parts, written

MARGIN = 1.25
"""A candidate is pruned where the analytic estimate exceeds the limit by more; docs/planning.md has its errors."""

NOT_TRIED = (
    "compiled programs of all but the chosen one: their times are formulas",
    "other sizes of mesh.expert, mesh.sequence and mesh.tensor; pipelines",
    "other batch sizes, sequence lengths, optimizers and precisions",
    "remat: offload, and lists of activations",
)
"""What a search leaves out, in words."""

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute the step, with what is known of its memory.

    Attributes:
      config: the configuration with the candidate's mesh, remat and microbatches. target: the slice.
      analytic, probe, verified: bytes of one device; None where that level was not asked.
      limit: bytes that the compiler lets one device use.
      formula: seconds of a step by formulas. time: by the compiled program; None where it was not made.
    """

    config: TrainConfig
    target: str
    limit: int
    analytic: Estimate
    probe: Estimate | None = None
    verified: Estimate | None = None
    formula: Estimate | None = None
    time: StepTime | None = None

    @property
    def best(self) -> Estimate:
        """The estimate of the strongest level."""
        return self.verified or self.probe or self.analytic

    @property
    def fits(self) -> bool:
        """Whether one device holds the step, by the strongest level."""
        return self.best.value <= self.limit

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
        return f"{mesh} remat={self.config.remat} microbatches={self.config.microbatches}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found for one target.

    Attributes:
      candidates: in the order of preference. chosen: the first of them that fits, None where none does.
      pruned: how many were too large by formulas alone. unprobed: how many come after the chosen one.
    """

    target: str
    limit: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    pruned: int
    unprobed: int


def front(found: Sequence[Candidate]) -> set[int]:
    """Which candidates fit and have no other that fits with less memory and less time: the Pareto front.

    Memory and time are those by formulas, so that all are compared alike.

    >>> config = TrainConfig()
    >>> def one(memory, seconds):
    ...     time = Estimate(seconds, "analytic", "s")
    ...     return Candidate(config, "v5e", 10, Estimate(memory, "analytic"), formula=time)
    >>> sorted(front([one(1, 3), one(2, 2), one(2, 3), one(11, 1)]))
    [0, 1]
    """
    points = {i: (c.analytic.value, c.formula.value) for i, c in enumerate(found) if c.fits and c.formula is not None}
    return {
        i
        for i, mine in points.items()
        if not any(its != mine and its[0] <= mine[0] and its[1] <= mine[1] for its in points.values())
    }


def candidates(config: TrainConfig, target: str) -> Iterator[TrainConfig]:
    """Every split into data and fsdp, policy and number of microbatches with the same global batch, the preferred
    ones first. The other axes of the mesh stay as they are.

    The fewest microbatches come first, then what recomputes least, then the mesh that gathers least.

    >>> found = list(candidates(TrainConfig(batch_size=8), "v5e:2x2"))
    >>> len(found), found[0].mesh.data, found[0].remat, found[0].microbatches
    (24, 4, 'none', 1)
    """
    devices, fixed = devices_of(target), dataclasses.replace(config.mesh, data=1, fsdp=1)
    others, odd = divmod(devices, math.prod(vars(fixed).values()))
    if odd or not others:
        raise ConfigError(f"config: {written(fixed)} does not divide the {devices} devices of {target}.")
    parts = others * row_parts(fixed)
    if config.batch_size % parts:
        raise ConfigError(
            f"config: batch_size={config.batch_size} is not a multiple of the {parts} devices of {target} that split "
            "it."
        )
    rows, pinned = config.batch_size // parts, config.optimization.gradient_checkpointing is not None
    for microbatches in divisors(rows):
        for remat in (config.remat,) if pinned else REMAT:
            for fsdp in divisors(others):
                mesh = dataclasses.replace(config.mesh, data=others // fsdp, fsdp=fsdp)
                yield dataclasses.replace(config, mesh=mesh, remat=remat, microbatches=microbatches)


def plan_training(
    config: TrainConfig,
    target: str,
    *,
    search: bool = False,
    verify: bool = True,
    time: bool = True,
    compiler: Compiler | None = None,
    report: Report = lambda text: None,
) -> Plan:
    """Finds how a training step fits a target.

    Args:
      config: the step; without `search`, as it is. target: a chip or slice.
      search: try every candidate.
      verify: compile the chosen one, which takes as long as that takes.
      time: estimate its time from the compiled program, too; candidates are then tried in the order of their times by
        formulas.
      compiler: the process to ask; None starts one.
      report: called with a line of text before each step that takes time.

    Raises:
      ConfigError: the batch or the mesh does not suit the target.
      DeviceError: libtpu is missing, or the target is unknown.
    """
    every = list(candidates(config, target)) if search else [config]
    report(f"{target}: {len(every)} {'candidates' if search else 'configuration'}, by formulas")
    estimated = []
    for one in every:
        found = training_memory(one, target)
        estimated.append(Candidate(one, target, found.limit, found.total, formula=training_time(one, target, found)))
    if search and time:
        estimated.sort(key=lambda candidate: candidate.formula.value if candidate.formula else 0.0)
    kept = [c for c in estimated if not search or c.analytic.value <= MARGIN * c.limit]
    limit = estimated[0].limit
    asked = compiler or Compiler()
    tried: list[Candidate] = []
    chosen = None
    try:
        for candidate in kept:
            report(f"{target}: probing {candidate.name} ({candidate.analytic})")
            program = trace_training(candidate.config, target)
            candidate = dataclasses.replace(candidate, probe=asked.probe(program).total)
            if candidate.fits and verify:
                report(f"{target}: compiling {candidate.name} ({candidate.probe})")
                if time:
                    memory, timed = time_program(asked, program)
                    candidate = dataclasses.replace(candidate, verified=memory.total, time=timed)
                else:
                    candidate = dataclasses.replace(candidate, verified=asked.verify(program).total)
            tried.append(candidate)
            if candidate.fits:
                chosen = candidate
                break
    finally:
        if compiler is None:
            asked.__exit__()
    rest = [c for c in estimated if c not in kept]
    shown = (*tried, *kept[len(tried) :], *rest)
    return Plan(target, limit, shown, chosen, len(rest), len(kept) - len(tried))
