"""The settings among which a search chooses: meshes, policies of remat and microbatches, with the figures of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from vishwamai.core.errors import ConfigError
from vishwamai.core.figures import Estimate
from vishwamai.core.numbers import divisors
from vishwamai.core.target import devices_of
from vishwamai.models.parameters import split_units
from vishwamai.planning.memory.analytic import described
from vishwamai.planning.search.controller import REMAT
from vishwamai.planning.time.program_time import StepTime
from vishwamai.planning.time.speed import Speed, training_speed
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.sharding import UNGATHERED, mesh_text, row_parts
from vishwamai.training.slices import why_no_stages

SHORTEST = 128
"""Tokens of the shortest piece of a row that the search gives to a device; shorter ones leave lanes of a TPU idle."""


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
