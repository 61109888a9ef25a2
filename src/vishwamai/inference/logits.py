"""Logits of the tokens that may be drawn: penalties, temperature, and the thresholds of top-k, top-p and min-p.

No vocab is sorted: a row's threshold is found by bisection over the 32 bits of a float, exact, with as many comparisons
for a vocab of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array

    from vishwamai.inference.sampling import Rows


def penalized(logits: Array, rows: Rows, history: Array) -> Array:
    count, vocab = logits.shape
    slots, length = history.shape
    tokens = history[jnp.clip(rows.slot, 0, slots - 1)]  # [rows, length]
    place = jnp.arange(length)
    seen = place < rows.position[:, None]
    answer = seen & (place >= rows.prompt_length[:, None])
    index = jnp.arange(count)[:, None]
    ever = jnp.zeros((count, vocab), bool).at[index, jnp.where(seen, tokens, vocab)].set(True, mode="drop")
    often = jnp.zeros((count, vocab), jnp.int32).at[index, jnp.where(answer, tokens, vocab)].add(1, mode="drop")
    factor = rows.repetition[:, None]
    logits = jnp.where(ever, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - rows.presence[:, None] * (often > 0) - rows.frequency[:, None] * often


def shaped(logits: Array, rows: Rows) -> Array:
    """Logits of the distribution that is drawn from: after temperature, top-k, top-p and min-p."""
    # The largest is 0 at every temperature: 1e-37 must not make it infinite.
    x = logits - jnp.max(logits, axis=1, keepdims=True)
    x = x / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    x = _limited(x, rows)
    least = jnp.max(x, axis=1) + jnp.log(rows.min_p)  # -inf for min_p of 0
    return jnp.where(x >= least[:, None], x, -jnp.inf)


def _limited(x: Array, rows: Rows) -> Array:
    """Keeps the logits of top-k, and of these those of top-p."""
    vocab = x.shape[1]
    ordered = _ordered(x)
    count = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)

    def largest(x: Array) -> Array:
        # A sum of float32 ones is exact below 2^24, and faster on a CPU than one of integers.
        border = _largest(lambda t: jnp.sum(ordered >= t[:, None], axis=1, dtype=jnp.float32) >= count, x.shape[0])
        return jnp.where(ordered >= border[:, None], x, -jnp.inf)

    def likely(x: Array) -> Array:
        probability = jax.nn.softmax(x, axis=1)
        # All of them where top_p is 1: a sum of rounded probabilities may stay below it.
        mass = jnp.where(rows.top_p < 1, rows.top_p, -1.0)

        def enough(t: Array) -> Array:
            return jnp.sum(jnp.where(ordered >= t[:, None], probability, 0.0), axis=1) >= mass

        border = _largest(enough, x.shape[0])
        return jnp.where((ordered >= border[:, None]) | (rows.top_p >= 1)[:, None], x, -jnp.inf)

    x = lax.cond(jnp.any(count < vocab), largest, lambda x: x, x)
    return lax.cond(jnp.any(rows.top_p < 1), likely, lambda x: x, x)


def argmax(x: Array) -> Array:
    """`argmax` of each row, int32. XLA computes it for a CPU one number at a time, and a maximum many at a time, so
    there it is the place of the first maximum.
    """

    def first_maximum(x: Array) -> Array:
        place = jnp.arange(x.shape[1], dtype=jnp.int32)
        places = jnp.where(x == jnp.max(x, axis=1, keepdims=True), place, x.shape[1] - 1)
        return jnp.min(places, axis=1)

    return lax.platform_dependent(x, cpu=first_maximum, default=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32))


def _ordered(x: Array) -> Array:
    """float32 as uint32 of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest uint32 of each row for which `holds`, which holds for 0 and, past some number, no longer.

    A turn finds two bits: it compares three numbers with one reading of the logits, and accelerators wait for the
    reading. A CPU waits for the comparisons, so it finds one.
    """

    def largest_prefix(bits: int) -> Array:
        def turn(i: Array, prefix: Array) -> Array:
            shift = (32 - bits * (i + 1)).astype(jnp.uint32)
            passed = [holds(prefix | (jnp.uint32(value) << shift)) for value in range(1, 1 << bits)]
            return prefix | (sum(passes.astype(jnp.uint32) for passes in passed) << shift)

        return lax.fori_loop(0, 32 // bits, turn, jnp.zeros(rows, jnp.uint32))

    return lax.platform_dependent(cpu=lambda: largest_prefix(1), default=lambda: largest_prefix(2))
