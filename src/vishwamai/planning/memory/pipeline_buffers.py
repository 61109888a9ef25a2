"""A pipeline by formulas: the buffers of a stage, and how much longer its schedule takes than even shares of the work.

A buffer has so many slots as the table of the schedule says (`parallel.pipeline.ticks`), and one more that nothing
reads. A slot's bytes are those of the types that the executor takes apart (`training.pipeline.loss.split_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from vishwamai.core.types import PyTree
from vishwamai.models import ModelConfig
from vishwamai.parallel.pipeline.actions import INPUT_GRADIENT, WEIGHT_GRADIENT
from vishwamai.parallel.pipeline.ticks import COLUMNS, NUMBER
from vishwamai.planning.serving import size
from vishwamai.training.config import TrainConfig
from vishwamai.training.flops import flops_per_token
from vishwamai.training.fp8 import FP8Optimizer
from vishwamai.training.pipeline.loss import split_of
from vishwamai.training.pipeline.stages import cut
from vishwamai.training.program import TrainingStep
from vishwamai.training.sharding import Layout, batch_specs


class Slot(NamedTuple):
    """Bytes of a device for one microbatch in one part of the model: what its forward pass keeps for the backward pass,
    and what the gradient of its input keeps for that of its weights.
    """

    saved: float
    between: float


def slot_of(step: TrainingStep, layout: Layout, rows: int) -> Slot:
    """By tracing alone.

    Args:
      step: step with stages. layout: placement on its devices, which need not exist.
      rows: rows of a microbatch, on all devices.
    """
    assert layout.mesh is not None
    update, attach_scales = step.update_rule(layout.mesh_axes)
    loss, params = step.loss(layout, attach_scales), step.state.params
    if isinstance(update, FP8Optimizer):
        params = jax.eval_shape(update.with_scales, params, step.state.optimizer)
    slots: list[Slot] = []

    def local(params: PyTree, batch: PyTree, frozen: PyTree) -> tuple[()]:
        split = split_of(loss, params, batch, frozen)
        slots.append(Slot(size(split.residuals), size(split.between)))
        return ()

    batch = step.batch(rows)
    mesh = AbstractMesh(layout.mesh.axis_sizes, layout.mesh.axis_names)
    places = (layout.specs(params), batch_specs(batch), layout.specs(step.frozen))
    run = jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=PartitionSpec(), check_vma=False)
    jax.eval_shape(run, params, batch, step.frozen)
    return slots[-1]


def microbatches_kept(config: TrainConfig, model: ModelConfig) -> float:
    """Of how many microbatches a device has room at once for what the backward pass needs; 1 without stages.

    Raises:
      VishwamaiError: as `training.pipeline.stages.cut`.
    """
    if config.mesh.pipeline == 1:
        return 1.0
    _, _, ticks = cut(config, model)
    return (ticks.residuals + 1) * config.mesh.pipeline / len(ticks.order)


def stretch(config: TrainConfig, model: ModelConfig, recomputed: float) -> float:
    """The time of the schedule over that of the same products in even shares on all stages; 1 without stages.

    In each tick all stages wait for the longest action. The gradient of the last part's output has the products of the
    head. Where a part is a loop over its layers, both gradients are one action (`parallel.pipeline.split`).

    Args:
      config: the step. model: which it trains.
      recomputed: share of the forward pass that is computed again.

    Raises:
      VishwamaiError: as `training.pipeline.stages.cut`.
    """
    if config.mesh.pipeline == 1:
        return 1.0
    run, _, ticks = cut(config, model)
    parts, length = len(ticks.order), config.data.sequence_length
    head = 6.0 * model.vocab_size * model.hidden_size
    part = (flops_per_token(model, length) - head) / parts / 3
    joint = run.repeats > parts
    work = dict.fromkeys(NUMBER.values(), part)
    work[NUMBER[INPUT_GRADIENT]] += part * (recomputed + joint)
    work[NUMBER[WEIGHT_GRADIENT]] -= part * joint
    kind, last = (COLUMNS.index(name) for name in ("kind", "last"))

    def products(cell: Sequence[int]) -> float:
        ends = head if cell[kind] == NUMBER[INPUT_GRADIENT] and cell[last] else 0.0
        return work.get(int(cell[kind]), 0.0) + ends

    cells = [[products(cell) for cell in row] for row in ticks.table]
    return sum(map(max, cells)) * config.mesh.pipeline / sum(map(sum, cells))
