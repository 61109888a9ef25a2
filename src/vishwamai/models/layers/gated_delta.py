"""The gated delta net. Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), as Qwen3-Next and Qwen3.5 have it.

Queries, keys and values pass a short causal convolution, the gated delta rule mixes the tokens, and a norm and a gate
follow on each head. Its state has one size for any length of the sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

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

_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, which are brought to length 1."""


@dataclasses.dataclass(frozen=True)
class GatedDelta(Recurrent):
    """A gated delta net whose inputs come of separate products (Qwen3.5).

    Attributes:
      key_heads, value_heads: heads of queries and keys, and of values; the one divides the other.
      key_dim, value_dim: features of a head.
      width: tokens that the convolution sees.
      negative: betas reach 2, so that a token may reverse what the state has of its key.
      norm_eps: constant of the norm of heads; None for that of the model.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    negative: bool = False
    norm_eps: float | None = None

    gate_activation: ClassVar[str] = "silu"
    tensors: ClassVar[Mapping[str, Tensor]] = {
        "delta_qkv": Tensor(PREFIX + "linear_attn.in_proj_qkv.weight", True),
        "delta_gate": Tensor(PREFIX + "linear_attn.in_proj_z.weight", True),
        "delta_beta": Tensor(PREFIX + "linear_attn.in_proj_b.weight", True),
        "delta_decay": Tensor(PREFIX + "linear_attn.in_proj_a.weight", True),
        "delta_filter": Tensor(PREFIX + "linear_attn.conv1d.weight"),
        "delta_step": Tensor(PREFIX + "linear_attn.dt_bias"),
        "delta_rate": Tensor(PREFIX + "linear_attn.A_log"),
        "delta_norm": Tensor(PREFIX + "linear_attn.norm.weight"),
        "delta_output": Tensor(PREFIX + "linear_attn.out_proj.weight", True),
    }

    @property
    def layer_type(self) -> str:
        return "linear_attention"

    @property
    def channels(self) -> int:
        """Features that pass the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, values = config.hidden_size, self.value_heads * self.value_dim
        return {
            **self._products(hidden),
            "delta_filter": Parameter((self.channels, 1, self.width), (None, None, None)),
            "delta_step": Parameter((self.value_heads,), (None,), "ones"),
            "delta_rate": Parameter((self.value_heads,), (None,), "log_uniform"),
            "delta_norm": Parameter((self.value_dim,), (None,), "ones"),
            "delta_output": matrix(values, hidden, (None, "embed")),
        }

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {
            "filter": (self.width - 1, self.channels),
            "memory": (self.value_heads, self.key_dim, self.value_dim),
        }

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        mixed, gate, beta, decay = self._inputs(arrays, x)
        mixed = tokens.convolve("filter", mixed, self._filter(arrays).astype(x.dtype), activation=config.activation)
        keys = self.key_heads * self.key_dim
        query, key, value = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        query, key = (_unit(_by_head(y, self.key_dim)) for y in (query, key))
        decay = self._decay(arrays, decay)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * (2.0 if self.negative else 1.0)
        out = tokens.recur(
            "memory",
            vishwamai.gated_delta_rule,
            query,
            key,
            _by_head(value, self.value_dim),
            jnp.swapaxes(decay, 1, 2),
            jnp.swapaxes(beta, 1, 2),
        )
        out = vishwamai.rms_norm(jnp.swapaxes(out, 1, 2), arrays["delta_norm"], eps=self.norm_eps or config.norm_eps)
        gate = activate(self.gate_activation, gate.reshape(out.shape).astype(jnp.float32))
        flat = checkpoint_name((out * gate).astype(x.dtype).reshape(*x.shape[:-1], -1), "mixed")
        # Every device of the mesh axis "tensor" has all heads: the sum over them counts one.
        return tokens.axes.once(linear(flat, arrays["delta_output"]))

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 6.0 * self.value_heads * self.key_dim * self.value_dim  # decays aside: correct, write, read

    def _products(self, hidden: int) -> dict[str, Parameter]:
        """The products of the layer's input."""
        sizes = {
            "delta_qkv": self.channels,
            "delta_gate": self.value_heads * self.value_dim,
            "delta_beta": self.value_heads,
            "delta_decay": self.value_heads,
        }
        return {name: matrix(hidden, size, ("embed", None)) for name, size in sizes.items()}

    def _inputs(self, arrays: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values side by side `[batch, seq, channels]`, the gate `[batch, seq, values]`, and the
        logits of beta and the decay `[batch, seq, value_heads]`.
        """
        names = ("delta_qkv", "delta_gate", "delta_beta", "delta_decay")
        qkv, gate, beta, decay = (linear(x, arrays[name]) for name in names)
        return qkv, gate, beta, decay

    def _filter(self, arrays: Arrays) -> jax.Array:
        """The convolution's weight `[channels, width]`."""
        return arrays["delta_filter"][:, 0]

    def _decay(self, arrays: Arrays, logits: jax.Array) -> jax.Array:
        """float32 logarithms of the decays `[batch, seq, value_heads]`, or `[batch, seq, value_heads, key_dim]`."""
        step = jax.nn.softplus(logits.astype(jnp.float32) + arrays["delta_step"].astype(jnp.float32))
        return -jnp.exp(arrays["delta_rate"].astype(jnp.float32)) * step


@dataclasses.dataclass(frozen=True)
class FusedGatedDelta(GatedDelta):
    """A gated delta net whose inputs come of two products, ordered by key head (Qwen3-Next)."""

    tensors: ClassVar[Mapping[str, Tensor]] = {
        **{name: tensor for name, tensor in GatedDelta.tensors.items() if "in_proj" not in tensor.name},
        "delta_inputs": Tensor(PREFIX + "linear_attn.in_proj_qkvz.weight", True),
        "delta_rates": Tensor(PREFIX + "linear_attn.in_proj_ba.weight", True),
    }

    def _products(self, hidden: int) -> dict[str, Parameter]:
        return {
            "delta_inputs": matrix(hidden, self.channels + self.value_heads * self.value_dim, ("embed", None)),
            "delta_rates": matrix(hidden, 2 * self.value_heads, ("embed", None)),
        }

    def _inputs(self, arrays: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        shape, group = x.shape[:-1], self.value_heads // self.key_heads
        inputs = linear(x, arrays["delta_inputs"]).reshape(*shape, self.key_heads, -1)
        values = group * self.value_dim
        query, key, value, gate = jnp.split(
            inputs, (self.key_dim, 2 * self.key_dim, 2 * self.key_dim + values), axis=-1
        )
        qkv = jnp.concatenate([y.reshape(*shape, -1) for y in (query, key, value)], axis=-1)
        beta, decay = jnp.split(linear(x, arrays["delta_rates"]).reshape(*shape, self.key_heads, -1), 2, axis=-1)
        return qkv, gate.reshape(*shape, -1), beta.reshape(*shape, -1), decay.reshape(*shape, -1)


def _by_head(x: jax.Array, dim: int) -> jax.Array:
    """`[batch, heads, seq, dim]` of `[batch, seq, heads * dim]`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, dim), 1, 2)


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 along the last axis."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + _LENGTH_EPS)).astype(x.dtype)
