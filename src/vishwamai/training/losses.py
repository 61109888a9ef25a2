"""Losses of a batch: of the next token, of experts and of preferences, from the parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.core.types import AnyArray, PyTree
from vishwamai.models import Decoder
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import ModelConfig
from vishwamai.models.layers.feed_forward import ExpertLoad
from vishwamai.training.config import LossSection
from vishwamai.training.head import cross_entropy, head_operands
from vishwamai.training.packing import IGNORED, REFERENCE
from vishwamai.training.preferences import answer_logprobs, preference_loss
from vishwamai.training.remat import Policy, checkpointed

Loss = Callable[..., tuple[jax.Array, dict[str, PyTree]]]
"""From parameters and a batch, and `frozen` parameters by that name where there are some, to the *sum* of the loss over
its counted tokens, and further sums to report."""


def model_loss(
    graph: nnx.GraphDef[Decoder],
    rest: PyTree,
    section: LossSection | None = None,
    policy: Policy | None = None,
    gather: Callable[[PyTree], PyTree] | None = None,
    attach: Callable[[PyTree], PyTree] | None = None,
    axes: MeshAxes = ONE_DEVICE,
    beta: float = 0.1,
) -> Loss:
    """Cross entropy of the next token, without the logits, and the losses of experts; or for batches with `reference`
    the loss of `preferences.preference_loss` alone.

    Args:
      graph: result of `nnx.split(model, nnx.Param, ...)`.
      rest: the model's other variables.
      section: weights of the terms; None for the defaults.
      policy: result of `remat.checkpoint_policy`: arrays that the backward pass keeps; None for everything.
      gather: makes parameters whole where they are used, such as `Layout.gather`; None where they are.
      attach: puts weights that multiply by themselves among the parameters, such as `FP8Optimizer.attach`.
      axes: the mesh axes over which the model is split, `Layout.model_axes`.
      beta: `dpo.beta`.

    Returns:
      The loss: `(sum over counted tokens, sums)`. The sums are `loss` (the cross entropy alone), and of a mixture of
      experts `load_balance` and `router_z` (the mean over its layers, times the counted tokens) and `expert_counts`
      (by entry of the model's layers).
    """

    section = LossSection() if section is None else section

    def loss(params: PyTree, batch: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
        model, hidden, loads = run_model(graph, rest, params, batch, policy, gather, attach, axes)
        hidden, head = head_operands(model.config, model.top_arrays(), hidden, axes)
        total, sums = head_loss(model.config, section, beta, hidden, head, batch, axes)
        loads_by_layer = {str(i): load for i, load in enumerate(loads) if load is not None}
        if loads_by_layer and REFERENCE not in batch:
            number = jnp.sum(batch["labels"] != IGNORED)
            balance, z = (number * value for value in _mean_losses(loads_by_layer))
            total = total + section.load_balance * balance + section.router_z_loss * z
            counts = {place: load.counts for place, load in loads_by_layer.items()}
            sums |= {"load_balance": balance, "router_z": z, EXPERT_COUNTS: counts}
        return total, sums

    return loss


def head_loss(
    config: ModelConfig,
    section: LossSection,
    beta: float,
    hidden: AnyArray,
    head: AnyArray,
    batch: dict[str, PyTree],
    axes: MeshAxes = ONE_DEVICE,
) -> tuple[PyTree, dict[str, PyTree]]:
    """The loss of hidden states `[batch, seq, hidden]` after the last norm, and its sums: `preference_loss` for batches
    with `reference`, otherwise `token_loss`.
    """
    if REFERENCE not in batch:
        return token_loss(config, section, hidden, head, batch["labels"], axes)
    logprobs = answer_logprobs(config, head, hidden, batch, axes)
    return jax.tree.map(axes.row_once, preference_loss(logprobs, batch[REFERENCE], beta))


def token_loss(
    config: ModelConfig,
    section: LossSection,
    hidden: AnyArray,
    head: AnyArray,
    labels: AnyArray,
    axes: MeshAxes = ONE_DEVICE,
) -> tuple[PyTree, dict[str, PyTree]]:
    """The loss of hidden states `[batch, seq, hidden]` after the last norm, and its sums, as those of `Loss`."""
    options = {"reduction": "sum", "return_logsumexp": bool(section.z_loss)}
    total = cross_entropy(config, hidden, head, labels, axes, **options)
    if not section.z_loss:
        return total, {"loss": total}
    plain, logsumexp = total
    z = jnp.sum(jnp.where(labels != IGNORED, jnp.square(logsumexp), 0.0))
    return plain + section.z_loss * z, {"loss": plain}


def run_model(
    graph: nnx.GraphDef[Decoder],
    rest: PyTree,
    params: PyTree,
    batch: dict[str, PyTree],
    policy: Policy | None = None,
    gather: Callable[[PyTree], PyTree] | None = None,
    attach: Callable[[PyTree], PyTree] | None = None,
    axes: MeshAxes = ONE_DEVICE,
) -> tuple[Decoder, PyTree, tuple[ExpertLoad | None, ...]]:
    """The model of these parameters, its hidden states of a batch, and the load of its experts; the arguments are those
    of `model_loss`.
    """
    if attach is not None:
        params = attach(params)
    if gather is not None:
        layers = params["layers"]  # each is gathered where it runs
        params = gather({k: v for k, v in params.items() if k != "layers"}) | {"layers": layers}
    model = nnx.merge(graph, params, rest)
    forward = checkpointed(model, policy, gather)
    where = {name: batch[name] for name in ("positions", "segment_ids")}
    return model, *forward(batch["tokens"], **where, axes=axes)


EXPERT_COUNTS = "expert_counts"
"""Among the sums of a loss: int32 `[..., experts]`, tokens that chose each expert, by entry of the model's layers."""


def _mean_losses(loads: dict[str, ExpertLoad]) -> tuple[PyTree, PyTree]:
    """The load-balancing loss and the z-loss, each the mean over all layers with experts."""
    balance, z = (
        jnp.concatenate([jnp.ravel(x) for x in columns]) for columns in zip(*((v[0], v[1]) for v in loads.values()))
    )
    return jnp.mean(balance), jnp.mean(z)


def loss_count(batch: dict[str, PyTree], axes: MeshAxes = ONE_DEVICE) -> AnyArray:
    """Over what the loss of a batch is a mean: tokens in the loss, or pairs of answers. Inside `shard_map`, those of
    this device, to be added up over the devices of tokens.
    """
    if REFERENCE in batch:
        return axes.row_once(jnp.asarray(batch[REFERENCE].shape[0]))
    return jnp.sum(batch["labels"] != IGNORED)
