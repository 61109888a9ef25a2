"""The loss of a batch and its gradients by a pipeline: microbatches go from stage to stage.

The embedding is computed where the first part is, the last norm and the loss where the last part is. Inside a stage,
the other axes of the mesh work as they do without a pipeline. The losses of experts have their gradient where the layer
is: what a loss is multiplied by does not depend on what comes after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import final_norm
from vishwamai.models.config import ModelConfig
from vishwamai.models.decoder import run_segment
from vishwamai.models.inputs import embedded
from vishwamai.models.layers.mixer import Rows
from vishwamai.models.periods import Segment
from vishwamai.parallel.pipeline.split import SplitPart, split_part
from vishwamai.parallel.pipeline.stage import Ends, Found, run_stage, zeros_like
from vishwamai.training.config import LossSection
from vishwamai.training.fp8 import are_scales, detach
from vishwamai.training.gather import gathered
from vishwamai.training.head import head_operands
from vishwamai.training.losses import EXPERT_COUNTS, head_loss
from vishwamai.training.packing import IGNORED, REFERENCE
from vishwamai.training.parameter_names import LAYERS
from vishwamai.training.pipeline.stages import Stages
from vishwamai.training.preferences import answer_logprobs
from vishwamai.training.remat import Policy, layer_wrapper
from vishwamai.training.sharding import PIPELINE

Batch = dict[str, jax.Array]
"""Arrays of a batch by name, `[rows, ...]`, or of its microbatches."""


@dataclasses.dataclass(frozen=True)
class PipelinedLoss:
    """What the stages compute, inside `shard_map`.

    Attributes:
      stages: placement of the layers.
      config: configuration of the model. dtype: dtype of its activations.
      section: weights of the loss's terms.
      policy: result of `remat.checkpoint_policy`: arrays that the backward pass keeps.
      gather: makes parameters whole where they are used; None where they are.
      axes: the other mesh axes over which the model is split.
      attach: puts weights that multiply by themselves among the parameters, `FP8Optimizer.attach`; None for none.
      ends: axes of `Layout.ends`.
      adapt: function `(frozen, adapters) -> parameters`, of `lora.attach`; None where all parameters are trained.
      beta: `dpo.beta`.
    """

    stages: Stages
    config: ModelConfig
    dtype: DTypeLike
    section: LossSection
    policy: Policy | None = None
    gather: Callable[[PyTree], PyTree] | None = None
    axes: MeshAxes = ONE_DEVICE
    attach: Callable[[PyTree], PyTree] | None = None
    ends: Mapping[str, int] = dataclasses.field(default_factory=dict)
    adapt: Callable[[PyTree, PyTree], PyTree] | None = None
    beta: float = 0.1

    def gathered_ends(self, params: PyTree) -> PyTree:
        """Parameters outside of the layers."""
        return params if self.gather is None else self.gather(params)

    def embed(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """The input of the first part."""
        config = self.config
        if config.learned_positions or config.embedding_norm or config.layer_embedding:
            raise UnsupportedError(
                f"{config.family}: the first part of a pipeline has the embedding table alone, and this model adds "
                "learned positions, a norm or per-layer embeddings to it; set mesh.pipeline=1."
            )
        if any(kind.sharing for kind in config.layers):
            raise UnsupportedError(
                f"{config.family}: layers of one part of a pipeline would read what is in another; set mesh.pipeline=1."
            )
        return embedded(config, self.gathered_ends(params), tokens, self.dtype, self.axes)

    def part(self, layers: PyTree, x: jax.Array, batch: Batch, frozen: PyTree) -> tuple[jax.Array, dict[str, PyTree]]:
        """One part: its layers, by place in the period, have a leading axis for the periods.

        Args:
          layers: trained layers, or their adapters.
          x: the part's input.
          batch: arrays of the microbatch; without "weight", the losses of experts are left out.
          frozen: the layers below adapters; () without adapters.

        Returns:
          Its output, and the share that its experts have in the sums of `losses.model_loss`.
        """
        if self.adapt is not None:
            layers = self.adapt({LAYERS: frozen}, layers)[LAYERS]
        rows = Rows(batch["positions"], batch["segment_ids"], self.axes)
        mask = batch["segment_ids"] > 0
        wrap = layer_wrapper(self.policy, self.gather)
        kinds, periods = self.stages.kinds, self.stages.periods
        scanned = self.stages.stacked and periods > 1
        groups = [[layers[place] for place in range(len(kinds))]]
        if not scanned:
            groups = [jax.tree.map(lambda leaf, i=i: leaf[i], groups[0]) for i in range(periods)]
        segment = Segment(kinds, periods if scanned else 1, 0)
        carry, loads = (x, jnp.zeros_like(x), {}), []
        for group in groups:
            carry, _, load = run_segment(self.config, segment, group, carry, rows, None, wrap, token_mask=mask)
            loads.append(load)
        y = carry[0] + carry[1]
        places = [place for place, kind in enumerate(kinds) if kind.experts]
        if not places or "weight" not in batch:
            return y, {}
        joined = (lambda *x: x[0]) if scanned else (lambda *x: jnp.stack(x))
        experts = {str(place): jax.tree.map(joined, *(load[place] for load in loads)) for place in places}
        layers_of_model = len(places) * self.stages.repeats
        balance, z = (sum(jnp.sum(load[i]) for load in experts.values()) / layers_of_model for i in (0, 1))
        y = with_loss(y, self.section.load_balance * balance + self.section.router_z_loss * z, batch["weight"])
        counts = {place: load.counts for place, load in experts.items()}
        sums = {"load_balance": batch["number"] * balance, "router_z": batch["number"] * z, EXPERT_COUNTS: counts}
        return y, jax.lax.stop_gradient(sums)

    def loss(self, params: PyTree, y: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        """The loss of the last part's output, and its sums."""
        hidden, head = self._end(params, y)
        return head_loss(self.config, self.section, self.beta, hidden, head, batch, self.axes)

    def logprobs(self, params: PyTree, y: jax.Array, batch: Batch) -> jax.Array:
        """The log-probabilities of answers, of the last part's output."""
        hidden, head = self._end(params, y)
        return answer_logprobs(self.config, head, hidden, batch, self.axes)

    def _end(self, params: PyTree, y: jax.Array) -> tuple[PyTree, PyTree]:
        """The hidden states after the last norm, and the head."""
        params = self.gathered_ends(params)
        return head_operands(self.config, params, final_norm(self.config, params, y), self.axes)


@jax.custom_vjp
def with_loss(y: jax.Array, loss: jax.Array | float, weight: jax.Array) -> jax.Array:
    """`y` as it is; the gradient of `loss`, a scalar, is `weight`: that of a sum to which `weight * loss` is added."""
    return y


def _with_loss_backward(weight: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return dy, weight, jnp.zeros_like(weight)


with_loss.defvjp(lambda y, loss, weight: (y, weight), _with_loss_backward)


def pipelined(
    loss: PipelinedLoss,
    params: PyTree,
    batch: Batch,
    scale: jax.Array | float,
    *,
    microbatches: int,
    gradients: bool = True,
    frozen: PyTree = None,
) -> tuple[PyTree, PyTree]:
    """Inside `over_devices`: gradients of `scale * loss` and the sums of the loss, over the microbatches of the
    schedule.

    Args:
      loss: loss that the stages compute.
      params: parameters as the stages hold them, this device's part.
      batch: arrays `[rows, ...]`, this device's rows, which all stages have.
      scale: factor of the loss in the gradients.
      microbatches: microbatches of the schedule, into which the rows are cut.
      gradients: False computes the sums alone, and gives None in place of the gradients.
      frozen: the parameters below adapters, where `params` are adapters; otherwise None.

    Returns:
      Gradients of this device's rows in float32 at least, those outside of the layers on the stage that computed them
      and zeros on the others; and the sums, on every stage.
    """
    parts = _parts(batch, microbatches)
    number = jnp.sum(parts["labels"] != IGNORED, axis=(1, 2)).astype(jnp.float32)
    of_experts = {} if REFERENCE in batch else {"number": number, "weight": number * scale}
    params = params if loss.attach is None else loss.attach(params)

    def scaled(p: PyTree, y: jax.Array, m: jax.Array | int) -> tuple[jax.Array, PyTree]:
        total, sums = loss.loss(p, y, _microbatch(parts, m))
        return total * scale, sums

    results = _through(loss, params, frozen, parts | of_experts, scaled, gradients)
    counts = results.seen.pop(EXPERT_COUNTS, None)
    seen = {name: jnp.sum(of_chunks) for name, of_chunks in results.seen.items()}
    sums = jax.lax.psum(results.sums | seen, PIPELINE)
    if counts is not None:
        flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), counts)  # [periods of the stage, experts]
        sums[EXPERT_COUNTS] = jax.lax.all_gather(flat, PIPELINE, tiled=True)
    if not gradients:
        return None, sums
    if frozen is not None:
        return jax.tree.map(lambda g, x: g.reshape(x.shape), results.params, params), sums
    grown = dict(results.ends)
    grown["embed"] = grown["embed"] + results.entry["embed"] if "embed" in grown else results.entry["embed"]
    grown |= {
        name: jax.lax.psum_scatter(grown[name], PIPELINE, scatter_dimension=axis + grown[name].ndim, tiled=True)
        for name, axis in loss.ends.items()
    }
    grown[LAYERS] = jax.tree.map(lambda g, x: g.reshape(x.shape), results.params, params[LAYERS])
    return detach(grown), sums


def pipelined_logprobs(loss: PipelinedLoss, params: PyTree, batch: Batch, *, microbatches: int) -> jax.Array:
    """Inside `by_row`: the log-probabilities of this device's pairs, `preferences.answer_logprobs`.

    Args:
      loss: loss that the stages compute, without `adapt`.
      params: parameters as the stages hold them, this device's part; some may be quantized.
      batch: arrays `[rows, ...]`, this device's rows, which all stages have.
      microbatches: microbatches of the schedule, into which the rows are cut.

    Returns:
      float32 `[rows, 2]`, on every stage.
    """
    parts = _parts(batch, microbatches)
    empty = jnp.zeros((*parts["tokens"].shape[:2], 2), jnp.float32)

    def placed(p: PyTree, y: jax.Array, m: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        return jnp.float32(0), empty.at[m].set(loss.logprobs(p, y, _microbatch(parts, m)))

    results = _through(loss, params, None, parts, placed, gradients=False)
    return jax.lax.psum(results.sums, PIPELINE).reshape(-1, 2)


def _parts(batch: Batch, microbatches: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)


def _microbatch(parts: Batch, m: jax.Array | int) -> Batch:
    return jax.tree.map(lambda x: x[m], parts)


def _of_chunks(stages: Stages, params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """What is trained of a stage's layers, and what is frozen below it, arrays `[chunks, periods, ...]`."""
    trees = (params[LAYERS], ()) if frozen is None else (params, frozen[LAYERS])
    return jax.tree.map(lambda x: x.reshape(stages.chunks, stages.periods, *x.shape[1:]), trees)


def _layer_inputs(batch: Batch) -> Batch:
    """What the layers read of a batch."""
    return {name: x for name, x in batch.items() if name not in ("tokens", "labels", REFERENCE)}


def split_of(loss: PipelinedLoss, params: PyTree, batch: Batch, frozen: PyTree = None) -> SplitPart:
    """Inside `over_devices`: a part of this device as its stage runs it, for the gradients of a microbatch.

    Args:
      loss, params, frozen: arguments of `pipelined`.
      batch: arrays `[rows, ...]`, this device's rows of one microbatch.
    """
    params = params if loss.attach is None else loss.attach(params)
    layers, below = jax.tree.map(lambda x: x[0], _of_chunks(loss.stages, params, frozen))
    x = jnp.zeros((*batch["tokens"].shape, loss.config.hidden_size), loss.dtype)
    of_experts: Batch = {} if REFERENCE in batch else dict.fromkeys(("number", "weight"), jnp.float32(1))
    return split_part(loss.part, layers, x, _layer_inputs(batch | of_experts), below, sees=True)


def _through(
    loss: PipelinedLoss,
    params: PyTree,
    frozen: PyTree,
    parts: Batch,
    end: Callable[[PyTree, jax.Array, jax.Array | int], tuple[jax.Array, PyTree]],
    gradients: bool,
) -> Found:
    """A stage's share of a batch.

    Args:
      loss: loss that the stages compute.
      params: parameters with gradients, this device's part.
      frozen: parameters below adapters, where `params` are adapters; otherwise None.
      parts: the batch, arrays `[microbatches, rows, ...]`.
      end: `Ends.loss`, of the parameters outside of the layers.
      gradients: flag of `pipelined`.
    """
    stages, tokens = loss.stages, parts["tokens"]

    ends_params = params if frozen is None else frozen
    # Both are used inside branches that only one stage takes, so they are gathered before.
    ends_params = ends_params | {name: gathered(ends_params[name], axis, PIPELINE) for name, axis in loss.ends.items()}
    first = {"embed": ends_params["embed"]}
    last = {name: leaf for name, leaf in ends_params.items() if name != LAYERS}
    if not loss.config.tie_embeddings:
        del last["embed"]

    def left(total: PyTree, m: jax.Array, dx: jax.Array) -> PyTree:
        _, pull = jax.vjp(lambda p: loss.embed(p, tokens[m]), first)
        return jax.tree.map(lambda entry, g: entry + g.astype(entry.dtype), total, pull(dx)[0])

    def enter(m: jax.Array) -> jax.Array:
        return loss.embed(first, tokens[m])

    if frozen is None:
        ends = Ends(enter, zeros_like(first), left, last, end)
    else:
        ends = Ends(enter, {}, lambda total, m, dx: total, {}, lambda _, y, m: end(last, y, m))
    layers, below = _of_chunks(stages, params, frozen)
    table = jax.lax.dynamic_slice_in_dim(jnp.asarray(stages.ticks.table), jax.lax.axis_index(PIPELINE), 1, axis=1)
    return run_stage(
        loss.part,
        ends,
        stages.ticks,
        PIPELINE,
        layers,
        table,
        _layer_inputs(parts),
        gradients,
        sees=True,
        largest=are_scales(layers),
        frozen=below,
    )
