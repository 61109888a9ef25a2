"""A block of keys and a short run of queries, decoding above all: scores stand as `[rows, keys]`, and the heads of a
block may be worked on together. `tpu_kernel` walks the blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import LANES
from vishwamai.core.types import AnyArray, Transfer
from vishwamai.ops.paged_attention import tpu_unpack
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu_refs import LN2, LOG2E, LOWEST, MASKED, PagedRefs, Shape, dot
from vishwamai.ops.paged_attention.tpu_words import attend_ahead, places, whole_words


class ShortRuns:
    """What an item of a short run does with its queries, its blocks of keys and its results."""

    def __init__(self, spec: PagedSpec, shape: Shape, refs: PagedRefs):
        self.spec, self.shape, self.refs = spec, shape, refs
        stored = spec.operands.k_pages.dtype
        self.stored_scale = tpu_unpack.scale(stored, shape.unpack) if whole_words(spec, shape) else 1.0

    def query_copies(self, item: AnyArray, slot: AnyArray) -> list[Transfer]:
        refs = self.refs
        copies = [(refs.query, refs.q_buffer)]  # the buffer has two slots: the next item's queries arrive meanwhile
        if refs.hidden is not None:
            copies.append((refs.hidden, refs.hidden_buffer))
        return [pltpu.make_async_copy(a.at[item], b.at[slot], refs.q_fetched.at[slot]) for a, b in copies]

    def begin(self, q_slot: AnyArray) -> None:
        del q_slot
        refs = self.refs
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if refs.sinks is None:
            refs.m[...] = jnp.full_like(refs.m, LOWEST)
            refs.l[...] = jnp.zeros_like(refs.l)
        else:
            sinks = jnp.broadcast_to(refs.sinks[...] * LOG2E, refs.m.shape)
            refs.m[...] = jnp.maximum(sinks, LOWEST)
            refs.l[...] = jnp.where(sinks > LOWEST, 1.0, 0.0)  # the sink's own term: exp2(sinks - m) = 1

    def attend(self, ahead: AnyArray, new: Any, slot: AnyArray, q_slot: AnyArray) -> None:
        """One block of keys.

        Args:
          ahead: position of the first query, counted from the block's first key: a key at `ahead` or less is seen by
            it, one more by every query after it; new: of the sequence's first new token, if there is a tree of them.
          slot: buffer of the block; q_slot: buffer of the queries.
        """
        refs = self.refs
        if refs.hidden is None:
            self._attend(False, ahead, new, slot, q_slot)
            return
        # New tokens, which the tree's mask concerns, may lie in this block.
        among = (new < self.shape.pages * self.spec.page_size) & (new + refs.hidden.shape[-1] > 0)
        for tree in (False, True):

            @pl.when(among if tree else jnp.logical_not(among))
            def _(tree: bool = tree) -> None:
                self._attend(tree, ahead, new, slot, q_slot)

    def _attend(self, tree: bool, ahead: AnyArray, new: Any, slot: AnyArray, q_slot: AnyArray) -> None:
        """`tree`: some keys are those of new tokens, of which the tree's mask hides some."""
        spec, shape, refs = self.spec, self.shape, self.refs
        keys = shape.pages * spec.page_size

        def scores(index: int, part: int, first: int, tokens: int, k: AnyArray) -> AnyArray:
            """Scaled logits `[rows, keys * words]`, in units of log2 e; those that are not seen are hugely negative."""
            s = dot(refs.q_buffer[q_slot, index], k, (1, 1))  # [rows, keys * words]
            scale = spec.scale * self.stored_scale * (LOG2E if spec.softcap is None else 1 / spec.softcap)
            if refs.k_scale is None:
                s = s * scale
            else:
                s = s * (refs.k_scale[...] * scale if shape.joint else refs.k_scale[index] * scale)
            if spec.softcap is not None:
                s = (spec.softcap * LOG2E) * jnp.tanh(s)  # the scale above was divided by the cap
            # Tile by tile of 128 columns, whose places within their tokens are the same.
            width = min(LANES, s.shape[1])
            token, head, step = places(spec, shape, part, tokens, width)
            if refs.row_query is not None:
                token = token - refs.row_query[...]  # of the row's query: later queries see more keys
            mine = None if head is None else head == refs.row_head[...]
            if tree:  # the same of the columns of the tree's mask, whose rows are the tree's columns here
                columns = refs.hidden_buffer.shape[-1]
                of_key, _, _ = places(spec, dataclasses.replace(shape, rows=columns), part, tokens, width)
                of_key = of_key - lax.broadcasted_iota(jnp.int32, of_key.shape, 0)
            tiles = []
            for t, start in enumerate(range(0, s.shape[1], width)):
                tile_width = min(width, s.shape[1] - start)  # 19 pages of 16 keys are no whole tiles
                limit = ahead - first - t * step
                x = s[:, start : start + tile_width]
                if refs.slopes is not None:
                    x = x - (refs.slopes[index] * LOG2E) * (limit - token[:, :tile_width]).astype(jnp.float32)
                see = token[:, :tile_width] <= limit
                if spec.window is not None:
                    see &= token[:, :tile_width] >= limit - spec.window
                if mine is not None:
                    see &= mine[:, :tile_width]
                if tree:  # each key's column of the mask, by a product with a matrix of zeros and ones
                    key = of_key[:, :tile_width] == new - (first + t * step)
                    key = jnp.where(key, 1.0, 0.0).astype(refs.hidden_buffer.dtype)  # [columns, here]
                    see &= dot(refs.hidden_buffer[q_slot], key, (1, 0)) < 0.5
                tiles.append(jnp.where(see, x, MASKED))
            return jnp.concatenate(tiles, axis=1)

        def weigh(index: int, s: AnyArray, v: AnyArray) -> None:
            m_old = refs.m[index]  # [rows, 128]
            m = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))  # [rows, 128], equal in all lanes
            p = jnp.exp2(s - m[:, :1])  # [rows, keys * words]
            shrink = jnp.exp2(m_old - m)  # [rows, 128]
            refs.m[index] = m
            refs.l[index] = refs.l[index] * shrink + jnp.sum(p, axis=1, keepdims=True)
            refs.acc[index] = refs.acc[index] * shrink[:, :1] + dot(p.astype(v.dtype), v, (1, 0))  # [rows, v_dim]

        attend_ahead(spec, shape, refs, slot, range(0, keys, shape.chunk), shape.chunk, scores, weigh)

    def finish(self, o_slot: AnyArray) -> None:
        """The results into the buffer from which they are stored."""
        spec, shape, refs = self.spec, self.shape, self.refs
        for h in range(refs.l.shape[0]):
            l = refs.l[h][:, :1]  # [rows, 1]
            out = refs.acc[h] / jnp.where(l > 0, l, 1.0)  # rows without a key give 0, not NaN
            if self.stored_scale != 1:
                out = out * self.stored_scale
            if refs.v_scale is not None:
                out = out * (refs.v_scale[...] if shape.joint else refs.v_scale[h])
            refs.o_buffer[o_slot, h] = out.astype(refs.o_buffer.dtype)
            if spec.return_lse:
                l = refs.l[h]  # [rows, 128]
                logsumexp = refs.m[h] * LN2 + jnp.log(jnp.where(l > 0, l, 1.0))  # m is in units of log2 e
                refs.lse_buffer[o_slot, h] = jnp.where(l > 0, logsumexp, -jnp.inf)

    def store(self, item: AnyArray, slot: AnyArray) -> None:
        for copy in self._store_copies(item, slot):
            copy.start()

    def wait_stored(self, item: AnyArray, slot: AnyArray) -> None:
        for copy in self._store_copies(item, slot):
            copy.wait()

    def _store_copies(self, item: AnyArray, slot: AnyArray) -> list[Transfer]:
        refs = self.refs
        copies = [(refs.o_buffer, refs.out, refs.stored)]
        if self.spec.return_lse:
            copies.append((refs.lse_buffer, refs.lse, refs.lse_stored))
        return [pltpu.make_async_copy(a.at[slot], b.at[item], semaphore.at[slot]) for a, b, semaphore in copies]
