"""Which keys each query should see: the lightning indexer. Plain JAX on every platform, and torch by the same formula.

DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.arguments import checked, described
from vishwamai.core.arrays import cast, constant, largest, namespace, numbers, widened
from vishwamai.core.errors import ShapeError
from vishwamai.core.shape_checks import Argument, check_shapes
from vishwamai.core.sharding import Axes, follow_explicit_axes, match_varying
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NAME = "lightning_index"
_BLOCK_BYTES = 64 << 20
"""Bytes of the products of a block of queries."""


@checked
def lightning_index(
    query: Float[Array, "batch heads q_len dim"],
    key: Float[Array, "batch kv_len dim"],
    weights: Float[Array, "batch q_len heads"],
    *,
    top_k: int,
    positions: Int[Array, "batch q_len"] | None = None,
    segment_ids: tuple[Int[Array, "batch q_len"], Int[Array, "batch kv_len"]] | None = None,
) -> Int[Array, "batch q_len chosen"]:
    """The keys with the highest scores of each query: `score[t, s] = sum_h weights[t, h] relu(query[h, t] . key[s])`,
    of the keys up to the query's own. They are what `indexed_attention` takes.

    Products and sums are float32 (float64 for float64). Positive factors of the scores change no choice, so there is no
    scale. No gradient goes through the choice.

    Args:
      query: `[batch, heads, q_len, dim]`, the indexer's own heads.
      key: `[batch, kv_len, dim]`, one head.
      weights: `[batch, q_len, heads]`, the factor of each head, of any sign.
      top_k: keys of each query, at least 1.
      positions: integers `[batch, q_len]`: query i sees the keys up to positions[i]; None: the last query sees them
        all, `i + kv_len - q_len`.
      segment_ids: integers `[batch, q_len]` and `[batch, kv_len]` of packed sequences: a query sees keys of its own
        id only.

    Returns:
      int32 `[batch, q_len, min(top_k, kv_len)]`, best first, of equal scores the lower key; -1 where a query sees fewer
      keys.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.

    >>> import jax.numpy as jnp
    >>> key = jnp.array([[[1.0], [3.0], [2.0], [-1.0]]])
    >>> lightning_index(jnp.ones((1, 1, 4, 1)), key, jnp.ones((1, 4, 1)), top_k=2).tolist()
    [[[0, -1], [1, 0], [1, 2], [1, 2]]]
    """
    named = {"query": query, "key": key, "weights": weights}
    query, key, weights = (as_array(_NAME, name, x) for name, x in named.items())
    positions = None if positions is None else as_array(_NAME, "positions", positions)
    q_ids, kv_ids = pair(segment_ids)
    q_ids, kv_ids = (None if x is None else as_array(_NAME, "segment_ids", x) for x in (q_ids, kv_ids))
    check_index(query, key, weights, top_k, positions, q_ids, kv_ids)
    row = "batch", None
    of_ids = (row, row) if q_ids is not None else (None, None)
    axes = Axes(
        (("batch", None, None, None), (*row, None), (*row, None), None if positions is None else row, *of_ids),
        (*row, None),
        frozenset({"batch"}),
    )

    def blocks(
        query: jax.Array,
        key: jax.Array,
        weights: jax.Array,
        positions: jax.Array | None,
        q_ids: jax.Array | None,
        kv_ids: jax.Array | None,
    ) -> jax.Array:
        """The choice of all queries, in blocks of them."""
        batch, heads, length, _ = query.shape
        if positions is None:
            positions = jnp.broadcast_to(numbers(length, query) + (key.shape[1] - length), (batch, length))
        sizes = batch, heads, key.shape[1], length
        block = None
        if all(isinstance(size, int) for size in sizes):
            block = max(1, _BLOCK_BYTES // max(1, 4 * batch * heads * key.shape[1]))
            if block >= length:
                return choose(query, key, weights, top_k, positions, q_ids, kv_ids)

        def select(item: tuple[Any, ...]) -> Any:
            """The choice of one query of every batch."""
            q, w, position, *ids = (x[:, None] for x in item)
            return choose(jnp.swapaxes(q, 1, 2), key, w, top_k, position, ids[0] if ids else None, kv_ids)[:, 0]

        rows = jnp.moveaxis(query, 2, 0), *(jnp.swapaxes(x, 0, 1) for x in (weights, positions, q_ids) if x is not None)
        return jnp.swapaxes(lax.map(select, match_varying(rows), batch_size=block), 0, 1)

    return follow_explicit_axes(blocks, axes, *map(constant, (query, key, weights)), positions, q_ids, kv_ids)


def pair(segment_ids: Any) -> tuple[AnyArray, AnyArray]:
    """The ids of the queries and of the keys; None for both without ids.

    Raises:
      ShapeError: the argument is not a pair.
    """
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, (tuple, list)) or len(segment_ids) != 2:
        raise ShapeError(
            f"{_NAME}: `segment_ids` is {described(segment_ids)}; pass a pair, the ids of the queries and of the keys."
        )
    return segment_ids[0], segment_ids[1]


def check_index(
    query: AnyArray,
    key: AnyArray,
    weights: AnyArray,
    top_k: int,
    positions: AnyArray,
    q_ids: AnyArray,
    kv_ids: AnyArray,
) -> None:
    """Checks the arguments of `lightning_index`, of JAX or torch.

    Raises:
      ShapeError: one is not legal or does not fit the others.
    """
    texts = {
        "query": (query, "batch heads q_len dim"),
        "key": (key, "batch kv_len dim"),
        "weights": (weights, "batch q_len heads"),
        "positions": (positions, "batch q_len"),
        "segment_ids[0]": (q_ids, "batch q_len"),
        "segment_ids[1]": (kv_ids, "batch kv_len"),
    }
    check_shapes(_NAME, (Argument(name, text, tuple(x.shape)) for name, (x, text) in texts.items() if x is not None))
    if top_k < 1:
        raise ShapeError(f"{_NAME}: `top_k` is {top_k}; pass at least 1.")


def choose(
    query: AnyArray,
    key: AnyArray,
    weights: AnyArray,
    top_k: int,
    positions: AnyArray,
    q_ids: AnyArray,
    kv_ids: AnyArray,
) -> AnyArray:
    """`lightning_index` of one block of queries, of arrays of JAX or torch; the arguments are checked ones, and
    `positions` is an array.
    """
    xp = namespace(query)
    query, key, weights = widened(query), widened(key), widened(weights)
    options = {"precision": jax.lax.Precision.HIGHEST} if xp is jnp else {}
    products = xp.clip(xp.einsum("bhqd,bkd->bhqk", query, key, **options), 0, None)
    scores = xp.einsum("bqh,bhqk->bqk", weights, products, **options)
    visible = numbers(key.shape[1], key) <= positions[..., None]
    if q_ids is not None:
        visible = visible & (q_ids[..., None] == kv_ids[:, None])
    count = min(top_k, key.shape[1]) if isinstance(key.shape[1], int) else top_k
    best, chosen = largest(xp.where(visible, scores, -float("inf")), count)
    return cast(xp.where(best > -float("inf"), chosen, -1), jnp.int32)
