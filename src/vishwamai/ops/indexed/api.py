"""The public function `indexed_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, as_arrays, public_call
from vishwamai.ops.indexed.reference import XLA
from vishwamai.ops.indexed.spec import SIGNATURE, IndexedSpec, Operands, describe

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

INDEXED: Op[IndexedSpec] = Op("indexed_attention", (XLA,), split="batch heads")


@checked
def indexed_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"] | None,
    indices: Int[Array, "batch q_len chosen"],
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "batch heads q_len v_dim"]:
    """Attention of each query over the keys that an index chose, such as `lightning_index`: work and memory grow with
    their number, not with that of all keys. DeepSeek-AI, "DeepSeek-V3.2" (2025).

    Gradients go to the queries, and to the keys and values that were chosen. The choice itself has none. Every mask is
    in `indices`: causality, segments, and pages, whose pool may be passed as one row of keys.

    Args:
      query: `[batch, heads, q_len, qk_dim]`, bfloat16, float16, float32 or float64.
      key: `[batch, kv_heads, kv_len, qk_dim]` in the dtype of `query`; kv_heads divides heads.
      value: `[batch, kv_heads, kv_len, v_dim]` in the same dtype; None where it is part of the key (`value_dim`).
      indices: integers `[batch, q_len, chosen]`, or `[1, q_len, chosen]` for all batches: the keys that a query sees,
        in any order. Entries below 0 and from kv_len on stand for no key; a key that is named twice counts twice.
      scale: factor of the products, default `1 / sqrt(qk_dim)`.
      value_dim: the value is so many first features of the key, as in latent attention; needs `value=None`.
      config: None; the implementation has no tiles.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[batch, heads, q_len, v_dim]` in the query's dtype; 0 where a query sees no key.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> query, key = jnp.ones((1, 1, 2, 1)), jnp.zeros((1, 1, 3, 1))
    >>> value = jnp.array([1.0, 5.0, 9.0]).reshape(1, 1, 3, 1)
    >>> indexed_attention(query, key, value, jnp.array([[[0, -1], [0, 2]]])).ravel().tolist()
    [1.0, 5.0]
    """
    arrays = as_arrays("indexed_attention", Operands(query, key, indices, value))
    spec = describe(array_specs(arrays), scale, value_dim)
    return public_call(INDEXED, SIGNATURE, spec, arrays, config=config, implementation=implementation).out
