"""The mixture of experts of one layer, as a function of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import vishwamai
from vishwamai.core.code_tensor import CodeTensor
from vishwamai.core.packed_qtensor import PackedQTensor
from vishwamai.core.qtensor import QTensor
from vishwamai.core.weight import Weight
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import Experts, ModelConfig

_NAMES = ("gate", "up", "down")


class ExpertLoad(NamedTuple):
    """How a layer's experts were used; see `vishwamai.moe_routing`.

    Attributes:
      balance, z: float32 scalars, its losses.
      counts: int32 `[experts]`, tokens that chose each expert.
    """

    balance: Any
    z: Any
    counts: Any


def mixture(
    config: ModelConfig,
    experts: Experts,
    arrays: Mapping[str, Any],
    x: Any,
    axes: MeshAxes = ONE_DEVICE,
    token_mask: Any = None,
) -> tuple[Any, ExpertLoad]:
    """What the experts make of `x`, `[batch, seq, hidden]`, without the shared ones, and how they were used. Over the
    axis `tensor`, the first is the device's part of a sum.

    Args:
      axes: inside `shard_map`, the mesh axes over which the model is split.
      token_mask: bool `[batch, seq]`, False for padding, which the load leaves out; None counts every token.
    """
    weights = tuple(arrays[f"expert_{name}"] for name in _NAMES)
    gate_bias, up_bias, down_bias = (arrays.get(f"expert_{name}_bias") for name in _NAMES)
    biases = (gate_bias, up_bias, axes.once(down_bias))
    router, options = arrays["router"].astype(jnp.float32), _routing(experts, arrays)
    weights = tuple(
        w if isinstance(w, (QTensor, PackedQTensor, CodeTensor, Weight)) else w.astype(x.dtype) for w in weights
    )
    unit = {"activation": config.activation}
    if experts.clamped_limit is not None:
        unit = {"activation": "swigluoai", "limit": experts.clamped_limit}
    split = explicit_axis(weights[0])
    if split is not None:
        out = _over_experts(split, x, router, weights, biases, options, unit)
        return out, _load(vishwamai.moe_routing(x, router, token_mask=token_mask, **options))
    made = vishwamai.moe_layer(x, router, *weights, biases=biases, expert_axis=axes.expert, **unit, **options)
    routing = made.routing
    if axes.tokens or token_mask is not None:  # XLA merges what the two have in common
        over = axes.tokens or None
        routing = vishwamai.moe_routing(x, router, axis_name=over, token_mask=token_mask, **options)
    return made.out, _load(routing)


def explicit_axis(weight: Any) -> str | None:
    """The explicit mesh axis over which experts `[experts, in, out]` are split; None where they are whole, as packed
    ones and those of a `Weight` are.
    """
    if isinstance(weight, (PackedQTensor, CodeTensor, Weight)):
        return None
    found = jax.typeof(weight.values if isinstance(weight, QTensor) else weight).sharding
    return found.spec[0] if found.mesh.explicit_axes else None


def _over_experts(
    axis: str, x: Any, router: Any, weights: Any, biases: Any, options: dict[str, Any], unit: dict[str, Any]
) -> Any:
    """`moe_layer` where every device has all tokens and its share of the experts: each sends a share of the tokens to
    their experts, and the results are gathered.
    """
    tokens = x.reshape(-1, x.shape[-1])
    missing = -tokens.shape[0] % jax.typeof(tokens).sharding.mesh.shape[axis]
    tokens = jax.sharding.reshard(jnp.pad(tokens, ((0, missing), (0, 0))), PartitionSpec(axis))
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in options.items() if name not in arrays}

    def run(tokens: Any, router: Any, weights: Any, biases: Any, arrays: Any) -> Any:
        made = vishwamai.moe_layer(
            tokens, router, *weights, biases=biases, expert_axis=axis, **unit, **static, **arrays
        )
        return made.out

    split, whole = PartitionSpec(axis), PartitionSpec()
    places = (split, whole, split, split, whole)
    out = jax.shard_map(run, in_specs=places, out_specs=split, axis_names={axis})(
        tokens, router, weights, biases, arrays
    )
    return jax.sharding.reshard(out, whole)[: x.shape[0] * x.shape[1]].reshape(x.shape)


def _load(routing: Any) -> ExpertLoad:
    return ExpertLoad(routing.load_balance_loss, routing.z_loss, routing.expert_counts)


def _routing(experts: Experts, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `vishwamai.moe_routing`."""
    options: dict[str, Any] = {"top_k": experts.top_k, "normalize": experts.normalize, "scale": experts.scale}
    options["logit_bias"] = arrays.get("router_bias")
    if experts.method == "greedy":
        return options
    options |= {"num_groups": experts.num_groups or 1, "top_groups": experts.top_groups}
    if experts.method == "group_limited_greedy":
        return {**options, "group_score": "max"}
    return {**options, "scoring": "sigmoid", "bias": arrays["router_correction"]}
