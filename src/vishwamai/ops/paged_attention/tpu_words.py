"""Keys and values of a kv head from the rows of its pages.

A page lies in VMEM as [page, rows, D] with all heads of a token together. Rows of a head are read with a stride, as
32-bit words: a word holds a column of two bfloat16 (four 8-bit, eight 4-bit) rows, which shifts take apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from vishwamai.core.qtensor import bits
from vishwamai.core.types import AnyArray, Ref
from vishwamai.ops.paged_attention import tpu_unpack
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu_refs import PagedRefs, Shape


def packing(dtype: DTypeLike) -> int:
    """Rows in a 32-bit word."""
    return 32 // bits(dtype)


def heads_together(spec: PagedSpec) -> int:
    """Kv heads whose rows share words, which are read together."""
    if spec.form == "latent":
        return 1
    per_word = packing(spec.operands.k_pages.dtype)
    return max(1, per_word // 2) if spec.form == "combined" else per_word


def flat_words(ref: Any) -> Ref:
    """The reference `[tokens, rows, D]` as 32-bit words, `[tokens * words of a token, D]`."""
    tokens, rows, dim = ref.shape
    flat = ref.reshape(tokens * rows, dim)
    return flat.bitcast(jnp.uint32) if packing(ref.dtype) > 1 else flat


def _words(ref: Ref, first: int, tokens: int, word: int | None) -> jax.Array:
    """32-bit words of `tokens` tokens from `first` on: word `word` of each, `[tokens, D]`, or with None all of them,
    `[tokens * words, D]`.
    """
    words = ref.shape[1] // packing(ref.dtype)
    flat = flat_words(ref)
    if word is None or words == 1:
        return flat[pl.ds(first * words, tokens * words), :]
    return flat[pl.ds(first * words + word, tokens, words), :]


def row_of(words: jax.Array, index: int, dtype: DTypeLike, result_dtype: DTypeLike) -> jax.Array:
    """Row `index` of the rows that `words` hold, widened to `result_dtype`."""
    per_word = packing(dtype)
    if per_word == 1:
        return words.astype(result_dtype)
    if per_word == 2:
        upper = words << 16 if index == 0 else words & jnp.uint32(0xFFFF0000)
        return pltpu.bitcast(upper, jnp.float32).astype(result_dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        signed, width = pltpu.bitcast(words, jnp.int32), bits(dtype)
        return ((signed << (32 - width * (index + 1))) >> (32 - width)).astype(jnp.float32).astype(result_dtype)
    return _float8(words >> (8 * index) if index else words, dtype).astype(result_dtype)


def _float8(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 of the 8-bit float in the lowest byte of each word, by integer arithmetic, which every generation has.

    The exponent and mantissa are moved to where float32 has its own, and the difference of the biases is a factor.
    Numbers too small for that (whose float32 would be denormal, which TPUs flush) are counted in units of the smallest
    one. NaN and infinity stay what they are.
    """
    mantissa, bias, special = (2, 15, 0x7C) if jnp.dtype(dtype) == jnp.float8_e5m2 else (3, 7, 0x7F)
    magnitude = words & jnp.uint32(0x7F)
    exponent = jnp.uint32((127 - bias) << 23)
    normal = pltpu.bitcast((magnitude << (23 - mantissa)) + exponent, jnp.float32)
    tiny = pltpu.bitcast(magnitude, jnp.int32).astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    value = jnp.where(magnitude < (1 << mantissa), tiny, normal)
    value = jnp.where(magnitude > special if mantissa == 2 else magnitude == special, jnp.nan, value)
    if mantissa == 2:
        value = jnp.where(magnitude == special, jnp.inf, value)
    sign = (words & jnp.uint32(0x80)) << 24
    return pltpu.bitcast(pltpu.bitcast(value, jnp.uint32) | sign, jnp.float32)


def keys_and_values(
    spec: PagedSpec, shape: Shape, refs: PagedRefs, slot: AnyArray, first: int, tokens: int, group: int | None
) -> list[tuple[jax.Array, jax.Array]]:
    """Keys `[tokens, D]` and values `[tokens, Dv]` of the heads of one group; of all groups together, their rows as
    `places` has them, for None.
    """
    k_ref, dtype = refs.k_buffer.at[slot], spec.compute_dtype
    stored = k_ref.dtype
    if spec.form == "latent":
        rows = k_ref[pl.ds(first, tokens), :].astype(dtype)
        return [(rows, rows[:, : spec.value_dim])]
    heads = heads_together(spec)
    if spec.form == "combined" and packing(stored) == 1:
        assert group is not None
        return [tuple(_words(k_ref, first, tokens, 2 * group + i).astype(dtype) for i in range(2))]  # type: ignore[list-item]
    words = _words(k_ref, first, tokens, group)
    if whole_words(spec, shape):
        return [tpu_unpack.keys_and_values(words, stored, shape.unpack)]
    if spec.form == "combined":
        return [(row_of(words, 2 * i, stored, dtype), row_of(words, 2 * i + 1, stored, dtype)) for i in range(heads)]
    values = _words(refs.v_buffer.at[slot], first, tokens, group)
    return [(row_of(words, i, stored, dtype), row_of(values, i, stored, dtype)) for i in range(heads)]


def attend_ahead(
    spec: PagedSpec,
    shape: Shape,
    refs: PagedRefs,
    slot: AnyArray,
    firsts: Iterable[int],
    chunk: int,
    scores: Callable[[int, int, int, int, jax.Array], jax.Array],
    weigh: Callable[[int, jax.Array, jax.Array], None],
) -> None:
    """Works on the chunks of a block that begin at the keys `firsts`, head by head: each one's products are issued
    before the softmax of the one before, which hides behind them.

    Args:
      scores: `scores(index of the block of rows, part, first, tokens, keys)`, the scaled logits.
      weigh: `weigh(index, logits, values)` adds them to the sums.
    """
    keys, group_size = shape.pages * spec.page_size, heads_together(spec)
    waiting: list[tuple[int, jax.Array, jax.Array]] = []
    for first in firsts:
        tokens = min(chunk, keys - first)
        for group in (None,) if shape.joint else range(spec.kv_heads // group_size):
            for part, (k, v) in enumerate(keys_and_values(spec, shape, refs, slot, first, tokens, group)):
                index = 0 if group is None else group * group_size + part
                waiting.append((index, scores(index, part, first, tokens, k), v))
                if len(waiting) > 1:
                    weigh(*waiting.pop(0))
    for block in waiting:
        weigh(*block)


def whole_words(spec: PagedSpec, shape: Shape) -> bool:
    """Whether the rows of both kv heads in a word are widened together, by `tpu_unpack`."""
    return shape.joint and spec.form == "combined" and shape.unpack != "shift"


def places(spec: PagedSpec, shape: Shape, part: int, tokens: int, width: int) -> tuple[jax.Array, AnyArray, int]:
    """(token, kv head, both `[rows, width]`, tokens per `width`) of the columns of scores of `tokens` keys; head None
    where all are of one.
    """
    column = lax.broadcasted_iota(jnp.int32, (shape.rows, width), 1)
    if not shape.joint:
        return column, None, width
    group_size = heads_together(spec)
    words = spec.kv_heads // group_size
    if whole_words(spec, shape):
        token, head = tpu_unpack.place(column, spec.operands.k_pages.dtype, words, tokens)
        return token, head, width // (group_size * words)
    return column >> (words.bit_length() - 1), (column & (words - 1)) * group_size + part, width // words
