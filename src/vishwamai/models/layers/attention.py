"""Attention over all heads or groups of them, whole or within a window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.models.attend import attend_pages, attend_sequences
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear, norm
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter
from vishwamai.models.rotation import rotated

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Attention(Mixer):
    """Attention of queries in heads over keys and values in as many heads or fewer.

    Attributes:
      num_kv_heads, head_dim: sizes of layers of this type; None for those of the model.
      shared_value: values are the product that makes the keys, before their norm.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    shared_value: bool = False

    tensors: ClassVar[Mapping[str, Tensor]] = {
        **{
            f"{name}{suffix}": Tensor(f"{PREFIX}self_attn.{short}_proj.{kind}", transpose=kind == "weight")
            for name, short in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
            for suffix, kind in (("", "weight"), ("_bias", "bias"))
        },
        "query_norm": Tensor(PREFIX + "self_attn.q_norm.weight"),
        "key_norm": Tensor(PREFIX + "self_attn.k_norm.weight"),
        "sinks": Tensor(PREFIX + "self_attn.sinks"),
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, (kv_heads, dim) = config.hidden_size, self.sizes(config)
        widths = {"query": (config.num_heads, "heads"), "key": (kv_heads, "kv_heads")}
        if not self.shared_value:
            widths["value"] = widths["key"]
        if config.output_gate:
            widths["query"] = (2 * config.num_heads, "heads")
        table = {name: matrix(hidden, heads * dim, ("embed", axis)) for name, (heads, axis) in widths.items()}
        table["output"] = matrix(config.num_heads * dim, hidden, ("heads", "embed"))
        if config.attention_bias:
            table |= {f"{name}_bias": Parameter((h * dim,), (axis,), "zeros") for name, (h, axis) in widths.items()}
        if config.attention_bias if config.output_bias is None else config.output_bias:
            table["output_bias"] = Parameter((hidden,), ("embed",), "zeros")
        if config.qk_norm:
            for name in ("query", "key"):
                heads = 1 if config.qk_norm != "all" else kv_heads if name == "key" else config.num_heads
                table[f"{name}_norm"] = norm_parameter(config, heads * dim)
        if config.sinks:
            table["sinks"] = Parameter((config.num_heads,), ("heads",))
        return table

    def __call__(self, config: ModelConfig, arrays: Arrays, x: Any, rows: Rows) -> Any:
        query, key, value, gate = self._heads(config, arrays, x, rows.axes)
        query, key = self._rotated(config, arrays, query, key, rows.positions)
        mixed = attend_sequences(
            config, self.window, query, key, value, arrays.get("sinks"), rows.segment_ids, rows.axes
        )
        return self._output(config, arrays, mixed, gate, rows.axes)

    def step(self, config: ModelConfig, arrays: Arrays, x: Any, step: Step, pool: Any, first: Any) -> tuple[Any, Any]:
        query, key, value, gate = self._heads(config, arrays, x)
        query, key = self._rotated(config, arrays, query, key, step.positions, step.lengths)
        mixed, pool = attend_pages(config, self.window, query, key, value, arrays.get("sinks"), step.batch, pool, first)
        return self._output(config, arrays, mixed, gate), pool

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        kv_heads, dim = self.sizes(config)
        return 2 * kv_heads, dim

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {"heads": ("query heads", config.num_heads), "kv_heads": ("kv heads", self.sizes(config)[0])}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        length = length if self.window is None else min(length, self.window)
        return 4.0 * config.num_heads * self.sizes(config)[1] * length

    def ring_features(self, config: ModelConfig) -> int:
        return 2 * math.prod(self.sizes(config))

    def part(self, devices: int) -> Self:
        if self.num_kv_heads is None:
            return self
        return dataclasses.replace(self, num_kv_heads=max(self.num_kv_heads // devices, 1))

    def sizes(self, config: ModelConfig) -> tuple[int, int]:
        """Heads of keys, and features of a head."""
        return self.num_kv_heads or config.num_kv_heads, self.head_dim or config.head_dim

    def _heads(self, config: ModelConfig, arrays: Arrays, x: Any, axes: MeshAxes = ONE_DEVICE) -> tuple[Any, ...]:
        """Queries, keys and values `[batch, seq, heads, head_dim]` of the heads that the device has, and the logits of
        the output's gate (None without).
        """
        heads, gate, dim = {}, None, self.sizes(config)[1]
        for name in ("query", "key", "value"):
            if name == "value" and self.shared_value:
                continue
            y = checkpoint_name(linear(x, arrays[name], arrays.get(f"{name}_bias")), name)
            scale = arrays.get(f"{name}_norm")
            if config.output_gate and name == "query":  # a head's queries, then its gate
                y, gate = jnp.split(y.reshape(*x.shape[:-1], -1, 2 * dim), 2, axis=-1)
                y = y.reshape(*x.shape[:-1], -1)
            if config.qk_norm == "all" and scale is not None:
                y = _norm_of_heads(config, y, scale, axes)
            y = y.reshape(*x.shape[:-1], y.shape[-1] // dim, dim)
            if name == "key" and self.shared_value:
                heads["value"] = y
            heads[name] = norm(config, y, scale) if config.qk_norm == "head" and scale is not None else y
        if config.value_norm:
            heads["value"] = vishwamai.rms_norm(heads["value"], None, eps=config.norm_eps)
        return heads["query"], heads["key"], heads["value"], gate

    def _rotated(self, config: ModelConfig, arrays: Arrays, query: Any, key: Any, *positions: Any) -> tuple[Any, Any]:
        """Queries and keys, rotated, and normalized after it where the family does so."""
        query, key = rotated(config, self.rope, query, key, *positions)
        if config.qk_norm == "rotated":
            query, key = norm(config, query, arrays["query_norm"]), norm(config, key, arrays["key_norm"])
        return query, key

    def _output(self, config: ModelConfig, arrays: Arrays, mixed: Any, gate: Any, axes: MeshAxes = ONE_DEVICE) -> Any:
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        flat = checkpoint_name(mixed.reshape(*mixed.shape[:-2], mixed.shape[-2] * mixed.shape[-1]), "mixed")
        return linear(flat, arrays["output"], axes.once(arrays.get("output_bias")))


def _norm_of_heads(config: ModelConfig, x: Any, scale: Any, axes: MeshAxes) -> Any:
    """`norm` over the features of all heads. Where mesh axes split them, devices add up one sum of squares for each
    token; the operation would gather the features.
    """
    sharding = jax.typeof(x).sharding
    explicit = sharding.mesh.explicit_axes and sharding.spec[-1] is not None
    if not explicit and axes.tensor is None:
        return norm(config, x, scale)
    wide, features = x.astype(jnp.promote_types(x.dtype, jnp.float32)), scale.shape[-1]
    if axes.tensor is not None:  # the scale is whole on every device
        scale = jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(axes.tensor) * x.shape[-1], x.shape[-1])
    squares = axes.total(jnp.sum(jnp.square(wide), axis=-1, keepdims=True))
    inverse = jax.lax.rsqrt(squares / features + config.norm_eps)
    return (wide * inverse * (scale.astype(wide.dtype) + (1.0 if config.norm_offset else 0.0))).astype(x.dtype)
