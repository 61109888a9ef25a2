"""The kernel body: a walk over items and blocks of pages, fetched ahead from HBM while the block before is worked on.

`tpu_short` and `tpu_long` work on a block, by the online softmax of Dao et al., "FlashAttention-2" (2023); `tpu_words`
reads its rows.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.types import AnyArray, PyTree, Ref, Transfer
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu_long import LongRuns
from vishwamai.ops.paged_attention.tpu_refs import PagedRefs, Shape
from vishwamai.ops.paged_attention.tpu_short import ShortRuns
from vishwamai.ops.paged_attention.tpu_words import flat_words, packing

TOGETHER = (16, 4, 1)
"""Pages of a block that is not full whose copies are started without a branch between them: the first as often as it
goes, then the next.
"""


def kernel(spec: PagedSpec, shape: Shape, **by_name: Ref) -> None:
    """The body over a grid of cores, each with its share of the items; `by_name`: the `PagedRefs`."""
    refs = PagedRefs(**by_name)
    core = pl.program_id(0)
    low, high = refs.bounds[core], refs.bounds[core + 1]  # items of this core
    page, keys = spec.page_size, shape.pages * spec.page_size
    runs = LongRuns(spec, shape, refs) if shape.long else ShortRuns(spec, shape, refs)
    pools = [(refs.k_pages, refs.k_buffer), *([(refs.v_pages, refs.v_buffer)] if refs.v_pages is not None else [])]

    def blocks_of(item: AnyArray) -> AnyArray:
        """Blocks of pages of an item; one at least, so that an item that sees nothing is written too."""
        return jnp.maximum(pl.cdiv(refs.end[item] - refs.first_page[item] * page, keys), 1)

    def live_pages(item: AnyArray, block: AnyArray) -> tuple[AnyArray, AnyArray]:
        """(first entry of the page table, number of pages) of a block."""
        entry = refs.first_page[item] + block * shape.pages
        return entry, jnp.clip(pl.cdiv(refs.end[item], page) - entry, 0, shape.pages)

    def fetch(item: AnyArray, block: AnyArray, slot: AnyArray) -> None:
        entry, count = live_pages(item, block)
        row = refs.sequence[item] * spec.pages_per_sequence

        def start(first: AnyArray, pages: int) -> None:
            for i in range(pages):
                index = refs.table[row + entry + first + i]
                for pool, buffer in pools:
                    into = buffer.at[slot, pl.ds(pl.multiple_of((first + i) * page, page), page)]
                    pltpu.make_async_copy(pool.at[index], into, refs.fetched.at[slot]).start()

        @pl.when(count == shape.pages)
        def _() -> None:
            lax.fori_loop(0, shape.pages, lambda i, _: start(i, 1), None, unroll=min(shape.pages, TOGETHER[0]))

        @pl.when(count < shape.pages)
        def _() -> None:
            begin = jnp.int32(0)
            for pages in TOGETHER:
                steps = lax.div(count - begin, pages)
                lax.fori_loop(0, steps, lambda i, _, begin=begin, pages=pages: start(begin + i * pages, pages), None)
                begin += steps * pages

        @pl.when(block == 0)
        def _() -> None:
            for copy in query_copies(item):
                copy.start()

    def wait(item: AnyArray, block: AnyArray, slot: AnyArray) -> None:
        _, count = live_pages(item, block)

        @pl.when(count == shape.pages)
        def _() -> None:
            for _, buffer in pools:  # one wait for the bytes of all pages
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], refs.fetched.at[slot]).wait()

        @pl.when(count < shape.pages)
        def _() -> None:
            # A semaphore counts bytes: pages are awaited by the powers of two that make up their number.
            for bit in range((shape.pages - 1).bit_length()):

                @pl.when((count >> bit) & 1 == 1)
                def _(tokens: int = page << bit) -> None:
                    for _, buffer in pools:
                        some = buffer.at[slot, pl.ds(0, tokens)]
                        pltpu.make_async_copy(some, some, refs.fetched.at[slot]).wait()

    def clear_tail(item: AnyArray, block: AnyArray, slot: AnyArray) -> None:
        """Keys past the item's end become 0: what an older block or the caller's unused rows left there may be NaN,
        which no weight of 0 takes away.
        """
        live = refs.end[item] - (refs.first_page[item] + block * shape.pages) * page

        @pl.when(live < keys)
        def _() -> None:
            for _, buffer in pools:
                _clear(buffer.at[slot], jnp.maximum(live, 0))

    def attend(item: AnyArray, block: AnyArray, slot: AnyArray, q_slot: AnyArray) -> None:
        first_key = (refs.first_page[item] + block * shape.pages) * page
        new = None if refs.hidden is None else refs.first_new[item] - first_key
        runs.attend(refs.position[item] - first_key, new, slot, q_slot)

    def query_copies(item: AnyArray) -> list[Transfer]:
        return runs.query_copies(item, lax.rem(item - low, shape.slots))

    def wait_stored(item: AnyArray) -> None:
        runs.wait_stored(item, lax.rem(item - low, 2))

    def finish(item: AnyArray) -> None:
        @pl.when(item - low >= 2)
        def _() -> None:
            # Results leave from two buffers in turn.
            wait_stored(item - 2)

        runs.finish(lax.rem(item - low, 2))
        runs.store(item, lax.rem(item - low, 2))

    def fetch_next(state: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Starts the fetch that `state` (item, block, slot) names, if there is one, and returns the state after it."""
        item, block, slot = state

        @pl.when(item < high)
        def _() -> None:
            fetch(item, block, slot)

        # Past the last item nothing is fetched, but its entry is still read.
        last = block + 1 >= blocks_of(jnp.minimum(item, refs.end.shape[0] - 1))
        following = jnp.where(slot + 1 == shape.slots, 0, slot + 1)
        return jnp.where(last, item + 1, item), jnp.where(last, 0, block + 1), following

    state = (low, jnp.int32(0), jnp.int32(0))
    # Fetches run slots - 1 blocks ahead, over the ends of items, too.
    for _ in range(shape.slots - 1):
        state = fetch_next(state)

    def walk_item(item: AnyArray, carry: PyTree) -> PyTree:
        query_slot = lax.rem(item - low, shape.slots)
        for copy in query_copies(item):
            copy.wait()
        runs.begin(query_slot)

        def walk_block(block: AnyArray, carry: PyTree) -> PyTree:
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


def _clear(ref: Ref, live: AnyArray) -> None:
    """Zeroes the tokens from `live` on; ref: `[tokens, rows, D]` or `[tokens, D]`."""
    tile = 8 * packing(ref.dtype)
    if len(ref.shape) == 3:  # as words, of many tokens at once
        live *= ref.shape[1] // packing(ref.dtype)
        ref = flat_words(ref)
        tile = math.gcd(ref.shape[0], 64)

    def one_tile(i: AnyArray, carry: None) -> None:
        some = pl.ds(pl.multiple_of(i * tile, tile), tile)
        row = i * tile + lax.broadcasted_iota(jnp.int32, (tile, ref.shape[1]), 0)
        ref[some] = jnp.where(row < live, ref[some], jnp.zeros((), ref.dtype))
        return carry

    lax.fori_loop(lax.div(live, tile), ref.shape[0] // tile, one_tile, None)  # `//` asks for the chip's generation
