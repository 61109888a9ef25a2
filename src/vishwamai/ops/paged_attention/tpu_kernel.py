"""The kernel body: a walk over items and blocks of pages, fetched ahead from HBM while the block before is worked on.

Keys and values lie in a page as [page, rows, D] with all heads of a token together. Rows of a head are read with a stride, as 32-bit words: a word holds a
column of two bfloat16 (or four 8-bit) rows, which shifts take apart. After Dao et al., "FlashAttention-2" (2023) for the online softmax.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.precision import lax_precision
from vishwamai.ops.paged_attention import tpu_unpack
from vishwamai.ops.paged_attention.spec import PagedSpec

LANES = 128
LOWEST = -1e30
"""Where the running maximum starts: below any logit, above the masked ones."""
MASKED = -2e38
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one kernel call.

    Attributes:
      queries: queries of an item; rows: rows of an item's block, queries times group, padded.
      pages: pages of a block; slots: blocks in VMEM, being fetched or read.
      joint: all heads are worked on together, in one tall block of `rows` (else `rows` are those of one kv head).
      chunk: keys whose scores are held at once.
      unpack: how rows narrower than the query are widened where heads are worked on together; see `tpu_unpack`.
    """

    queries: int
    rows: int
    pages: int
    slots: int
    joint: bool
    chunk: int
    unpack: str = "shift"


class Refs:
    """The kernel's references by name; absent ones are None."""

    def __init__(self, names: list[str], refs: tuple[Any, ...]):
        self.__dict__.update(dict.fromkeys(NAMES), **dict(zip(names, refs, strict=True)))

    def __getattr__(self, name: str) -> Any:  # for the type checker; every name is in __dict__
        raise AttributeError(name)


NAMES = (
    # prefetched scalars
    "bounds", "sequence", "position", "first_page", "end", "table",
    # operands
    "query", "k_pages", "v_pages", "sinks", "row_query", "row_head", "k_scale", "v_scale",
    # result
    "out",
    # scratch
    "q_buffer", "k_buffer", "v_buffer", "o_buffer", "m", "l", "acc", "fetched", "q_fetched", "stored",
)  # fmt: skip


def packing(dtype: Any) -> int:
    """Rows in a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def heads_together(spec: PagedSpec) -> int:
    """Kv heads whose rows share words, which are read together."""
    if spec.form == "latent":
        return 1
    each = packing(spec.operands.k_pages.dtype)
    return max(1, each // 2) if spec.form == "combined" else each


def _words(ref: Any, first: int, tokens: int, word: int | None) -> jax.Array:
    """32-bit words of `tokens` tokens from `first` on: word `word` of each, `[tokens, D]`, or with None all of them, `[tokens * words, D]`."""
    all_tokens, rows, dim = ref.shape
    each = packing(ref.dtype)
    flat = ref.reshape(all_tokens * rows, dim)
    if each > 1:
        flat = flat.bitcast(jnp.uint32)
    words = rows // each
    if word is None or words == 1:
        return flat[pl.ds(first * words, tokens * words), :]
    return flat[pl.ds(first * words + word, tokens, words), :]


def _part(words: jax.Array, index: int, dtype: Any, wanted: Any) -> jax.Array:
    """Row `index` of the rows that `words` hold, widened to `wanted`."""
    each = packing(dtype)
    if each == 1:
        return words.astype(wanted)
    if each == 2:
        bits = words << 16 if index == 0 else words & jnp.uint32(0xFFFF0000)
        return pltpu.bitcast(bits, jnp.float32).astype(wanted)
    if jnp.dtype(dtype) == jnp.int8:
        signed = pltpu.bitcast(words, jnp.int32)
        return ((signed << (24 - 8 * index)) >> 24).astype(jnp.float32).astype(wanted)
    return _float8(words >> (8 * index) if index else words, dtype).astype(wanted)


def _float8(words: jax.Array, dtype: Any) -> jax.Array:
    """float32 of the 8-bit float in the lowest byte of each word, by integer arithmetic, which every generation has.

    The exponent and mantissa are moved to where float32 has its own, and the difference of the biases is a factor. Numbers too small for that (whose
    float32 would be denormal, which TPUs flush) are counted in units of the smallest one. NaN and infinity stay what they are.
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


def _keys_and_values(
    spec: PagedSpec, shape: Shape, refs: Refs, slot: Any, first: int, tokens: int, group: int | None
) -> list[tuple[jax.Array, jax.Array]]:
    """Keys `[tokens, D]` and values `[tokens, Dv]` of the heads of one group; of all groups together, their rows as `_places` has them, for None."""
    k_ref, wanted = refs.k_buffer.at[slot], spec.compute_dtype
    stored = k_ref.dtype
    if spec.form == "latent":
        rows = k_ref[pl.ds(first, tokens), :].astype(wanted)
        return [(rows, rows[:, : spec.value_dim])]
    heads = heads_together(spec)
    if spec.form == "combined" and packing(stored) == 1:
        assert group is not None
        return [tuple(_words(k_ref, first, tokens, 2 * group + i).astype(wanted) for i in range(2))]  # type: ignore[list-item]
    words = _words(k_ref, first, tokens, group)
    if whole_words(spec, shape):
        return [tpu_unpack.keys_and_values(words, stored, shape.unpack)]
    if spec.form == "combined":
        return [(_part(words, 2 * i, stored, wanted), _part(words, 2 * i + 1, stored, wanted)) for i in range(heads)]
    values = _words(refs.v_buffer.at[slot], first, tokens, group)
    return [(_part(words, i, stored, wanted), _part(values, i, stored, wanted)) for i in range(heads)]


def whole_words(spec: PagedSpec, shape: Shape) -> bool:
    """Whether the rows of both kv heads in a word are widened together, by `tpu_unpack`."""
    return shape.joint and spec.form == "combined" and shape.unpack != "shift"


def _places(spec: PagedSpec, shape: Shape, part: int, tokens: int, width: int) -> tuple[jax.Array, Any, int]:
    """(token, kv head, both `[rows, width]`, tokens per `width`) of the columns of scores of `tokens` keys; head None where all are of one."""
    column = lax.broadcasted_iota(jnp.int32, (shape.rows, width), 1)
    if not shape.joint:
        return column, None, width
    together = heads_together(spec)
    words = spec.kv_heads // together
    if whole_words(spec, shape):
        return *tpu_unpack.place(column, words, tokens), width // (4 * words)
    return column >> (words.bit_length() - 1), (column & (words - 1)) * together + part, width // words


def kernel(spec: PagedSpec, shape: Shape, names: list[str], *arguments: Any) -> None:
    """The body of `pallas_call` over a grid of cores, each with its share of the items."""
    refs = Refs(names, arguments)
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

    # --- Copies --------------------------------------------------------------------------------------------------------

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
            query_copy(item).start()

    def query_copy(item: Any) -> Any:
        slot = lax.rem(item - low, shape.slots)
        return pltpu.make_async_copy(refs.query.at[item], refs.q_buffer.at[slot], refs.q_fetched.at[slot])

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
        """Keys past the item's end become 0: what an older block or the caller's unused rows left there may be NaN, which no weight of 0 takes away."""
        live = refs.end[item] - (refs.first_page[item] + block * shape.pages) * page

        @pl.when(live < keys)
        def _() -> None:
            for _, buffer in pools:
                _clear(buffer.at[slot], jnp.maximum(live, 0))

    def store_copy(item: Any) -> Any:
        slot = lax.rem(item - low, 2)
        return pltpu.make_async_copy(refs.o_buffer.at[slot], refs.out.at[item], refs.stored.at[slot])

    # --- Arithmetic ----------------------------------------------------------------------------------------------------

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
        first_key = (refs.first_page[item] + block * shape.pages) * page
        # Relative to the first query's position: a key at `ahead` or less is seen by it, one more by every query after it.
        ahead = refs.position[item] - first_key
        together = heads_together(spec)

        def scores(index: Any, part: int, first: int, tokens: int, k: Any) -> Any:
            """Scaled logits `[rows, keys * words]`, in units of log2 e; those that are not seen are hugely negative."""
            s = dot(refs.q_buffer[q_slot, index], k, ((1,), (1,)))
            scale = spec.scale * stored_scale * (_LOG2E if spec.softcap is None else 1 / spec.softcap)
            if refs.k_scale is None:
                s = s * scale
            else:
                s = s * (refs.k_scale[...] * scale if shape.joint else refs.k_scale[index] * scale)
            if spec.softcap is not None:
                s = (spec.softcap * _LOG2E) * jnp.tanh(s)
            # Tile by tile of 128 columns, whose places within their tokens are the same.
            width = min(LANES, s.shape[1])
            token, head, step = _places(spec, shape, part, tokens, width)
            if refs.row_query is not None:
                token = token - refs.row_query[...]
            mine = None if head is None else head == refs.row_head[...]
            tiles = []
            for t, start in enumerate(range(0, s.shape[1], width)):
                here = min(width, s.shape[1] - start)  # 19 pages of 16 keys are no whole tiles
                limit = ahead - first - t * step
                see = token[:, :here] <= limit
                if spec.window is not None:
                    see &= token[:, :here] >= limit - spec.window
                if mine is not None:
                    see &= mine[:, :here]
                tiles.append(jnp.where(see, s[:, start : start + here], MASKED))
            return jnp.concatenate(tiles, axis=1)

        def weigh(index: Any, s: Any, v: Any) -> None:
            m_old = refs.m[index]  # [rows, 128]
            m = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp2(s - m[:, :1])
            shrink = jnp.exp2(m_old - m)
            refs.m[index] = m
            refs.l[index] = refs.l[index] * shrink + jnp.sum(p, axis=1, keepdims=True)
            refs.acc[index] = refs.acc[index] * shrink[:, :1] + dot(p.astype(v.dtype), v, ((1,), (0,)))

        # The next step's products are issued before this one's softmax, which hides behind them.
        waiting: list[tuple[Any, Any, Any]] = []
        for first in range(0, keys, shape.chunk):
            tokens = min(shape.chunk, keys - first)
            for group in (None,) if shape.joint else range(spec.kv_heads // together):
                for part, (k, v) in enumerate(_keys_and_values(spec, shape, refs, slot, first, tokens, group)):
                    index = 0 if group is None else group * together + part
                    waiting.append((index, scores(index, part, first, tokens, k), v))
                    if len(waiting) > 1:
                        weigh(*waiting.pop(0))
        for each in waiting:
            weigh(*each)

    def finish(item: Any) -> None:
        @pl.when(item - low >= 2)
        def _() -> None:
            store_copy(item - 2).wait()

        for h in range(refs.l.shape[0]):
            l = refs.l[h][:, :1]
            out = refs.acc[h] / jnp.where(l > 0, l, 1.0)
            if stored_scale != 1:
                out = out * stored_scale
            if refs.v_scale is not None:
                out = out * (refs.v_scale[...] if shape.joint else refs.v_scale[h])
            refs.o_buffer[lax.rem(item - low, 2), h] = out.astype(refs.o_buffer.dtype)
        store_copy(item).start()

    # --- The walk ------------------------------------------------------------------------------------------------------

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
        query_copy(item).wait()
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
            store_copy(high - back).wait()

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
