"""Dropout whose mask is a pure function of (key, batch, head, row, column): the same bits on every platform, recomputed
in the backward pass.

The key is spent once per (batch, head) by JAX's own generator, outside the kernels (`seeds`). Inside, 32-bit mixing
turns (seed, row, column) into 24 random bits: a multiplicative hash of the row, one of the column, and the `lowbias32`
finaliser over their sum (Wellons, "Prospecting for hash functions", 2018). Every step is uint32 arithmetic modulo 2^32,
so all platforms agree bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ROWS, _COLUMNS = np.uint32(0x9E3779B1), np.uint32(0xC2B2AE35)


def seeds(key: jax.Array, batch: int, heads: int) -> jax.Array:
    """Spends `key` on one pair of seeds per (batch, head).

    Returns:
      uint32 `[batch, heads, 2]`.
    """
    return jax.random.bits(key, (batch, heads, 2), jnp.uint32)


def threshold(rate: float) -> int:
    """The 24-bit integer below which a position is dropped."""
    return round(rate * (1 << 24))


def _xor_shift(x: jax.Array, bits: int) -> jax.Array:
    return x ^ (x >> jnp.uint32(bits))


def offset_seeds(seeds: jax.Array, rows: int | jax.Array, columns: int | jax.Array) -> jax.Array:
    """The seeds by which position (i, j) draws what (i + rows, j + columns) draws by `seeds`: for a part of a score
    matrix.

    Args:
      seeds: uint32 `[..., 2]`.
      rows, columns: first row and column of the part; integers, or arrays without axes.

    >>> part = offset_seeds(jnp.array([5, 6], jnp.uint32), 3, 2)
    >>> whole = keep_mask(*jnp.array([5, 6]), jnp.arange(9)[:, None], jnp.arange(9), 0.5)
    >>> bool((keep_mask(*part, jnp.arange(6)[:, None], jnp.arange(7), 0.5) == whole[3:, 2:]).all())
    True
    """
    # The hash begins with seed + factor * index, modulo 2^32.
    by = jnp.stack([jnp.asarray(rows).astype(jnp.uint32) * _ROWS, jnp.asarray(columns).astype(jnp.uint32) * _COLUMNS])
    return seeds + by


def keep_mask(seed_0: jax.Array, seed_1: jax.Array, rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which positions are kept.

    Works on plain arrays and on values inside a Pallas kernel. `rows` and `columns` are absolute indices into the score
    matrix (any integer dtype), shaped so that they broadcast against each other and the seeds: pass them as a column
    and a row vector, so that only the last mixing steps touch every element.

    Returns:
      bool array of the broadcast shape; True = keep.
    """
    r = rows.astype(jnp.uint32) * _ROWS + seed_0.astype(jnp.uint32)
    r = _xor_shift(_xor_shift(r, 16) * jnp.uint32(0x85EBCA6B), 13)
    c = columns.astype(jnp.uint32) * _COLUMNS + seed_1.astype(jnp.uint32)
    c = _xor_shift(_xor_shift(c, 16) * jnp.uint32(0x27D4EB2F), 15)
    z = r + c
    z = _xor_shift(_xor_shift(z, 16) * jnp.uint32(0x7FEB352D), 15)
    z = _xor_shift(z * jnp.uint32(0x846CA68B), 16)
    return (z >> jnp.uint32(8)).astype(jnp.int32) >= threshold(rate)
