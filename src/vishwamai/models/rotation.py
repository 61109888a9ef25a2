"""The rotation of queries and keys by their positions (RoPE). Su et al., "RoFormer" (2021)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.types import PyTree
from vishwamai.ops.rope import Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a layer rotates queries and keys; see `vishwamai.apply_rope`.

    Attributes:
      theta: base of the frequencies.
      scaling: a scaling of `vishwamai`, or `RopeScaling()` for none.
      partial: share of a head's features that turn; 0 for a layer without rotation.
      proportional: the features that turn are the first of each half of the head, at the frequencies of the whole head
        (Gemma 4); otherwise they are the head's first, at frequencies of their own.
      query_growth: queries are multiplied by `1 + query_growth * ln(1 + floor(position / original))`, with the length
        of the original context of `scaling` (Ministral 3, after Llama 4).
      growth_length: a length in place of that one, by which positions count from 1 (Llama 4); None for none.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()
    partial: float = 1.0
    proportional: bool = False
    query_growth: float = 0.0
    growth_length: int | None = None


NO_ROTATION = Rope(partial=0.0)


def rotated(
    config: ModelConfig,
    rope: Rope,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"] | None,
    positions: Int[Array, "batch seq"] | None,
    lengths: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq kv_heads head_dim"] | None]:
    """Queries and keys, rotated.

    Args:
      config: the model, for `head_dim` and the order of the features.
      rope: the layer's rotation.
      query, key: queries and keys of the new tokens; None for no keys.
      positions: `[batch, seq]`, positions of the tokens; None counts every row from 0.
      lengths: `[batch, seq]`, tokens of each token's sequence, for scalings that depend on it; None for the largest
        position and one more.
    """
    dim = query.shape[-1]
    width = int(dim * rope.partial)
    query = grown(rope, query, positions)
    if not width:
        return query, key
    if rope.proportional:
        return _proportional(config, rope, query, key, positions, 2 * int(rope.partial * dim // 2))
    options: dict[str, Any] = {"theta": rope.theta, "rotary_dim": width, "layout": "bshd"}
    options["interleaved"] = config.rope_interleaved
    scaling, heads = rope.scaling, query if key is None else (query, key)
    turned: PyTree
    if lengths is None or not isinstance(scaling, LongRopeScaling):
        turned = vishwamai.apply_rope(heads, positions, scaling=scaling, **options)
    else:
        short = dataclasses.replace(scaling, long_factor=scaling.short_factor)
        long = dataclasses.replace(scaling, short_factor=scaling.long_factor)
        near, far = (vishwamai.apply_rope(heads, positions, scaling=factors, **options) for factors in (short, long))
        past = (lengths > scaling.original_max_positions)[..., None, None]
        turned = jax.tree.map(lambda far, near: jnp.where(past, far, near), far, near)
    return (turned, None) if key is None else turned


def _proportional(
    config: ModelConfig, rope: Rope, query: jax.Array, key: jax.Array | None, positions: jax.Array | None, width: int
) -> tuple[jax.Array, jax.Array | None]:
    """The rotation of the first `width / 2` features of each half of a head, at the frequencies of the whole head."""
    dim, turning = query.shape[-1], width // 2
    inner = Rope(rope.theta ** (width / dim))  # whose frequencies of `width` features are the head's first

    def split(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[..., :turning], x[..., dim // 2 : dim // 2 + turning]], axis=-1)

    def joined(x: jax.Array, y: jax.Array) -> jax.Array:
        parts = [y[..., :turning], x[..., turning : dim // 2], y[..., turning:], x[..., dim // 2 + turning :]]
        return jnp.concatenate(parts, axis=-1)

    turned: PyTree = rotated(config, inner, split(query), None if key is None else split(key), positions)
    return joined(query, turned[0]), None if key is None else joined(key, turned[1])


def grown(rope: Rope, query: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Queries `[batch, seq, heads, features]` times their factor by position, where there is one; see `Rope`."""
    if not rope.query_growth:
        return query
    if positions is None:
        positions = jnp.arange(query.shape[1])[None]
    if rope.growth_length is not None:
        steps = jnp.floor((positions + 1) / rope.growth_length)
    else:
        assert isinstance(rope.scaling, YarnScaling | LongRopeScaling | Llama3Scaling)
        steps = jnp.floor(positions / rope.scaling.original_max_positions)
    return query * (1 + rope.query_growth * jnp.log1p(steps))[..., None, None].astype(query.dtype)


def rotation_switch(config: ModelConfig) -> int | None:
    """The length in tokens past which all keys of a sequence are rotated otherwise (LongRoPE); None where there is
    none.
    """
    scalings = [kind.mixer.rope.scaling for kind in config.layers]
    return min((s.original_max_positions for s in scalings if isinstance(s, LongRopeScaling)), default=None)
