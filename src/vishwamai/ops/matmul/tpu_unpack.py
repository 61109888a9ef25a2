"""Narrow weights as bfloat16 by few operations, where the vector unit's own conversions are slow: for products of few
rows, whose weights are used once.

A word of 32 bits holds 4 numbers of 8 bits or 8 of 4, which are consecutive rows of one column. Natural order would
send them to other sublanes; taking the same byte or nibble of every word instead leaves them where they are, in another
order of the rows. The rows of the other factor are put into that order once.

"words": int8 is shifted out and converted. int4 needs no conversion: a nibble behind the bits of a bfloat16 16 is the
number 16 + u exactly, so a shift, a mask and an exclusive or (which also turns two's complement into u = n + 8) give
two numbers at once, 24 too large. x @ (w + 24) = x @ w + 24 * sum(x).

"b11fnuz": float8_e4m3fn differs from float8_e4m3b11fnuz, which v6e converts itself, by a factor of 16 and by the codes
of -0 and NaN (b11fnuz has one NaN, 0x80); -0 is rewritten four at a time, and a NaN is carried past the product.

What they gain, by the schedule of 16 rows by 4096 x 14336: "words" takes int4 on v5p in 14.2 us instead of 16.7, and on
v4 int8 from 25 to 71 % of the HBM bound; "b11fnuz" takes v6e's 8-bit floats in 42 us instead of 69.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.qtensor import INT4
from vishwamai.core.types import Ref

_INT8 = jnp.dtype(jnp.int8)
ADDED = {_INT8: 0, INT4: 24}
"""What "words" adds to every weight."""
SCALE = {"b11fnuz": 16}
"""By which products of the unpacked weights are to be multiplied."""


def serves(unpack: str, narrow: jnp.dtype, wide: object, rhs_axis: int) -> bool:
    """Whether `unpack` reads weights of `narrow` beside rows of `wide`; rhs_axis: axis (1 or 2) of the weight along
    which K lies.
    """
    if wide != jnp.bfloat16 or rhs_axis == 2:  # the columns share words there, whose results would change their order
        return False
    return narrow in ADDED if unpack == "words" else unpack == "b11fnuz" and narrow == jnp.float8_e4m3fn


def _source(lane: jax.Array, narrow: jnp.dtype) -> jax.Array:
    """Which row of the weight comes to which place, within 128 rows."""
    if narrow == _INT8:  # 32 rows: byte, word
        return lane // 32 * 32 + lane % 8 * 4 + lane // 8 % 4
    return lane // 64 * 64 + lane // 2 % 8 * 8 + lane % 2 * 4 + lane // 16 % 4  # 64 rows: nibble, word, half


def prepare(x_ref: Ref, excess_ref: Ref, narrow: jnp.dtype, group: int) -> None:
    """Puts x, `[m, K]`, into the order of "words", and fills `[m, K / group * 128]` with what a group of K adds too
    much to a result, in every lane.
    """
    rows, depth = x_ref.shape
    order = _source(lax.broadcasted_iota(jnp.int32, (rows, 128), 1), narrow)

    def of_group(g: jax.Array, carry: None) -> None:
        def of_lanes(i: jax.Array, total: jax.Array) -> jax.Array:
            lanes = pl.ds(pl.multiple_of(g * group + i * 128, 128), 128)
            x = x_ref[:, lanes].astype(jnp.float32)
            x_ref[:, lanes] = jnp.take_along_axis(x, order, axis=1).astype(x_ref.dtype)
            return total + x

        total = lax.fori_loop(0, group // 128, of_lanes, jnp.zeros((rows, 128), jnp.float32))
        if excess_ref is not None:
            excess = ADDED[narrow] * total.sum(axis=1, keepdims=True)
            excess_ref[:, pl.ds(pl.multiple_of(g * 128, 128), 128)] = jnp.broadcast_to(excess, (rows, 128))

    lax.fori_loop(0, depth // group, of_group, None)


def to_bfloat16(ref: Ref, unpack: str) -> tuple[jax.Array, jax.Array | None]:
    """The tile in `ref`, `[K, N]`, as bfloat16: with "words" in its order and plus `ADDED`, else over `SCALE`; and what
    is to be added to each column of results.

    A NaN in a column spoils all its results, so it need not be put back where it was: the second is NaN (or 0),
    `[1, N]`.
    """
    if unpack == "convert":
        return ref[...].astype(jnp.bfloat16), None
    narrow = jnp.dtype(ref.dtype)
    words = pltpu.bitcast(ref[...], jnp.int32)
    if unpack == "b11fnuz":
        return _from_b11fnuz(words)
    depth, columns = ref.shape
    if narrow == _INT8:
        parts = [(words << (24 - 8 * byte)) >> 24 for byte in range(4)]
        stacked = jnp.stack([part.reshape(depth // 32, 8, columns) for part in parts], axis=1)
        return stacked.reshape(depth, columns).astype(jnp.float32).astype(jnp.bfloat16), None
    parts = [words << 3, *(lax.shift_right_logical(words, jnp.int32(shift)) for shift in (1, 5, 9))]
    halves = [pltpu.bitcast((part & 0x00780078) ^ 0x41C041C0, jnp.bfloat16) for part in parts]
    stacked = jnp.stack([half.reshape(depth // 64, 16, columns) for half in halves], axis=1)
    return stacked.reshape(depth, columns), None


def _from_b11fnuz(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    magnitudes, ones = jnp.int32(0x7F7F7F7F), jnp.int32(0x01010101)
    rows, columns = words.shape
    magnitude = words & magnitudes
    overflow = (magnitude + ones).reshape(rows // 8, 8, columns)
    overflowed = functools.reduce(jnp.bitwise_or, [overflow[i] for i in range(rows // 8)]) & ~magnitudes
    spoiled = jnp.max((overflowed != 0).astype(jnp.float32), axis=0, keepdims=True)
    words &= (magnitude + magnitudes) | magnitudes  # -0 to 0
    values = pltpu.bitcast(words, jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)
    return values, jnp.where(spoiled > 0, jnp.nan, 0.0)
