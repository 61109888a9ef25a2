"""The loss of a configuration and its step, with stages or without, as a run jits them and a plan compiles them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vishwamai.training.config import TrainConfig
from vishwamai.training.layout import Layout
from vishwamai.training.lora import attach, whole
from vishwamai.training.model import ModelParts
from vishwamai.training.pipelined import PipelinedLoss, pipelined
from vishwamai.training.rounding import rounding
from vishwamai.training.stages import Stages
from vishwamai.training.step import Loss, Optimizer, TrainState, accumulated, model_loss, train_step

Tree = Any


def make_loss(
    config: TrainConfig,
    parts: ModelParts,
    layout: Layout,
    stages: Stages | None = None,
    attach_scales: Callable[[Tree], Tree] | None = None,
    policy: str | None = None,
) -> Any:
    """The `Loss` as a function of the trained parameters, a batch, and the frozen ones below adapters where there are
    some; with stages a `PipelinedLoss`.

    Args:
      config: of the run. parts: its model, of which shapes are enough. layout: its devices.
      stages: of `make_stages`.
      attach_scales: of `step.update_rule`.
      policy: in place of `config.remat`.
    """
    adapters, axes, kept = config.lora.rank > 0, layout.model_axes, parts.kept(policy or config.remat)
    rounded = rounding(config, layout)
    gather = None if layout.mesh is None else layout.gather if rounded is None else rounded.gather
    if adapters:
        gather = functools.partial(whole, gather=layout.whole)
    if stages is not None:
        dtype = parts.merge(parts.params).dtype
        adapt = functools.partial(attach, config.lora) if adapters else None
        given = gather, axes, attach_scales, layout.ends, adapt, config.dpo.beta
        return PipelinedLoss(stages, parts.config, dtype, config.loss, kept, *given)
    full = model_loss(parts.graph, parts.rest, config.loss, kept, gather, attach_scales, axes, config.dpo.beta)

    def loss(params: Tree, batch: Tree, frozen: Tree = None) -> tuple[Any, dict[str, Any]]:
        return full(params if frozen is None else attach(config.lora, frozen, params), batch)

    return loss


def make_step(
    config: TrainConfig, loss: Loss | PipelinedLoss, optimizer: Optimizer, layout: Layout
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """`step.train_step` as a function of state, batch and frozen parameters.

    Args: as of `train_step`; `loss` of `make_loss`.
    """
    rounded = rounding(config, layout)
    accumulate: Callable[..., Any] | None = None
    if isinstance(loss, PipelinedLoss):
        accumulate = pipelined
    elif rounded is not None:
        accumulate = functools.partial(accumulated, summed=layout.summed, places=rounded.places)

    def training_step(state: TrainState, batch: Tree, frozen: Tree = None) -> tuple[TrainState, dict[str, Any]]:
        own = {"loss": loss, "accumulate": accumulate, "frozen": frozen}
        with config.optimization.kernels():
            return train_step(state, batch, **own, optimizer=optimizer, config=config, layout=layout)

    return training_step
