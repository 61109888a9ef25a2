"""The mixer of Mamba2. Dao, Gu, "Transformers are SSMs" (2024), as Bamba, Granite 4 and Nemotron-H have it.

One product makes the gate, the tokens with their B and C, and the steps. Tokens, B and C pass a short causal
convolution, the state space mixes them, and a gate and a norm over groups of features follow. Its state has one size
for any length of the sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.activations import activate
from vishwamai.models.blocks import linear
from vishwamai.models.layers.mixer import Arrays
from vishwamai.models.layers.recurrent import Recurrent, Tokens
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


def mamba_tensors(module: str) -> dict[str, Tensor]:
    """The tensors of a mixer whose module has that name, by the parameter's name."""
    return {
        "mamba_input": Tensor(module + "in_proj.weight", True),
        "mamba_input_bias": Tensor(module + "in_proj.bias"),
        "mamba_filter": Tensor(module + "conv1d.weight"),
        "mamba_filter_bias": Tensor(module + "conv1d.bias"),
        "mamba_step": Tensor(module + "dt_bias"),
        "mamba_rate": Tensor(module + "A_log"),
        "mamba_skip": Tensor(module + "D"),
        "mamba_norm": Tensor(module + "norm.weight"),
        "mamba_output": Tensor(module + "out_proj.weight", True),
        "mamba_output_bias": Tensor(module + "out_proj.bias"),
    }


@dataclasses.dataclass(frozen=True)
class Mamba2(Recurrent):
    """A selective state space in heads.

    Attributes:
      heads: number of heads.
      head_dim: features of a head; None for `expand * hidden_size / heads`.
      inner_size: features of all heads, where `head_dim` is None; None for `expand` times `hidden_size`.
      expand: factor of `hidden_size`.
      groups: pairs of B and C, which divide the heads; the norm has as many groups.
      normalized: a norm follows, after the gate or (`norm_first`) before it.
      state_dim: numbers of the state for each feature.
      width: tokens that the convolution sees.
      filter_bias, biases: the convolution has a bias; the products have biases.
      output_bias: the last product has a bias; None for the same as `biases`.
      activation: function after the convolution; None for that of the model.
      least_step: lower bound of the steps.
      norm_eps: epsilon of the norm; None for that of the model.
    """

    heads: int = 128
    head_dim: int | None = None
    inner_size: int | None = None
    expand: int = 2
    groups: int = 1
    state_dim: int = 128
    width: int = 4
    filter_bias: bool = True
    biases: bool = False
    output_bias: bool | None = None
    normalized: bool = True
    norm_first: bool = False
    activation: str | None = None
    least_step: float = 0.0
    norm_eps: float | None = None

    tensors: ClassVar[Mapping[str, Tensor]] = mamba_tensors(PREFIX + "mamba.")

    @property
    def layer_type(self) -> str:
        return "linear_attention"

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, inner, channels = config.hidden_size, self.inner(config), self.channels(config)
        table = {
            "mamba_input": matrix(hidden, inner + channels + self.heads, ("embed", None)),
            "mamba_filter": Parameter((channels, 1, self.width), (None, None, None)),
            "mamba_step": Parameter((self.heads,), (None,), "ones"),
            "mamba_rate": Parameter((self.heads,), (None,), "log_uniform"),
            "mamba_skip": Parameter((self.heads,), (None,), "ones"),
            "mamba_output": matrix(inner, hidden, (None, "embed")),
        }
        if self.normalized:
            table["mamba_norm"] = Parameter((inner,), (None,), "ones")
        if self.filter_bias:
            table["mamba_filter_bias"] = Parameter((channels,), (None,), "zeros")
        if self.biases:
            table["mamba_input_bias"] = Parameter((inner + channels + self.heads,), (None,), "zeros")
        if self.biases if self.output_bias is None else self.output_bias:
            table["mamba_output_bias"] = Parameter((hidden,), ("embed",), "zeros")
        return table

    def inner(self, config: ModelConfig) -> int:
        """Features of all heads."""
        if self.head_dim is not None:
            return self.heads * self.head_dim
        return self.inner_size or self.expand * config.hidden_size

    def channels(self, config: ModelConfig) -> int:
        """Features that pass the convolution: those of the tokens, B and C."""
        return self.inner(config) + 2 * self.groups * self.state_dim

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {
            "filter": (self.width - 1, self.channels(config)),
            "memory": (self.heads, self.state_dim, self.inner(config) // self.heads),
        }

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        inner, channels, width = self.inner(config), self.channels(config), self.groups * self.state_dim
        wide = jnp.promote_types(x.dtype, jnp.float32)
        inputs = self._inputs(config, arrays, x)
        gate, mixed, step = jnp.split(inputs, (inner, inner + channels), axis=-1)
        kernel, bias = arrays["mamba_filter"][:, 0].astype(x.dtype), arrays.get("mamba_filter_bias")
        bias = None if bias is None else bias.astype(x.dtype)
        mixed = tokens.convolve("filter", mixed, kernel, bias, self.activation or config.activation)
        heads, enter, leave = jnp.split(mixed, (inner, inner + width), axis=-1)
        rate, shift, skip = (arrays[f"mamba_{name}"].astype(wide) for name in ("rate", "step", "skip"))
        step = jnp.maximum(jax.nn.softplus(step.astype(wide) + shift), self.least_step)

        def mix(x: jax.Array, dt: jax.Array, B: jax.Array, C: jax.Array, **options: Any) -> jax.Array:
            return vishwamai.state_space(x, dt, -jnp.exp(rate), B, C, skip, **options)

        enter, leave = (_by_head(y, self.state_dim) for y in (enter, leave))
        out = tokens.recur("memory", mix, _by_head(heads, inner // self.heads), jnp.swapaxes(step, 1, 2), enter, leave)
        out = jnp.swapaxes(out, 1, 2).reshape(gate.shape).astype(wide)
        out = checkpoint_name(self._gated(config, arrays, out, gate.astype(wide)).astype(x.dtype), "mixed")
        # Every device of the mesh axis "tensor" has all heads: the sum over them counts one.
        return tokens.axes.once(linear(out, arrays["mamba_output"], arrays.get("mamba_output_bias")))

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 4.0 * self.inner(config) * self.state_dim  # write, read

    def _inputs(self, config: ModelConfig, arrays: Arrays, x: jax.Array) -> jax.Array:
        """The gate, the tokens, B, C and the steps side by side."""
        return linear(x, arrays["mamba_input"], arrays.get("mamba_input_bias"))

    def _gated(self, config: ModelConfig, arrays: Arrays, out: jax.Array, gate: jax.Array) -> jax.Array:
        """`out` `[batch, seq, inner]` times the activation of the gate, with the norm over groups of features."""
        gate = activate("silu", gate)
        if not self.normalized:
            return out * gate
        out = out if self.norm_first else out * gate
        groups = out.reshape(*out.shape[:-1], self.groups, -1)
        out = vishwamai.rms_norm(groups, None, eps=self.norm_eps or config.norm_eps).reshape(out.shape)
        out = out * arrays["mamba_norm"].astype(out.dtype)
        return out * gate if self.norm_first else out


def _by_head(x: jax.Array, dim: int) -> jax.Array:
    """`[batch, heads, seq, dim]` of `[batch, seq, heads * dim]`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, dim), 1, 2)
