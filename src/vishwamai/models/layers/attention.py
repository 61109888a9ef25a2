"""Attention over all heads or groups of them, whole or within a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.types import PyTree
from vishwamai.models.attend import attend_pages, attend_sequences
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear, norm, times
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter
from vishwamai.models.rotation import rotated

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Attention(Mixer):
    """Attention of queries in heads over keys and values in as many heads or fewer.

    Attributes:
      num_heads, num_kv_heads, head_dim: sizes of layers of this type; None for those of the model.
      shared_value: values are the product that makes the keys, before their norm.
      sinks: each head has a logit that enters the denominator only; None as the model has it.
      sharing: "writes" where later layers of its type attend to its keys and values, "reads" in those layers, which
        make none (Gemma 3n, Gemma 4); None for keys and values of its own alone.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    shared_value: bool = False
    sinks: bool | None = None
    sharing: str | None = None

    tensors: ClassVar[Mapping[str, Tensor]] = {
        **{
            f"{name}{suffix}": Tensor(f"{PREFIX}self_attn.{short}_proj.{kind}", transpose=kind == "weight")
            for name, short in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
            for suffix, kind in (("", "weight"), ("_bias", "bias"))
        },
        "query_norm": Tensor(PREFIX + "self_attn.q_norm.weight"),
        "key_norm": Tensor(PREFIX + "self_attn.k_norm.weight"),
        "sinks": Tensor(PREFIX + "self_attn.sinks"),
        "attention_gate": Tensor(PREFIX + "self_attn.gate_proj.weight", True),
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, (kv_heads, dim), value_dim = config.hidden_size, self.sizes(config), self.value_dim(config)
        widths = {"query": (self.heads(config) * dim, "heads")}
        if self.sharing != "reads":
            widths["key"] = kv_heads * dim, "kv_heads"
        if self.sharing != "reads" and not self.shared_value:
            widths["value"] = kv_heads * value_dim, "kv_heads"
        if config.output_gate:
            widths["query"] = (2 * self.heads(config) * dim, "heads")
        table = {name: matrix(hidden, width, ("embed", axis)) for name, (width, axis) in widths.items()}
        table["output"] = matrix(self.heads(config) * value_dim, hidden, ("heads", "embed"))
        if config.attention_gate or config.head_gate:
            width = self.heads(config) * (1 if config.head_gate else value_dim)
            table["attention_gate"] = matrix(hidden, width, ("embed", "heads"))
        if config.attention_bias:
            table |= {f"{name}_bias": Parameter((width,), (axis,), "zeros") for name, (width, axis) in widths.items()}
        if config.attention_bias if config.output_bias is None else config.output_bias:
            table["output_bias"] = Parameter((hidden,), ("embed",), "zeros")
        normalized = [name for name in ("query", "key") if name in widths]
        if config.qk_norm == "heads":
            for name in normalized:
                heads = kv_heads if name == "key" else self.heads(config)
                table[f"{name}_norm"] = Parameter((heads, dim), (widths[name][1], None), "ones")
        elif config.qk_norm not in (None, "turning"):
            for name in normalized:
                heads = 1 if config.qk_norm != "all" else kv_heads if name == "key" else self.heads(config)
                table[f"{name}_norm"] = norm_parameter(config, heads * dim)
        if config.sinks if self.sinks is None else self.sinks:
            table["sinks"] = Parameter((self.heads(config),), ("heads",))
        return table

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        return self.with_memory(config, arrays, x, rows)[0]

    def with_memory(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        rows: Rows,
        memory: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The output of a call, and the rows' keys and values: `memory` where the layer reads those of another."""
        query, key, value, gate = self._heads(config, arrays, x, rows.axes)
        query, key = self._rotated(config, arrays, query, key, rows.positions)
        memory = memory or (key, value)
        mixed = attend_sequences(
            config, self.window, query, *memory, arrays.get("sinks"), self.segments(config, rows, x), rows.axes
        )
        return self._output(config, arrays, mixed, gate, rows.axes), memory

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: int | jax.Array
    ) -> tuple[jax.Array, PyTree]:
        query, key, value, gate = self._heads(config, arrays, x)
        query, key = self._rotated(config, arrays, query, key, step.positions, step.lengths)
        width = self.value_dim(config)
        row = max(self.sizes(config)[1], width)
        query = _widened(query, row)
        key, value = (None if x is None else _widened(x, row) for x in (key, value))
        options = {"chunk": self.chunk}
        mixed, pool = attend_pages(
            config, self.window, query, key, value, arrays.get("sinks"), step.batch, pool, first, **options
        )
        return self._output(config, arrays, mixed[..., :width], gate), pool

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        kv_heads, dim = self.sizes(config)
        return 2 * kv_heads, 0 if self.sharing == "reads" else max(dim, self.value_dim(config))

    @property
    def unread(self) -> tuple[str, ...]:
        names = ("k_proj", "v_proj", "k_norm", "v_norm") if self.sharing == "reads" else ()
        return tuple(f"{PREFIX}self_attn.{name}." for name in names)

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {"heads": ("query heads", self.heads(config)), "kv_heads": ("kv heads", self.sizes(config)[0])}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        length = length if self.window is None else min(length, self.window)
        return 2.0 * self.heads(config) * (self.sizes(config)[1] + self.value_dim(config)) * length

    def ring_features(self, config: ModelConfig) -> int:
        kv_heads, dim = self.sizes(config)
        return kv_heads * (dim + self.value_dim(config))

    def part(self, devices: int) -> Self:
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return dataclasses.replace(self, **{key: max(size // devices, 1) for key, size in sizes.items() if size})

    def heads(self, config: ModelConfig) -> int:
        """Heads of queries."""
        return self.num_heads or config.num_heads

    def sizes(self, config: ModelConfig) -> tuple[int, int]:
        """Heads of keys, and features of a head."""
        return self.num_kv_heads or config.num_kv_heads, self.head_dim or config.head_dim

    def value_dim(self, config: ModelConfig) -> int:
        """Features of a head's value."""
        return config.value_dim or self.sizes(config)[1]

    @property
    def chunk(self) -> int | None:
        """Tokens of a block, where tokens see those of their own block only; None where they do not."""
        return None

    def segments(self, config: ModelConfig, rows: Rows, x: jax.Array) -> jax.Array | None:
        """Segments of the tokens of rows `x` `[batch, seq, hidden]`; None for one segment a row."""
        return rows.segment_ids

    def product(self, arrays: Arrays, name: str, x: jax.Array) -> jax.Array:
        """What "query", "key" or "value" is made of."""
        return linear(x, arrays[name], arrays.get(f"{name}_bias"))

    def _heads(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, axes: MeshAxes = ONE_DEVICE
    ) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        """Queries, keys and values `[batch, seq, heads, head_dim]` of the heads that the device has, and the logits of
        the output's gate (None without). A layer that reads those of another has None for keys and values.
        """
        heads, gate = {}, None
        for name in ("query", "key", "value"):
            dim = self.value_dim(config) if name == "value" else self.sizes(config)[1]
            if name != "query" and (self.sharing == "reads" or (name == "value" and self.shared_value)):
                continue
            y = checkpoint_name(self.product(arrays, name, x), name)
            scale = arrays.get(f"{name}_norm")
            if config.output_gate and name == "query":  # a head's queries, then its gate
                y, gate = jnp.split(y.reshape(*x.shape[:-1], -1, 2 * dim), 2, axis=-1)
                y = y.reshape(*x.shape[:-1], -1)
            if config.qk_norm == "all" and scale is not None:
                y = _norm_of_heads(config, y, scale, axes)
            y = y.reshape(*x.shape[:-1], y.shape[-1] // dim, dim)
            if name == "key" and self.shared_value:
                heads["value"] = y
            if name == "key":
                y = times(y, config.key_scale)
            if config.qk_norm == "head" and scale is not None:
                y = norm(config, y, scale)
            elif config.qk_norm == "heads" and scale is not None:
                y = norm(config, y, None) * scale.astype(y.dtype)
            heads[name] = y
        if config.value_norm and "value" in heads:
            heads["value"] = vishwamai.rms_norm(heads["value"], None, eps=config.norm_eps)
        if "value" in heads:
            heads["value"] = times(heads["value"], config.value_scale)
        if config.attention_gate or config.head_gate:
            gate = linear(x, arrays["attention_gate"])
            gate = gate.reshape(*x.shape[:-1], -1, 1 if config.head_gate else self.value_dim(config))
        return heads["query"], heads.get("key"), heads.get("value"), gate

    def _rotated(
        self, config: ModelConfig, arrays: Arrays, query: jax.Array, key: jax.Array | None, *positions: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """Queries and keys, rotated, and normalized after it where the family does so."""
        query, key = rotated(config, self.rope, query, key, *positions)
        if config.qk_norm == "rotated" or (config.qk_norm == "turning" and self.rope.partial):
            query = norm(config, query, arrays.get("query_norm"))
            key = None if key is None else norm(config, key, arrays.get("key_norm"))
        return query, key

    def _output(
        self, config: ModelConfig, arrays: Arrays, mixed: jax.Array, gate: jax.Array | None, axes: MeshAxes = ONE_DEVICE
    ) -> jax.Array:
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        flat = checkpoint_name(mixed.reshape(*mixed.shape[:-2], mixed.shape[-2] * mixed.shape[-1]), "mixed")
        return linear(flat, arrays["output"], axes.once(arrays.get("output_bias")))


@dataclasses.dataclass(frozen=True)
class ChunkedAttention(Attention):
    """Attention within blocks of `window` positions: a token sees those of its own block up to itself (Llama 4)."""

    @property
    def layer_type(self) -> str:
        return "chunked_attention"

    @property
    def chunk(self) -> int | None:
        return self.window

    def segments(self, config: ModelConfig, rows: Rows, x: jax.Array) -> jax.Array | None:
        assert self.window is not None
        positions = rows.positions
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        blocks = jnp.broadcast_to(positions // self.window, x.shape[:2])
        if rows.segment_ids is None:
            return blocks
        return rows.segment_ids * (config.max_positions // self.window + 1) + blocks


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Heads of `width` features, the last ones 0."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) if x.shape[-1] < width else x


def _norm_of_heads(config: ModelConfig, x: jax.Array, scale: jax.Array, axes: MeshAxes) -> jax.Array:
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
