"""Packed sequences for layers with a state: a row holds several sequences, and a state begins anew where the segment id
changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import ArraySpec


def check_segment_ids(function: str, segment_ids: ArraySpec | None) -> None:
    """Raises ShapeError where the segment ids are not integers."""
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ShapeError(f"{function}: `segment_ids` has dtype {segment_ids.dtype.name}; pass integers, such as int32.")


def segment_numbers(segment_ids: jax.Array) -> jax.Array:
    """The number of each token's segment in its row, from 0: int32, of the shape of `segment_ids`.

    A segment is a run of equal ids, so an id that returns after another one begins a segment of its own.

    >>> segment_numbers(jnp.array([[7, 7, 2, 7]])).tolist()
    [[0, 0, 1, 2]]
    """
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    # Padded before the sum: a size that is a symbol is at least 1, and one less may be 0.
    return jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0)))[..., : segment_ids.shape[-1]], axis=-1, dtype=jnp.int32)
