"""The loss of a batch and its gradients by a pipeline: microbatches go from stage to stage.

The embedding is computed where the first part is, the last norm and the loss where the last part is. Inside a stage,
the other axes of the mesh work as they do without a pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.models.attend import attend_sequences, rotation
from vishwamai.models.axes import ONE_DEVICE, Axes
from vishwamai.models.blocks import norm
from vishwamai.models.config import ModelConfig
from vishwamai.models.decoder import embedded, run_segment
from vishwamai.models.periods import Segment
from vishwamai.parallel.pipeline.stage import Ends, run_stage, zeros_like
from vishwamai.training.config import LossSection
from vishwamai.training.mesh import PIPELINE
from vishwamai.training.remat import layer_wrapper
from vishwamai.training.stages import LAYERS, Stages
from vishwamai.training.step import token_loss

Tree = Any


@dataclasses.dataclass(frozen=True)
class PipelinedLoss:
    """What the stages compute, inside `shard_map`.

    Attributes:
      stages: how the layers lie on them.
      config: what the model computes. dtype: of its activations.
      section: weights of the loss's terms.
      kept: what the backward pass keeps, of `remat.checkpoint_policy`.
      gather: makes parameters whole where they are used; None where they are.
      axes: the other mesh axes over which the model is split.
    """

    stages: Stages
    config: ModelConfig
    dtype: Any
    section: LossSection
    kept: Any = None
    gather: Callable[[Tree], Tree] | None = None
    axes: Axes = ONE_DEVICE

    def whole(self, params: Tree) -> Tree:
        """Parameters outside of the layers."""
        return params if self.gather is None else self.gather(params)

    def embed(self, params: Tree, tokens: Any) -> Any:
        """The input of the first part."""
        return embedded(self.config, self.whole(params)["embed"], tokens, self.dtype, self.axes)

    def part(self, layers: Tree, x: Any, batch: dict[str, Any]) -> Any:
        """One part: its layers, by place in the period, have a leading axis for the periods."""
        rotate = rotation(self.config, batch["positions"])
        attend = attend_sequences(self.config, batch["segment_ids"], self.axes)
        wrap = layer_wrapper(self.kept, self.gather)
        kinds, periods = self.stages.kinds, self.stages.periods
        scanned = self.stages.stacked and periods > 1
        groups = [[layers[place] for place in range(len(kinds))]]
        if not scanned:
            groups = [jax.tree.map(lambda leaf, i=i: leaf[i], groups[0]) for i in range(periods)]
        segment = Segment(kinds, periods if scanned else 1, 0)
        carry = (x, jnp.zeros_like(x))
        for group in groups:
            carry, _, _ = run_segment(
                self.config, segment, group, carry, rotate, lambda _: attend, None, wrap, self.axes
            )
        return carry[0] + carry[1]

    def loss(self, params: Tree, y: Any, labels: Any) -> tuple[Any, Tree]:
        """The loss of the last part's output, and its sums."""
        params = self.whole(params)
        hidden = norm(self.config, y, params["norm"])
        head = params["embed" if self.config.tie_embeddings else "head"]
        return token_loss(self.config, self.section, hidden, head, labels, self.axes)


def pipelined(
    loss: PipelinedLoss, params: Tree, batch: dict[str, Any], scale: Any, *, microbatches: int, gradients: bool = True
) -> tuple[Tree, Tree]:
    """Inside `Layout.over_devices`: gradients of `scale * loss` and the sums of the loss, over the microbatches of the
    schedule.

    Args:
      loss: what the stages compute.
      params: as the stages hold them, this device's part.
      batch: arrays `[rows, ...]`, this device's rows, which all stages have.
      scale: of the loss in the gradients.
      microbatches: those of the schedule, into which the rows are cut.
      gradients: False computes the sums alone, and gives None in place of the gradients.

    Returns:
      Gradients of this device's rows in float32 at least, those outside of the layers on the stage that computed them
      and zeros on the others; and the sums, on every stage.
    """
    stages = loss.stages
    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
    tokens, labels = parts.pop("tokens"), parts.pop("labels")
    layers = jax.tree.map(lambda x: x.reshape(stages.chunks, stages.periods, *x.shape[1:]), params[LAYERS])
    first = {"embed": params["embed"]}
    last = {name: leaf for name, leaf in params.items() if name != LAYERS}
    if not loss.config.tie_embeddings:
        del last["embed"]

    def left(found: Tree, m: Any, dx: Any) -> Tree:
        _, pull = jax.vjp(lambda p: loss.embed(p, tokens[m]), first)
        return jax.tree.map(lambda total, g: total + g.astype(total.dtype), found, pull(dx)[0])

    def scaled(p: Tree, y: Any, m: Any) -> tuple[Any, Tree]:
        total, sums = loss.loss(p, y, labels[m])
        return total * scale, sums

    ends = Ends(lambda m: loss.embed(first, tokens[m]), zeros_like(first), left, last, scaled)
    table = jax.lax.dynamic_slice_in_dim(jnp.asarray(stages.ticks.table), jax.lax.axis_index(PIPELINE), 1, axis=1)
    found = run_stage(loss.part, ends, stages.ticks, PIPELINE, layers, table, parts, gradients)
    sums = jax.lax.psum(found.sums, PIPELINE)
    if not gradients:
        return None, sums
    grown = dict(found.ends)
    grown["embed"] = grown["embed"] + found.entry["embed"] if "embed" in grown else found.entry["embed"]
    grown[LAYERS] = jax.tree.map(lambda g, x: g.reshape(x.shape), found.params, params[LAYERS])
    return grown, sums
