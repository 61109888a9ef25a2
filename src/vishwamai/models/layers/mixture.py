"""A mixture of experts as a feed-forward network. Shazeer et al., "Outrageously Large Neural Networks" (2017)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import vishwamai
from vishwamai.core.code_tensor import CodeTensor
from vishwamai.core.packed_qtensor import PackedQTensor
from vishwamai.core.qtensor import QTensor
from vishwamai.core.weight import Weight
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear
from vishwamai.models.layers.feed_forward import GATED, ExpertLoad, FeedForward, gated_parameters, gated_unit
from vishwamai.models.parameters import PREFIX, Parameter, Tensor

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays


@dataclasses.dataclass(frozen=True)
class Experts:
    """Sizes and routing of a mixture of experts; see `vishwamai.moe_routing`.

    Attributes:
      count, top_k: number of experts, and of those that each token is sent to.
      inner_size: inner width of one expert; None for the `intermediate_size` of the model.
      shared: number of experts that every token passes, as one network of so many times the width.
      shared_size: width of that network where it is stated; None for `shared` times the width of one expert.
      shared_gate: the output of that network is multiplied by the sigmoid of a product of its input (Qwen2-MoE).
      method: "greedy" (the best scores by softmax), "group_limited_greedy" (in the best groups, by their best expert;
        DeepSeek V2), "noaux_tc" (by sigmoid and correction, in the best groups by two; DeepSeek V3), or "corrected" (by
        softmax and correction; ERNIE 4.5).
      normalize: a token's weights add up to 1.
      scale: factor of the weights after that.
      num_groups, top_groups: number of groups of experts, and of those that a token may reach.
      biases: the router and the experts have biases.
      clamped_limit: limit of the clamped unit of gpt-oss; None for the plain unit.
    """

    count: int
    top_k: int
    inner_size: int | None = None
    shared: int = 0
    shared_size: int | None = None
    shared_gate: bool = False
    method: str = "greedy"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    biases: bool = False
    clamped_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Mixture(FeedForward):
    """Gated units that a router chooses from for each token, by `config.experts`, and one that every token passes."""

    tensors: ClassVar[Mapping[str, Tensor]] = {
        "router": Tensor(PREFIX + "mlp.gate.weight", True),
        "router_correction": Tensor(PREFIX + "mlp.gate.e_score_correction_bias"),
        **{f"expert_{name}": Tensor(PREFIX + f"mlp.experts.{{expert}}.{name}_proj.weight", True) for name in GATED},
        "shared_expert_gate": Tensor(PREFIX + "mlp.shared_expert_gate.weight", True),
        **{f"shared_{name}": Tensor(PREFIX + f"mlp.shared_experts.{name}_proj.weight", True) for name in GATED},
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        experts = _sizes(config)
        hidden, count, inner = config.hidden_size, experts.count, experts.inner_size or config.intermediate_size
        table = {"router": Parameter((hidden, count), ("embed", None))}
        if experts.method in ("noaux_tc", "corrected"):
            table["router_correction"] = Parameter((count,), (None,), "zeros", float32=True)
        for name in ("gate", "up"):
            table[f"expert_{name}"] = Parameter((count, hidden, inner), ("experts", "embed", "mlp"), matrix=True)
        table["expert_down"] = Parameter((count, inner, hidden), ("experts", "mlp", "embed"), matrix=True)
        if experts.biases:
            table["router_bias"] = Parameter((count,), (None,), "zeros")
            for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
                axis = "embed" if name == "down" else "mlp"
                table[f"expert_{name}_bias"] = Parameter((count, size), ("experts", axis), "zeros")
        wide = experts.shared_size or inner * experts.shared
        if wide:
            table |= gated_parameters(hidden, wide, "shared_")
        if wide and experts.shared_gate:
            table["shared_expert_gate"] = Parameter((hidden, 1), ("embed", None))
        return table

    def __call__(
        self, config: ModelConfig, arrays: Arrays, x: Any, axes: MeshAxes = ONE_DEVICE, token_mask: Any = None
    ) -> tuple[Any, ExpertLoad | None]:
        experts = _sizes(config)
        out, load = _routed(config, experts, arrays, x, axes, token_mask)
        if "shared_down" in arrays:
            shared = gated_unit(config, arrays, x, axes, "shared_")
            if experts.shared_gate:
                shared = shared * jax.nn.sigmoid(linear(x, arrays["shared_expert_gate"]))
            out = out + shared
        return out, load

    def share(self, config: ModelConfig, name: str) -> float:
        experts = _sizes(config)
        return experts.top_k / experts.count if name.startswith("expert_") else 1.0


def _sizes(config: ModelConfig) -> Experts:
    assert config.experts is not None
    return config.experts


def _routed(
    config: ModelConfig, experts: Experts, arrays: Arrays, x: Any, axes: MeshAxes, token_mask: Any
) -> tuple[Any, ExpertLoad]:
    """The sum of the chosen experts' outputs, without the shared ones, and the load."""
    weights = tuple(arrays[f"expert_{name}"] for name in GATED)
    gate_bias, up_bias, down_bias = (arrays.get(f"expert_{name}_bias") for name in GATED)
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
    result = vishwamai.moe_layer(x, router, *weights, biases=biases, expert_axis=axes.expert, **unit, **options)
    routing = result.routing
    if axes.tokens or token_mask is not None:  # XLA merges what the two have in common
        over = axes.tokens or None
        routing = vishwamai.moe_routing(x, router, axis_name=over, token_mask=token_mask, **options)
    return result.out, _load(routing)


def explicit_axis(weight: Any) -> str | None:
    """The explicit mesh axis over which experts `[experts, in, out]` are split; None where they are whole, as packed
    ones and those of a `Weight` are.
    """
    if isinstance(weight, (PackedQTensor, CodeTensor, Weight)):
        return None
    sharding = jax.typeof(weight.values if isinstance(weight, QTensor) else weight).sharding
    return sharding.spec[0] if sharding.mesh.explicit_axes else None


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
        return vishwamai.moe_layer(
            tokens, router, *weights, biases=biases, expert_axis=axis, **unit, **static, **arrays
        ).out

    split, replicated = PartitionSpec(axis), PartitionSpec()
    places = (split, replicated, split, split, replicated)
    out = jax.shard_map(run, in_specs=places, out_specs=split, axis_names={axis})(
        tokens, router, weights, biases, arrays
    )
    return jax.sharding.reshard(out, replicated)[: x.shape[0] * x.shape[1]].reshape(x.shape)


def _load(routing: Any) -> ExpertLoad:
    return ExpertLoad(routing.load_balance_loss, routing.z_loss, routing.expert_counts)


def _routing(experts: Experts, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `vishwamai.moe_routing`."""
    options: dict[str, Any] = {"top_k": experts.top_k, "normalize": experts.normalize, "scale": experts.scale}
    options["logit_bias"] = arrays.get("router_bias")
    if experts.method == "greedy":
        return options
    if experts.method == "corrected":
        return {**options, "bias": arrays["router_correction"]}
    options |= {"num_groups": experts.num_groups or 1, "top_groups": experts.top_groups}
    if experts.method == "group_limited_greedy":
        return {**options, "group_score": "max"}
    return {**options, "scoring": "sigmoid", "bias": arrays["router_correction"]}
