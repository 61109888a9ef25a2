"""A mixture of experts as a feed-forward network. Shazeer et al., "Outrageously Large Neural Networks" (2017)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import vishwamai
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.types import PyTree
from vishwamai.core.weight import Weight
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear, norm
from vishwamai.models.layers.feed_forward import (
    GATED,
    ExpertLoad,
    FeedForward,
    Gated,
    gated_unit,
    ungated_unit,
    unit_parameters,
)
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter
from vishwamai.models.shifted_weight import ShiftedWeight

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays
    from vishwamai.ops.moe.routing import Routing


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
        softmax and correction; ERNIE 4.5); "group_limited_top2" (by softmax, in the best groups by two; Mistral 4);
        "sigmoid" (by sigmoid alone; Llama 4); "sparsemixer" (Phi-3.5-MoE).
      normalize: a token's weights add up to 1.
      scale: factor of the weights after that.
      num_groups, top_groups: number of groups of experts, and of those that a token may reach.
      margin: half the margin of "sparsemixer".
      biases: the router and the experts have biases.
      clamped_limit: limit of the clamped unit of gpt-oss; None for the plain unit.
      gated: experts, and the network that every token passes, are gated units; False for units without a gate.
      latent_size: features of the vectors that experts read and write, by a product before and after them; None for
        the layer's own.
      weight_inputs: a token's weights multiply the experts' input, not their output (Llama 4).
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
    margin: float = 0.01
    biases: bool = False
    clamped_limit: float | None = None
    gated: bool = True
    latent_size: int | None = None
    weight_inputs: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the products of an expert."""
        return GATED if self.gated else GATED[1:]


@dataclasses.dataclass(frozen=True)
class Mixture(FeedForward):
    """Gated units that a router chooses from for each token, by `config.experts`, and one that every token passes."""

    tensors: ClassVar[Mapping[str, Tensor]] = {
        "router": Tensor(PREFIX + "mlp.gate.weight", True),
        "router_correction": Tensor(PREFIX + "mlp.gate.e_score_correction_bias"),
        **{f"expert_{name}": Tensor(PREFIX + f"mlp.experts.{{expert}}.{name}_proj.weight", True) for name in GATED},
        "shared_expert_gate": Tensor(PREFIX + "mlp.shared_expert_gate.weight", True),
        **{f"shared_{name}": Tensor(PREFIX + f"mlp.shared_experts.{name}_proj.weight", True) for name in GATED},
        "latent_enter": Tensor(PREFIX + "mlp.fc1_latent_proj.weight", True),
        "latent_leave": Tensor(PREFIX + "mlp.fc2_latent_proj.weight", True),
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        experts = _sizes(config)
        hidden, count, inner = config.hidden_size, experts.count, experts.inner_size or config.intermediate_size
        table = {"router": Parameter((hidden, count), ("embed", None))}
        if experts.method in ("noaux_tc", "corrected"):
            table["router_correction"] = Parameter((count,), (None,), "zeros", float32=True)
        width = experts.latent_size or hidden
        for name in experts.names[:-1]:
            table[f"expert_{name}"] = Parameter((count, width, inner), ("experts", "embed", "mlp"), matrix=True)
        table["expert_down"] = Parameter((count, inner, width), ("experts", "mlp", "embed"), matrix=True)
        if experts.latent_size:
            table["latent_enter"] = matrix(hidden, width, ("embed", None))
            table["latent_leave"] = matrix(width, hidden, (None, "embed"))
        if experts.biases:
            table["router_bias"] = Parameter((count,), (None,), "zeros")
            for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
                axis = "embed" if name == "down" else "mlp"
                table[f"expert_{name}_bias"] = Parameter((count, size), ("experts", axis), "zeros")
        wide = self.shared_size(config)
        if wide:
            table |= unit_parameters(hidden, wide, "shared_", experts.gated)
        if wide and experts.shared_gate:
            table["shared_expert_gate"] = Parameter((hidden, 1), ("embed", None))
        return table

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        experts = _sizes(config)
        out, load = _routed(config, experts, arrays, x, axes, token_mask)
        if "shared_down" in arrays:
            unit = gated_unit if experts.gated else ungated_unit
            shared = unit(config, arrays, x, axes, "shared_")
            if experts.shared_gate:
                shared = shared * jax.nn.sigmoid(linear(x, arrays["shared_expert_gate"]))
            out = out + shared
        return out, load

    def shared_size(self, config: ModelConfig) -> int:
        """Inner width of the network that every token passes; 0 for none."""
        experts = _sizes(config)
        return experts.shared_size or (experts.inner_size or config.intermediate_size) * experts.shared

    def share(self, config: ModelConfig, name: str) -> float:
        experts = _sizes(config)
        return experts.top_k / experts.count if name.startswith("expert_") else 1.0


@dataclasses.dataclass(frozen=True)
class DenseMixture(Mixture):
    """A mixture of experts and a network of the model's `intermediate_size`, which every token passes (Granite 4)."""

    def shared_size(self, config: ModelConfig) -> int:
        return config.intermediate_size


def _sizes(config: ModelConfig) -> Experts:
    assert config.experts is not None
    return config.experts


@dataclasses.dataclass(frozen=True)
class GatedAndMixture(FeedForward):
    """A gated unit and a mixture of experts on the same stream, each with norms of its own, added (Gemma 4). The
    router reads the stream by a norm and a scale of its own.
    """

    reads_stream: ClassVar[bool] = True
    tensors: ClassVar[Mapping[str, Tensor]] = {
        **Gated.tensors,
        "router": Tensor(PREFIX + "router.proj.weight", True),
        "router_scale": Tensor(PREFIX + "router.scale"),
        "expert_scale": Tensor(PREFIX + "router.per_expert_scale"),
        "expert_gate": Tensor(PREFIX + "experts.gate_up_proj", True, "gate"),
        "expert_up": Tensor(PREFIX + "experts.gate_up_proj", True, "up"),
        "expert_down": Tensor(PREFIX + "experts.down_proj", True),
        "expert_norm": Tensor(PREFIX + "pre_feedforward_layernorm_2.weight"),
        "unit_post_norm": Tensor(PREFIX + "post_feedforward_layernorm_1.weight"),
        "expert_post_norm": Tensor(PREFIX + "post_feedforward_layernorm_2.weight"),
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        table = {**Gated().parameters(config), **Mixture().parameters(config)}
        names = ("router_scale", "expert_norm", "unit_post_norm", "expert_post_norm")
        table |= {name: norm_parameter(config, config.hidden_size) for name in names}
        table["expert_scale"] = Parameter((_sizes(config).count,), (None,), "ones")
        return table

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
        stream: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        assert stream is not None, "the layer hands it on"
        unit = norm(config, axes.total(gated_unit(config, arrays, x, axes)), arrays["unit_post_norm"])
        plain = norm(config, stream, None)
        scored = plain * (arrays["router_scale"] * config.hidden_size**-0.5).astype(plain.dtype)
        out, load = _routed(
            config, _sizes(config), arrays, norm(config, stream, arrays["expert_norm"]), axes, token_mask, scored
        )
        return axes.once(unit + norm(config, axes.total(out), arrays["expert_post_norm"])), load

    def share(self, config: ModelConfig, name: str) -> float:
        return Mixture().share(config, name)


def _routed(
    config: ModelConfig,
    experts: Experts,
    arrays: Arrays,
    x: jax.Array,
    axes: MeshAxes,
    token_mask: jax.Array | None,
    scored: jax.Array | None = None,
) -> tuple[jax.Array, ExpertLoad]:
    """The sum of the chosen experts' outputs, without the shared ones, and the load; `scored` is what the router reads
    in place of `x`.
    """
    weights: tuple[PyTree, ...] = tuple(arrays.get(f"expert_{name}") for name in GATED)
    gate_bias, up_bias, down_bias = (arrays.get(f"expert_{name}_bias") for name in GATED)
    biases = (gate_bias, up_bias, axes.once(down_bias))
    router, options = arrays["router"].astype(jnp.float32), _routing(experts, arrays)
    weights = tuple(
        w if w is None or isinstance(w, (QTensor, PackedQTensor, CodeTensor, Weight)) else w.astype(x.dtype)
        for w in weights
    )
    unit: dict[str, Any] = {"activation": config.activation}
    if experts.clamped_limit is not None:
        unit = {"activation": "swigluoai", "limit": experts.clamped_limit}
    if experts.weight_inputs:
        unit["weight_inputs"] = True
    inner = linear(x, arrays["latent_enter"]) if experts.latent_size else x
    scored = x if scored is None else scored
    split = explicit_axis(weights[1])
    if split is not None:
        out = _over_experts(split, inner, scored, router, weights, biases, options, unit)
        routing = vishwamai.moe_routing(scored, router, token_mask=token_mask, **options)
    else:
        out, routing, _ = vishwamai.moe_layer(
            inner, router, *weights, router_tokens=scored, biases=biases, expert_axis=axes.expert, **unit, **options
        )
        if axes.tokens or token_mask is not None:  # XLA merges what the two have in common
            over = axes.tokens or None
            routing = vishwamai.moe_routing(scored, router, axis_name=over, token_mask=token_mask, **options)
    return linear(out, arrays["latent_leave"]) if experts.latent_size else out, _load(routing)


def explicit_axis(weight: PyTree) -> str | None:
    """The explicit mesh axis over which experts `[experts, in, out]` are split; None where they are whole, as packed
    ones and those of a `Weight` are.
    """
    if isinstance(weight, ShiftedWeight):
        return explicit_axis(weight.weight)
    if isinstance(weight, (PackedQTensor, CodeTensor, Weight)):
        return None
    sharding = jax.typeof(weight.values if isinstance(weight, QTensor) else weight).sharding
    return sharding.spec[0] if sharding.mesh.explicit_axes else None


def _over_experts(
    axis: str,
    x: jax.Array,
    scored: jax.Array,
    router: jax.Array,
    weights: tuple[PyTree, ...],
    biases: tuple[PyTree, ...],
    options: Mapping[str, object],
    unit: Mapping[str, object],
) -> jax.Array:
    """`moe_layer` where every device has all tokens and its share of the experts: each sends a share of the tokens to
    their experts, and the results are gathered; the router reads `scored`.
    """
    split, replicated = PartitionSpec(axis), PartitionSpec()

    def shared(x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        missing = -tokens.shape[0] % jax.typeof(tokens).sharding.mesh.shape[axis]
        return jax.sharding.reshard(jnp.pad(tokens, ((0, missing), (0, 0))), split)

    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in options.items() if name not in arrays}

    def run(
        tokens: jax.Array,
        scored: jax.Array,
        router: jax.Array,
        weights: tuple[PyTree, ...],
        biases: tuple[PyTree, ...],
        arrays: Mapping[str, Any],
    ) -> jax.Array:
        return vishwamai.moe_layer(
            tokens, router, *weights, router_tokens=scored, biases=biases, expert_axis=axis, **unit, **static, **arrays
        ).out

    places = (split, split, replicated, split, split, replicated)
    out = jax.shard_map(run, in_specs=places, out_specs=split, axis_names={axis})(
        shared(x), shared(scored), router, weights, biases, arrays
    )
    return jax.sharding.reshard(out, replicated)[: x.shape[0] * x.shape[1]].reshape(x.shape)


def _load(routing: Routing) -> ExpertLoad:
    return ExpertLoad(routing.load_balance_loss, routing.z_loss, routing.expert_counts)


def _routing(experts: Experts, arrays: Mapping[str, object]) -> dict[str, Any]:
    """Options of `vishwamai.moe_routing`."""
    options: dict[str, Any] = {"top_k": experts.top_k, "normalize": experts.normalize, "scale": experts.scale}
    options |= {"logit_bias": arrays.get("router_bias"), "expert_scale": arrays.get("expert_scale")}
    if experts.method == "greedy":
        return options
    if experts.method == "sparsemixer":
        return {**options, "scoring": "sparsemixer", "margin": 2 * experts.margin}
    if experts.method == "sigmoid":
        return {**options, "scoring": "sigmoid"}
    if experts.method == "corrected":
        return {**options, "bias": arrays["router_correction"]}
    options |= {"num_groups": experts.num_groups or 1, "top_groups": experts.top_groups}
    if experts.method == "group_limited_greedy":
        return {**options, "group_score": "max"}
    if experts.method == "group_limited_top2":
        return options
    return {**options, "scoring": "sigmoid", "bias": arrays["router_correction"]}
