"""Feed-forward networks: the half of a layer that computes each token on its own.

A network is a frozen value that states its parameters and computes them. `Gated` is the usual one, `Mixture`
(`layers/mixture.py`) sends tokens to experts.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.activations import activate
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import in_dtype, linear, times
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix
from vishwamai.ops.gated import has_kernel

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays

_XIELU_SLOPE = 0.5  # at 0, from both sides
_XIELU_EDGE = -1e-6  # expm1 is not evaluated above it
GATED = ("gate", "up", "down")
"""Names of the products of a gated unit."""


class ExpertLoad(NamedTuple):
    """How a layer's experts were used; see `vishwamai.moe_routing`.

    Attributes:
      balance, z: float32 scalars, its losses.
      counts: int32 `[experts]`, tokens that chose each expert.
    """

    balance: jax.Array
    z: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The feed-forward network of a layer. A subclass adds its sizes as fields.

    Attributes:
      tensors: the tensors of checkpoints by the parameter's name, where a family has no other.
      constants: values of scalar tensors that checkpoints hold and nothing trains, by the tensor's name.
      reads_stream: a call takes the stream, without a norm, as `stream`.
    """

    tensors: ClassVar[Mapping[str, Tensor]] = {}
    constants: ClassVar[Mapping[str, float]] = {}
    reads_stream: ClassVar[bool] = False

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """The parameters of one layer by name."""
        raise NotImplementedError

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: Float[Array, "batch seq hidden"],
        axes: MeshAxes = ONE_DEVICE,
        token_mask: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq hidden"], ExpertLoad | None]:
        """The output, and the load of the experts (None without).

        Args:
          config: the model.
          arrays: the layer's parameters by name.
          x: the network's input, normalized.
          axes: mesh axes over which the model is split, inside `shard_map`; over `tensor`, the output is this device's
            part of a sum.
          token_mask: `[batch, seq]`, False for padding, which the load leaves out; None counts every token.
        """
        raise NotImplementedError

    def share(self, config: ModelConfig, name: str) -> float:
        """The share of a parameter's numbers that one token is multiplied with."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Gated(FeedForward):
    """`down(activation(gate(x)) * up(x))`. Shazeer, "GLU Variants Improve Transformer" (2020).

    Attributes:
      inner_size: inner width; None for the `intermediate_size` of the model.
      sparsity: share of the gate's features that are 0 where they have a normal distribution: what is above a multiple
        of their deviation over their mean remains (Gemma 3n); 0 for none.
    """

    inner_size: int | None = None
    sparsity: float = 0.0

    tensors: ClassVar[Mapping[str, Tensor]] = {
        f"{name}{suffix}": Tensor(f"{PREFIX}mlp.{name}_proj.{kind}", transpose=kind == "weight")
        for name in GATED
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        inner = self.inner_size or config.intermediate_size
        table = unit_parameters(config.hidden_size, inner)
        if config.mlp_bias:
            table |= {f"{name}_bias": Parameter((inner,), ("mlp",), "zeros") for name in ("gate", "up")}
            table["down_bias"] = Parameter((config.hidden_size,), ("embed",), "zeros")
        return table

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        if not self.sparsity:
            return gated_unit(config, arrays, x, axes), None
        count = self.inner_size or config.intermediate_size
        gate = linear(x, arrays["gate"], arrays.get("gate_bias"))
        mean = axes.total(jnp.sum(gate, axis=-1, keepdims=True)) / count
        variance = axes.total(jnp.sum(jnp.square(gate - mean), axis=-1, keepdims=True)) / count
        edge = mean + jnp.sqrt(variance) * statistics.NormalDist().inv_cdf(self.sparsity)
        inner = activate(config.activation, jax.nn.relu(gate - edge)) * linear(x, arrays["up"], arrays.get("up_bias"))
        return linear(inner, arrays["down"], axes.once(arrays.get("down_bias"))), None


@dataclasses.dataclass(frozen=True)
class Ungated(FeedForward):
    """`down(activation(up(x)))`."""

    tensors: ClassVar[Mapping[str, Tensor]] = Gated.tensors

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, inner = config.hidden_size, config.intermediate_size
        table = unit_parameters(hidden, inner, gated=False)
        if config.mlp_bias:
            table["up_bias"] = Parameter((inner,), ("mlp",), "zeros")
            table["down_bias"] = Parameter((hidden,), ("embed",), "zeros")
        return table

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        return ungated_unit(config, arrays, x, axes), None


@dataclasses.dataclass(frozen=True)
class XIELU(Ungated):
    """`down(xielu(up(x)))`, whose activation has two learned slopes. Huang and Schlag, "Deriving Activation Functions
    Using Integration" (2024).
    """

    tensors: ClassVar[Mapping[str, Tensor]] = {
        **Ungated.tensors,
        "positive_slope": Tensor(PREFIX + "mlp.act_fn.alpha_p"),
        "negative_slope": Tensor(PREFIX + "mlp.act_fn.alpha_n"),
    }
    constants: ClassVar[Mapping[str, float]] = {
        PREFIX + "mlp.act_fn.beta": _XIELU_SLOPE,
        PREFIX + "mlp.act_fn.eps": _XIELU_EDGE,
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        slope = Parameter((1,), (None,), "zeros")
        return {**super().parameters(config), "positive_slope": slope, "negative_slope": slope}

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        y = linear(x, arrays["up"], arrays.get("up_bias"), jnp.promote_types(x.dtype, jnp.float32))
        positive, negative = (
            jax.nn.softplus(arrays[f"{sign}_slope"].astype(y.dtype)) for sign in ("positive", "negative")
        )
        curve = jnp.where(
            y > 0, positive * y * y, (jnp.expm1(jnp.minimum(y, _XIELU_EDGE)) - y) * (_XIELU_SLOPE + negative)
        )
        inner = (curve + _XIELU_SLOPE * y).astype(x.dtype)
        return linear(inner, arrays["down"], axes.once(arrays.get("down_bias"))), None


def unit_parameters(hidden: int, inner: int, prefix: str = "", gated: bool = True) -> dict[str, Parameter]:
    """The products of a unit of `inner` features, with a gate or without, their names after a prefix."""
    names = GATED[:-1] if gated else GATED[1:-1]
    table = {f"{prefix}{name}": matrix(hidden, inner, ("embed", "mlp")) for name in names}
    table[f"{prefix}down"] = matrix(inner, hidden, ("mlp", "embed"))
    return table


def gated_unit(config: ModelConfig, arrays: Arrays, x: jax.Array, axes: MeshAxes, prefix: str = "") -> jax.Array:
    """A gated unit whose parameters have names with a prefix; over the axis `tensor`, this device's part of a sum."""
    weights = tuple(in_dtype(arrays[prefix + name], x.dtype) for name in ("gate", "up"))
    biases = tuple(arrays.get(f"{prefix}{name}_bias") for name in GATED)
    plain = all(isinstance(weight, jax.Array) for weight in weights)
    gate_scale, scale = config.mlp_multipliers
    if biases[0] is not None or gate_scale != 1.0 or not (plain or has_kernel(x, weights, config.activation)):
        gate, up = (linear(x, weight, bias, jnp.float32) for weight, bias in zip(weights, biases))
        inner = (activate(config.activation, times(gate, gate_scale)) * up).astype(x.dtype)
    else:
        inner = vishwamai.gated_linear_unit(x, weights, config.activation)
    return times(linear(inner, arrays[prefix + "down"], axes.once(biases[2])), scale)


def ungated_unit(config: ModelConfig, arrays: Arrays, x: jax.Array, axes: MeshAxes, prefix: str = "") -> jax.Array:
    """The same without a gate."""
    inner = linear(x, arrays[prefix + "up"], arrays.get(f"{prefix}up_bias"), activation=config.activation)
    return linear(inner, arrays[prefix + "down"], axes.once(arrays.get(f"{prefix}down_bias")))


def matched_numbers(network: FeedForward, config: ModelConfig, name: str, parameter: Parameter) -> float:
    """Numbers of a product's parameter that one token is multiplied with; 0 for norms and biases."""
    if len(parameter.shape) < 2 or name.endswith("_bias"):
        return 0
    return math.prod(parameter.shape) * network.share(config, name)
