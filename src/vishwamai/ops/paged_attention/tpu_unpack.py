"""8-bit and 4-bit rows of all heads of a page as bfloat16, by the chip's own conversions, where the heads of a token
are worked on together.

A word of 32 bits of a combined page holds four rows of one column, (k0, v0, k1, v1). The keys of two words make one
word, and so do their values: eight operations for two registers of 4096 numbers. A register of such words is then
converted at once; shifting each byte out and converting it takes 14 (int8) or 124 (8-bit floats).

Of int4 a word holds the four keys in its even nibbles and the four values in the odd ones. The upper nibble of a byte
whose lower one is 0 is 16 times its number, so three operations make a word of int8 keys and one of int8 values.

v5e, v5p and v6e convert float8_e4m3b11fnuz, not float8_e4m3fn. The two differ by a factor of 16 and by the codes of -0
and NaN (b11fnuz has one NaN, 0x80, and no -0), which are rewritten four at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.hardware import TpuChip
from vishwamai.core.qtensor import INT4

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_EVEN, _UPPER = 0x00FF00FF, 0xF0F0F0F0
_B11_SCALE = 16.0
"""A float8_e4m3fn over the float8_e4m3b11fnuz of the same code."""


def conversion(chip: TpuChip, dtype: DTypeLike) -> str:
    """How `chip` widens rows of `dtype`: "convert", "b11fnuz", or "shift" where it has no conversion of its own
    (v4).
    """
    if jnp.dtype(dtype).itemsize != 1 or not (chip.has_int8 or chip.has_fp8):
        return "shift"
    return "b11fnuz" if jnp.dtype(dtype) == _E4M3 and "float8_e4m3fn" not in chip.fp8_formats else "convert"


def scale(dtype: DTypeLike, how: str) -> float:
    """What the results of `keys_and_values` are to be multiplied by."""
    return 1 / 16 if jnp.dtype(dtype) == INT4 else _B11_SCALE if how == "b11fnuz" else 1.0


def keys_and_values(words: jax.Array, dtype: DTypeLike, how: str) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each `[2 N, D]` bfloat16 (of int4 `[4 N, D]`) over `scale`, of `words`, `[N, D]` uint32; `place`
    says which row is whose.
    """
    if jnp.dtype(dtype) == INT4:
        upper = jnp.uint32(_UPPER)
        return _widen((words << 4) & upper, jnp.int8, how), _widen(words & upper, jnp.int8, how)
    half = words.shape[0] // 2
    even, odd = jnp.uint32(_EVEN), jnp.uint32(_EVEN << 8)
    a, b = words[:half], words[half:]
    keys = (a & even) | ((b & even) << 8)
    values = ((a >> 8) & even) | (b & odd)
    return _widen(keys, dtype, how), _widen(values, dtype, how)


def _widen(words: jax.Array, dtype: DTypeLike, how: str) -> jax.Array:
    if how == "convert":
        return pltpu.bitcast(words, jnp.dtype(dtype)).astype(jnp.bfloat16)
    codes = pltpu.bitcast(words, jnp.int8)
    codes = jnp.where(codes == jnp.int8(-128), jnp.int8(0), codes)  # -0
    codes = jnp.where(codes & jnp.int8(127) == jnp.int8(127), jnp.int8(-128), codes)  # NaN
    return pltpu.bitcast(codes, jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)


def place(column: jax.Array, dtype: DTypeLike, words: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """(token, head) of row `column` of `keys_and_values`, of `tokens` tokens of `words` words each; columns of up to
    `32 // words` tokens.
    """
    shift = words.bit_length() - 1
    word = column >> 2
    if jnp.dtype(dtype) == INT4:
        return word >> shift, (word & (words - 1)) * 4 + (column & 3)
    return (word >> shift) + (column & 1) * (tokens // 2), (word & (words - 1)) * 2 + ((column >> 1) & 1)
