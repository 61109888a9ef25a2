"""Latent attention (MLA). DeepSeek-AI, "DeepSeek-V2" (2024).

Whole sequences: keys and values of all heads are expanded from the latent vectors. Pages hold the latent vectors alone:
there the expansion of keys is absorbed into the queries, and that of values follows attention (appendix of the paper).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp

import vishwamai
from vishwamai.core.types import PyTree
from vishwamai.models.attend import attend_pages, attend_sequences
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter
from vishwamai.models.rotation import Rope, grown, rotated

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig

_NORM_EPS = 1e-6  # of the norms of the latent vectors, whatever `rms_norm_eps` says: as the authors' code has it
_LANES = 128


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    Attributes:
      kv_rank, query_rank: length of the vector that keys and values are made of, and of the one that queries are made
        of (None: the layer's input).
      nope_dim, rope_dim: features of a head's query and key that do not turn, and that do.
      value_dim: features of a head's value.
      index_heads, index_dim: heads and features of a head of the indexer (`layers.indexed`).
      index_keys: tokens that the indexer chooses for each query.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    index_heads: int = 0
    index_dim: int = 0
    index_keys: int = 0


@dataclasses.dataclass(frozen=True)
class LatentAttention(Mixer):
    """Attention whose keys and values of all heads are made of one short vector, by the sizes `config.latent`."""

    tensors: ClassVar[Mapping[str, Tensor]] = {
        "query": Tensor(PREFIX + "self_attn.q_proj.weight", True),
        "query_down": Tensor(PREFIX + "self_attn.q_a_proj.weight", True),
        "query_down_bias": Tensor(PREFIX + "self_attn.q_a_proj.bias"),
        "query_down_norm": Tensor(PREFIX + "self_attn.q_a_layernorm.weight"),
        "query_up": Tensor(PREFIX + "self_attn.q_b_proj.weight", True),
        "latent_down": Tensor(PREFIX + "self_attn.kv_a_proj_with_mqa.weight", True),
        "latent_down_bias": Tensor(PREFIX + "self_attn.kv_a_proj_with_mqa.bias"),
        "latent_norm": Tensor(PREFIX + "self_attn.kv_a_layernorm.weight"),
        "latent_up": Tensor(PREFIX + "self_attn.kv_b_proj.weight", True),
        "output": Tensor(PREFIX + "self_attn.o_proj.weight", True),
        "output_bias": Tensor(PREFIX + "self_attn.o_proj.bias"),
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        latent = sizes(config)
        hidden, heads = config.hidden_size, config.num_heads
        queries = heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank is None:
            table = {"query": matrix(hidden, queries, ("embed", "heads"))}
        else:
            table = {
                "query_down": matrix(hidden, latent.query_rank, ("embed", None)),
                "query_down_norm": norm_parameter(config, latent.query_rank),
                "query_up": matrix(latent.query_rank, queries, (None, "heads")),
            }
        table["latent_down"] = matrix(hidden, latent.kv_rank + latent.rope_dim, ("embed", None))
        table["latent_norm"] = norm_parameter(config, latent.kv_rank)
        # Serving contracts other axes of it than training (the absorbed form), so it is not quantized.
        table["latent_up"] = Parameter((latent.kv_rank, heads * (latent.nope_dim + latent.value_dim)), (None, "heads"))
        table["output"] = matrix(heads * latent.value_dim, hidden, ("heads", "embed"))
        if config.attention_bias:
            biased = {"latent_down": None, "output": "embed"} | ({"query_down": None} if latent.query_rank else {})
            for name, axis in biased.items():
                table[f"{name}_bias"] = Parameter((table[name].shape[1],), (axis,), "zeros")
        return table

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        latent = sizes(config)
        plain, turning, key, vector, _ = vectors(latent, arrays, x)
        turning, key = turned(config, self.rope, turning, key, rows.positions)
        plain = grown(self.rope, plain, rows.positions)
        expanded = linear(vector, arrays["latent_up"])
        expanded = expanded.reshape(*plain.shape[:-1], latent.nope_dim + latent.value_dim)
        keys = jnp.broadcast_to(key, (*expanded.shape[:-1], latent.rope_dim))
        keys = jnp.concatenate([expanded[..., : latent.nope_dim], keys], axis=-1)
        query = jnp.concatenate([plain, turning], axis=-1)
        values = expanded[..., latent.nope_dim :]
        mixed = attend_sequences(config, self.window, query, keys, values, None, rows.segment_ids, rows.axes)
        return _output(latent, arrays, mixed, rows.axes)

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: int | jax.Array
    ) -> tuple[jax.Array, PyTree]:
        latent = sizes(config)
        plain, turning, key, vector, _ = vectors(latent, arrays, x)
        turning, key = turned(config, self.rope, turning, key, step.positions, step.lengths)
        plain = grown(self.rope, plain, step.positions)
        query = absorbed_queries(latent, arrays, plain, turning)
        row = jnp.concatenate([vector[..., None, :], key], axis=-1)
        mixed, pool = attend_pages(
            config, self.window, query, row, None, None, step.batch, pool, first, latent_dim=latent.kv_rank
        )  # [batch, seq, heads, kv_rank]
        return expanded_output(latent, arrays, mixed), pool

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        latent = sizes(config)
        # Whole lanes of a TPU: see `vishwamai.ragged_paged_attention`.
        return (-(-(latent.kv_rank + latent.rope_dim) // _LANES) * _LANES,)

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {"heads": ("query heads", config.num_heads)}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        length = length if self.window is None else min(length, self.window)
        return 2.0 * self.ring_features(config) * length

    def ring_features(self, config: ModelConfig) -> int:
        latent = sizes(config)
        return config.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)


def sizes(config: ModelConfig) -> Latent:
    """The sizes of a model with latent attention."""
    assert config.latent is not None
    return config.latent


def vectors(
    latent: Latent, arrays: Arrays, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Features of queries that do not turn `[batch, seq, heads, nope_dim]` and that do, those of the key that do
    `[batch, seq, 1, rope_dim]`, the latent vector `[batch, seq, kv_rank]`, and the vector that queries are made of.
    """
    width = latent.nope_dim + latent.rope_dim
    if latent.query_rank is None:
        source, query = x, linear(x, arrays["query"])
    else:
        low = linear(x, arrays["query_down"], arrays.get("query_down_bias"))
        source = vishwamai.rms_norm(low, arrays["query_down_norm"], eps=_NORM_EPS)
        query = linear(source, arrays["query_up"])
    query = query.reshape(*x.shape[:-1], query.shape[-1] // width, width)
    low = linear(x, arrays["latent_down"], arrays.get("latent_down_bias"))
    vector = vishwamai.rms_norm(low[..., : latent.kv_rank], arrays["latent_norm"], eps=_NORM_EPS)
    turning = query[..., latent.nope_dim :]
    return query[..., : latent.nope_dim], turning, low[..., None, latent.kv_rank :], vector, source


def turned(
    config: ModelConfig, rope: Rope, query: jax.Array, key: jax.Array, *positions: jax.Array | None
) -> tuple[jax.Array, Any]:
    """`rotated` of queries and the key of a layer, of which neither is None."""
    return rotated(config, rope, query, key, *positions)


def absorbed_queries(latent: Latent, arrays: Arrays, plain: jax.Array, turning: jax.Array) -> jax.Array:
    """Queries `[batch, seq, heads, kv_rank + rope_dim]` that read latent vectors in place of keys."""
    up = _expansion(latent, arrays, plain)[..., : latent.nope_dim]
    return jnp.concatenate([vishwamai.einsum("bshn,rhn->bshr", plain, up), turning], axis=-1)


def expanded_output(latent: Latent, arrays: Arrays, mixed: jax.Array, axes: MeshAxes = ONE_DEVICE) -> jax.Array:
    """The layer's output of mixed latent vectors `[batch, seq, heads, kv_rank]`."""
    up = _expansion(latent, arrays, mixed)[..., latent.nope_dim :]
    return _output(latent, arrays, vishwamai.einsum("bshr,rhv->bshv", mixed, up), axes)


def _expansion(latent: Latent, arrays: Arrays, x: jax.Array) -> jax.Array:
    """The expansion of latent vectors `[kv_rank, heads, nope_dim + value_dim]`, for heads `x`."""
    up = arrays["latent_up"].astype(x.dtype)
    return up.reshape(latent.kv_rank, x.shape[2], latent.nope_dim + latent.value_dim)


def _output(latent: Latent, arrays: Arrays, mixed: jax.Array, axes: MeshAxes = ONE_DEVICE) -> jax.Array:
    flat = mixed.reshape(*mixed.shape[:-2], mixed.shape[-2] * latent.value_dim)
    return linear(flat, arrays["output"], axes.once(arrays.get("output_bias")))
