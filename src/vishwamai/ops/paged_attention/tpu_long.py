"""A block of keys and a long run of queries, of a prompt above all: scores stand as `[keys, rows]`, so that maxima and
sums run over sublanes and registers, not over lanes (as in `flash_attention`'s kernel). `tpu_kernel` walks the blocks.

Queries are read, and results written, as the caller's arrays have them, all heads of a token together. The rows of a kv
head are its query heads' queries, one head after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import LANES, round_up, sublanes
from vishwamai.core.types import AnyArray, Slice, Transfer
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu_refs import LN2, LOG2E, LOWEST, MASKED, PagedRefs, Shape, dot
from vishwamai.ops.paged_attention.tpu_words import attend_ahead, flat_words, packing, row_of

_EDGE_KEYS = 128
"""Keys of a step where some are hidden: those that no query sees are left out."""


def stored_heads(spec: PagedSpec) -> int:
    """Query heads, padded so that a token's rows fill whole tiles."""
    if spec.form == "latent":
        return round_up(spec.heads, sublanes(spec.compute_dtype))
    per_word = packing(spec.compute_dtype)
    words = -(-spec.heads // per_word)
    return per_word * (1 << (words - 1).bit_length() if words <= 4 else round_up(words, 8))


def whole_queries(spec: PagedSpec) -> int:
    """Queries of an item come in multiples of so many: rows of whole registers."""
    if spec.form == "latent":
        return LANES // math.gcd(LANES, stored_heads(spec))
    return max(sublanes(spec.compute_dtype), LANES // math.gcd(LANES, spec.group))


def rows(spec: PagedSpec, queries: int) -> int:
    """Rows of a kv head's block."""
    return queries * (stored_heads(spec) if spec.form == "latent" else spec.group)


def by_row(spec: PagedSpec, shape: Shape, values: jax.Array) -> jax.Array:
    """`[..., queries, Hq]` as `[..., kv heads, rows]`."""
    if spec.form == "latent":
        padding = [(0, 0)] * (values.ndim - 1) + [(0, shape.heads - spec.heads)]
        return jnp.pad(values, padding).reshape(*values.shape[:-2], 1, shape.rows)
    return jnp.moveaxis(values, -2, -1).reshape(*values.shape[:-2], spec.kv_heads, shape.rows)


def by_query(spec: PagedSpec, shape: Shape, x: jax.Array) -> jax.Array:
    """The inverse of `by_row`; padding falls away."""
    if spec.form == "latent":
        return x.reshape(*x.shape[:-2], shape.queries, shape.heads)[..., : spec.heads]
    return jnp.moveaxis(x.reshape(*x.shape[:-2], spec.heads, shape.queries), -2, -1)


class LongRuns:
    """What an item of a long run does with its queries, its blocks of keys and its results."""

    def __init__(self, spec: PagedSpec, shape: Shape, refs: PagedRefs):
        self.spec, self.shape, self.refs = spec, shape, refs

    def query_copies(self, item: AnyArray, slot: AnyArray) -> list[Transfer]:
        refs, read = self.refs, pl.ds(self.refs.token[item], self.shape.queries)
        copies = [(refs.query.at[read], refs.q_buffer)]
        if refs.hidden is not None:
            copies.append((refs.hidden.at[item], refs.hidden_buffer))
        return [pltpu.make_async_copy(a, b.at[slot], refs.q_fetched.at[slot]) for a, b in copies]

    def begin(self, q_slot: AnyArray) -> None:
        spec, shape, refs = self.spec, self.shape, self.refs
        refs.acc[...] = jnp.zeros_like(refs.acc)
        refs.l[...] = jnp.zeros_like(refs.l)
        if refs.sinks is None:
            refs.m[...] = jnp.full_like(refs.m, LOWEST)
        else:
            sinks = refs.sinks[...] * LOG2E
            refs.m[...] = jnp.maximum(sinks, LOWEST)
            refs.l[:, :1] = jnp.where(sinks > LOWEST, 1.0, 0.0)
        if spec.form == "latent":
            refs.q_rows[0] = refs.q_buffer[q_slot].reshape(shape.rows, spec.head_dim)
            return
        words, dtype = flat_words(refs.q_buffer.at[q_slot]), spec.compute_dtype
        per_word = packing(dtype)
        for h in range(spec.kv_heads):
            heads = range(h * spec.group, (h + 1) * spec.group)
            rows = [row_of(words[self._word(head), :], head % per_word, dtype, dtype) for head in heads]
            refs.q_rows[h] = jnp.concatenate(rows)

    def _word(self, head: int) -> Slice:
        """Where the words of a query head stand."""
        per_word = packing(self.spec.compute_dtype)
        stride = self.shape.heads // per_word
        return pl.ds(head // per_word, self.shape.queries, stride) if stride > 1 else pl.ds(0, self.shape.queries)

    def attend(self, ahead: AnyArray, new: Any, slot: AnyArray, q_slot: AnyArray) -> None:
        """See `ShortRuns.attend`."""
        spec, shape, refs = self.spec, self.shape, self.refs
        keys = shape.pages * spec.page_size
        unmasked = ahead >= keys - 1  # all queries see all keys
        if spec.window is not None:
            unmasked &= ahead + shape.queries - 1 <= spec.window
        among = jnp.bool_(False)
        if refs.hidden is not None:
            among = (new < keys) & (new + refs.hidden.shape[-1] > 0)
            unmasked &= jnp.logical_not(among)

        @pl.when(unmasked)
        def _() -> None:
            self._attend(range(0, keys, shape.chunk), shape.chunk, False, False, ahead, new, slot, q_slot)

        edge = min(shape.chunk, _EDGE_KEYS)
        for tree in (False, True) if refs.hidden is not None else (False,):
            for first in range(0, keys, edge):

                @pl.when(jnp.logical_not(unmasked) & (among == tree) & (first < ahead + shape.queries))
                def _(tree: bool = tree, first: int = first) -> None:
                    self._attend((first,), edge, True, tree, ahead, new, slot, q_slot)

    def _attend(
        self,
        firsts: Iterable[int],
        chunk: int,
        masked: bool,
        tree: bool,
        ahead: AnyArray,
        new: Any,
        slot: AnyArray,
        q_slot: AnyArray,
    ) -> None:
        """Some chunks of a block's keys; `masked`: some queries do not see some of them; `tree`: some are those of new
        tokens, of which the tree's mask hides some.
        """
        spec, shape, refs = self.spec, self.shape, self.refs

        def scores(index: int, part: int, first: int, tokens: int, k: AnyArray) -> AnyArray:
            """Scaled logits `[keys, rows]`, in units of log2 e; those that are not seen are hugely negative."""
            del part, tokens
            s = dot(k, refs.q_rows[index], (1, 1))
            scale = spec.scale * (LOG2E if spec.softcap is None else 1 / spec.softcap)
            s = s * (scale if refs.k_scale is None else refs.k_scale[index] * scale)
            if spec.softcap is not None:
                s = (spec.softcap * LOG2E) * jnp.tanh(s)
            if not masked and refs.slopes is None:
                return s
            limit = ahead - first
            token = lax.broadcasted_iota(jnp.int32, s.shape, 0) - refs.row_query[...]  # [keys, rows]
            if refs.slopes is not None:
                s = s - (refs.slopes[index] * LOG2E) * (limit - token).astype(jnp.float32)
            if not masked:
                return s
            see = token <= limit
            if spec.window is not None:
                see &= token >= limit - spec.window
            if tree:  # each key's column of the mask, by a product with a matrix of zeros and ones
                columns = refs.hidden_buffer.shape[-1]
                tile_shape = (s.shape[0], columns)
                key = lax.broadcasted_iota(jnp.int32, tile_shape, 0) - lax.broadcasted_iota(jnp.int32, tile_shape, 1)
                key = jnp.where(key == new - first, 1.0, 0.0).astype(refs.hidden_buffer.dtype)
                see &= dot(key, refs.hidden_buffer[q_slot], (1, 1)) < 0.5
            return jnp.where(see, s, MASKED)

        def weigh(index: int, s: AnyArray, v: AnyArray) -> None:
            m_old = refs.m[index]  # [1, rows]
            m = jnp.maximum(m_old, jnp.max(_tiles(s, jnp.max), axis=0, keepdims=True))
            p = jnp.exp2(s - m)  # [keys, rows]
            shrink = jnp.exp2(m_old - m)  # [1, rows]
            refs.m[index] = m
            refs.l[index] = refs.l[index] * shrink + _tiles(p, jnp.sum)  # [8, rows]: partial sums by sublane
            v_t = v.astype(jnp.float32).T.astype(v.dtype)  # whose float32 tiles the hardware transposes
            refs.acc[index] = refs.acc[index] * shrink + dot(v_t, p.astype(v.dtype), (1, 0))  # [Dv, rows]

        attend_ahead(spec, shape, refs, slot, firsts, chunk, scores, weigh)

    def finish(self, o_slot: AnyArray) -> None:
        """The results into the buffer from which they are stored."""
        spec, shape, refs = self.spec, self.shape, self.refs
        heads: list[jax.Array] = []  # [queries, Dv] float32 each
        for h in range(spec.kv_heads):
            l = jnp.sum(refs.l[h], axis=0, keepdims=True)  # [1, rows]
            out = refs.acc[h] / jnp.where(l > 0, l, 1.0)
            if refs.v_scale is not None:
                out = out * refs.v_scale[h]
            out = out.T  # [rows, Dv]
            if spec.return_lse:
                logsumexp = refs.m[h] * LN2 + jnp.log(jnp.where(l > 0, l, 1.0))
                refs.lse_buffer[o_slot, pl.ds(h, 1)] = jnp.where(l > 0, logsumexp, -jnp.inf)
            if spec.form == "latent":
                out = out.astype(refs.o_buffer.dtype)
                refs.o_buffer[o_slot] = out.reshape(shape.queries, shape.heads, spec.value_dim)
                return
            heads += [out[g * shape.queries : (g + 1) * shape.queries] for g in range(spec.group)]
        words = flat_words(refs.o_buffer.at[o_slot])
        if packing(spec.compute_dtype) == 1:
            for head, out in enumerate(heads):
                words[self._word(head), :] = out
            return
        for head in range(0, spec.heads, 2):
            low, high = heads[head], heads[head + 1] if head + 1 < spec.heads else jnp.zeros_like(heads[head])
            words[self._word(head), :] = _bits(low) >> 16 | _bits(high)  # two heads' bfloat16 share a 32-bit word

    def store(self, item: AnyArray, slot: AnyArray) -> None:
        self._results(item, slot, lambda copy: copy.start())

    def wait_stored(self, item: AnyArray, slot: AnyArray) -> None:
        self._results(item, slot, lambda copy: copy.wait())

    def _results(self, item: AnyArray, slot: AnyArray, act: Callable[[Transfer], None]) -> None:
        """Acts on the copies of an item's results: one of whole items, else one for each of its tokens, for what stands
        next to them is others'.
        """
        refs, queries = self.refs, self.shape.queries
        token, skip, count = refs.token[item], refs.skip[item], refs.count[item]
        copy = functools.partial(pltpu.make_async_copy, sem=refs.stored.at[slot])

        @pl.when(count == queries)
        def _() -> None:
            act(copy(refs.o_buffer.at[slot], refs.out.at[pl.ds(token, queries)]))

        @pl.when(count < queries)
        def _() -> None:
            def store_query(i: AnyArray, carry: None) -> None:
                act(copy(refs.o_buffer.at[slot, i], refs.out.at[token + i]))

            lax.fori_loop(skip, skip + count, store_query, None)

        if self.spec.return_lse:
            act(pltpu.make_async_copy(refs.lse_buffer.at[slot], refs.lse.at[item], refs.lse_stored.at[slot]))


def _tiles(x: jax.Array, over: Any) -> jax.Array:
    """`over` of the tiles of 8 rows, `[8, columns]`; of less than a tile, of its rows, in the first of 8 rows."""
    if x.shape[0] % 8 == 0:
        return over(x.reshape(-1, 8, x.shape[1]), axis=0)
    reduced = over(x, axis=0, keepdims=True)
    return jnp.where(
        lax.broadcasted_iota(jnp.int32, (8, x.shape[1]), 0) == 0, reduced, 0.0 if over is jnp.sum else reduced
    )


def _bits(x: jax.Array) -> jax.Array:
    """Float32 numbers rounded to bfloat16, in the upper half of 32 bits."""
    return pltpu.bitcast(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
