"""The kernel body: a walk over items and blocks of pages, fetched ahead from HBM while the block before is worked on.

After Dao et al., "FlashAttention-2" (2023) for the online softmax. `tpu_words` reads the rows of a block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import LANES
from vishwamai.core.precision import lax_precision
from vishwamai.ops.paged_attention import tpu_unpack
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu_refs import PagedRefs, Shape
from vishwamai.ops.paged_attention.tpu_words import heads_together, keys_and_values, packing, places, whole_words

LOWEST = -1e30
"""Where the running maximum starts: below any logit, above the masked ones."""
MASKED = -2e38
_LOG2E, _LN2 = math.log2(math.e), math.log(2)


def kernel(spec: PagedSpec, shape: Shape, **by_name: Any) -> None:
    """The body over a grid of cores, each with its share of the items; `by_name`: the `PagedRefs`."""
    refs = PagedRefs(**by_name)
    core = pl.program_id(0)
    low, high = refs.bounds[core], refs.bounds[core + 1]
    page, keys = spec.page_size, shape.pages * spec.page_size
    pools = [(refs.k_pages, refs.k_buffer), *([(refs.v_pages, refs.v_buffer)] if refs.v_pages is not None else [])]

    def blocks_of(item: Any) -> Any:
        """Blocks of pages of an item; one at least, so that an item that sees nothing is written too."""
        return jnp.maximum(pl.cdiv(refs.end[item] - refs.first_page[item] * page, keys), 1)

    def live_pages(item: Any, block: Any) -> tuple[Any, Any]:
        """(first entry of the page table, number of pages) of a block."""
        entry = refs.first_page[item] + block * shape.pages
        return entry, jnp.clip(pl.cdiv(refs.end[item], page) - entry, 0, shape.pages)

    def page_copy(pool: Any, buffer: Any, index: Any, slot: Any, i: Any) -> Any:
        into = buffer.at[slot, pl.ds(pl.multiple_of(i * page, page), page)]
        return pltpu.make_async_copy(pool.at[index], into, refs.fetched.at[slot])

    def fetch(item: Any, block: Any, slot: Any) -> None:
        entry, count = live_pages(item, block)
        row = refs.sequence[item] * spec.pages_per_sequence

        def start(i: Any, carry: Any) -> Any:
            index = refs.table[row + entry + i]
            for pool, buffer in pools:
                page_copy(pool, buffer, index, slot, i).start()
            return carry

        @pl.when(count == shape.pages)
        def _() -> None:
            lax.fori_loop(0, shape.pages, start, None, unroll=min(shape.pages, 16))

        @pl.when(count < shape.pages)
        def _() -> None:
            lax.fori_loop(0, count, start, None)

        @pl.when(block == 0)
        def _() -> None:
            for copy in query_copies(item):
                copy.start()

    def query_copies(item: Any) -> list[Any]:
        slot = lax.rem(item - low, shape.slots)
        copies = [(refs.query, refs.q_buffer)]
        if refs.hidden is not None:
            copies.append((refs.hidden, refs.hidden_buffer))
        return [pltpu.make_async_copy(a.at[item], b.at[slot], refs.q_fetched.at[slot]) for a, b in copies]

    def wait(item: Any, block: Any, slot: Any) -> None:
        _, count = live_pages(item, block)

        @pl.when(count == shape.pages)
        def _() -> None:
            for _, buffer in pools:  # one wait for the bytes of all pages
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], refs.fetched.at[slot]).wait()

        @pl.when(count < shape.pages)
        def _() -> None:
            def one(i: Any, carry: Any) -> Any:
                for pool, buffer in pools:
                    page_copy(pool, buffer, 0, slot, i).wait()
                return carry

            lax.fori_loop(0, count, one, None)

    def clear_tail(item: Any, block: Any, slot: Any) -> None:
        """Keys past the item's end become 0: what an older block or the caller's unused rows left there may be NaN,
        which no weight of 0 takes away.
        """
        live = refs.end[item] - (refs.first_page[item] + block * shape.pages) * page

        @pl.when(live < keys)
        def _() -> None:
            for _, buffer in pools:
                _clear(buffer.at[slot], jnp.maximum(live, 0))

    def store_copies(item: Any) -> list[Any]:
        slot = lax.rem(item - low, 2)
        copies = [(refs.o_buffer, refs.out, refs.stored)]
        if spec.return_lse:
            copies.append((refs.lse_buffer, refs.lse, refs.lse_stored))
        return [pltpu.make_async_copy(a.at[slot], b.at[item], semaphore.at[slot]) for a, b, semaphore in copies]

    def wait_stored(item: Any) -> None:
        for copy in store_copies(item):
            copy.wait()

    def begin() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if refs.sinks is None:
            refs.m[...] = jnp.full_like(refs.m, LOWEST)
            refs.l[...] = jnp.zeros_like(refs.l)
        else:
            sinks = jnp.broadcast_to(refs.sinks[...] * _LOG2E, refs.m.shape)
            refs.m[...] = jnp.maximum(sinks, LOWEST)
            refs.l[...] = jnp.where(sinks > LOWEST, 1.0, 0.0)

    stored_scale = tpu_unpack.B11_SCALE if whole_words(spec, shape) and shape.unpack == "b11fnuz" else 1.0
    precision = lax_precision("highest") if spec.compute_dtype == jnp.float32 else None

    def dot(a: Any, b: Any, dims: Any) -> Any:
        return lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def attend(item: Any, block: Any, slot: Any, q_slot: Any) -> None:
        if refs.hidden is None:
            attend_block(item, block, slot, q_slot, False)
            return
        first_key = (refs.first_page[item] + block * shape.pages) * page
        among = (first_key + keys > refs.first_new[item]) & (first_key < refs.first_new[item] + refs.hidden.shape[-1])
        for tree in (False, True):

            @pl.when(among if tree else jnp.logical_not(among))
            def _(tree: bool = tree) -> None:
                attend_block(item, block, slot, q_slot, tree)

    def attend_block(item: Any, block: Any, slot: Any, q_slot: Any, tree: bool) -> None:
        """One block of keys; `tree`: some of them are those of new tokens, of which the tree's mask hides some."""
        first_key = (refs.first_page[item] + block * shape.pages) * page
        # Relative to the first query's position: a key at `ahead` or less is seen by it, one more by every query after
        # it.
        ahead = refs.position[item] - first_key
        together = heads_together(spec)

        def scores(index: Any, part: int, first: int, tokens: int, k: Any) -> Any:
            """Scaled logits `[rows, keys * words]`, in units of log2 e; those that are not seen are hugely negative."""
            s = dot(refs.q_buffer[q_slot, index], k, ((1,), (1,)))  # [rows, keys * words]
            scale = spec.scale * stored_scale * (_LOG2E if spec.softcap is None else 1 / spec.softcap)
            if refs.k_scale is None:
                s = s * scale
            else:
                s = s * (refs.k_scale[...] * scale if shape.joint else refs.k_scale[index] * scale)
            if spec.softcap is not None:
                s = (spec.softcap * _LOG2E) * jnp.tanh(s)
            # Tile by tile of 128 columns, whose places within their tokens are the same.
            width = min(LANES, s.shape[1])
            token, head, step = places(spec, shape, part, tokens, width)
            if refs.row_query is not None:
                token = token - refs.row_query[...]
            mine = None if head is None else head == refs.row_head[...]
            if tree:  # the same of the columns of the tree's mask, whose rows are the tree's columns here
                columns = refs.hidden_buffer.shape[-1]
                of_key, _, _ = places(spec, dataclasses.replace(shape, rows=columns), part, tokens, width)
                of_key = of_key - lax.broadcasted_iota(jnp.int32, of_key.shape, 0)
            tiles = []
            for t, start in enumerate(range(0, s.shape[1], width)):
                here = min(width, s.shape[1] - start)  # 19 pages of 16 keys are no whole tiles
                limit = ahead - first - t * step
                x = s[:, start : start + here]
                if refs.slopes is not None:
                    x = x - (refs.slopes[index] * _LOG2E) * (limit - token[:, :here]).astype(jnp.float32)
                see = token[:, :here] <= limit
                if spec.window is not None:
                    see &= token[:, :here] >= limit - spec.window
                if mine is not None:
                    see &= mine[:, :here]
                if tree:  # each key's column of the mask, by a product with a matrix of zeros and ones
                    key = of_key[:, :here] == refs.first_new[item] - (first_key + first + t * step)
                    key = jnp.where(key, 1.0, 0.0).astype(refs.hidden_buffer.dtype)  # [columns, here]
                    hidden = jnp.dot(refs.hidden_buffer[q_slot], key, preferred_element_type=jnp.float32)
                    see &= hidden < 0.5
                tiles.append(jnp.where(see, x, MASKED))
            return jnp.concatenate(tiles, axis=1)

        def weigh(index: Any, s: Any, v: Any) -> None:
            m_old = refs.m[index]  # [rows, 128]
            m = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp2(s - m[:, :1])  # [rows, keys * words]
            shrink = jnp.exp2(m_old - m)  # [rows, 128]
            refs.m[index] = m
            refs.l[index] = refs.l[index] * shrink + jnp.sum(p, axis=1, keepdims=True)
            refs.acc[index] = refs.acc[index] * shrink[:, :1] + dot(p.astype(v.dtype), v, ((1,), (0,)))

        # The next step's products are issued before this one's softmax, which hides behind them.
        waiting: list[tuple[Any, Any, Any]] = []
        for first in range(0, keys, shape.chunk):
            tokens = min(shape.chunk, keys - first)
            for group in (None,) if shape.joint else range(spec.kv_heads // together):
                for part, (k, v) in enumerate(keys_and_values(spec, shape, refs, slot, first, tokens, group)):
                    index = 0 if group is None else group * together + part
                    waiting.append((index, scores(index, part, first, tokens, k), v))
                    if len(waiting) > 1:
                        weigh(*waiting.pop(0))
        for each in waiting:
            weigh(*each)

    def finish(item: Any) -> None:
        @pl.when(item - low >= 2)
        def _() -> None:
            wait_stored(item - 2)

        for h in range(refs.l.shape[0]):
            l = refs.l[h][:, :1]
            out = refs.acc[h] / jnp.where(l > 0, l, 1.0)
            if stored_scale != 1:
                out = out * stored_scale
            if refs.v_scale is not None:
                out = out * (refs.v_scale[...] if shape.joint else refs.v_scale[h])
            refs.o_buffer[lax.rem(item - low, 2), h] = out.astype(refs.o_buffer.dtype)
            if spec.return_lse:
                l = refs.l[h]  # [rows, 128]
                logsumexp = refs.m[h] * _LN2 + jnp.log(jnp.where(l > 0, l, 1.0))
                refs.lse_buffer[lax.rem(item - low, 2), h] = jnp.where(l > 0, logsumexp, -jnp.inf)
        for copy in store_copies(item):
            copy.start()

    def fetch_next(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Starts the fetch that `state` (item, block, slot) names, if there is one, and returns the state after it."""
        item, block, slot = state

        @pl.when(item < high)
        def _() -> None:
            fetch(item, block, slot)

        last = block + 1 >= blocks_of(jnp.minimum(item, refs.end.shape[0] - 1))
        following = jnp.where(slot + 1 == shape.slots, 0, slot + 1)
        return jnp.where(last, item + 1, item), jnp.where(last, 0, block + 1), following

    state = (low, jnp.int32(0), jnp.int32(0))
    for _ in range(shape.slots - 1):
        state = fetch_next(state)

    def walk_item(item: Any, carry: Any) -> Any:
        query_slot = lax.rem(item - low, shape.slots)
        for copy in query_copies(item):
            copy.wait()
        begin()

        def walk_block(block: Any, carry: Any) -> Any:
            slot, state = carry
            state = fetch_next(state)
            wait(item, block, slot)
            clear_tail(item, block, slot)
            attend(item, block, slot, query_slot)
            return jnp.where(slot + 1 == shape.slots, 0, slot + 1), state

        carry = lax.fori_loop(0, blocks_of(item), walk_block, carry)
        finish(item)
        return carry

    lax.fori_loop(low, high, walk_item, (jnp.int32(0), state))

    def drain(back: int) -> None:
        @pl.when(high - low >= back)
        def _() -> None:
            wait_stored(high - back)

    drain(1)
    drain(2)


def _clear(ref: Any, live: Any) -> None:
    """Zeroes the tokens from `live` on; ref: `[tokens, rows, D]` or `[tokens, D]`."""
    tokens = ref.shape[0]
    if len(ref.shape) == 3:

        def one(t: Any, carry: Any) -> Any:
            ref[t] = jnp.zeros(ref.shape[1:], ref.dtype)
            return carry

        lax.fori_loop(live, tokens, one, None)
        return
    tile = 8 * packing(ref.dtype)

    def one_tile(i: Any, carry: Any) -> Any:
        some = pl.ds(pl.multiple_of(i * tile, tile), tile)
        row = i * tile + lax.broadcasted_iota(jnp.int32, (tile, ref.shape[1]), 0)
        ref[some] = jnp.where(row < live, ref[some], jnp.zeros((), ref.dtype))
        return carry

    lax.fori_loop(live // tile, tokens // tile, one_tile, None)
