"""Triton body of paged attention: the walk over a sequence's pages.

The query heads of one kv head lie in the rows of a tile, next to the queries of a block, so that decoding fills what a
tensor core multiplies at once. The keys of a long sequence are split, and `gpu_kernels_combine` adds the splits. Logits
are kept in units of log2, for `exp2`.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E, rounded_product, tanh
from vishwamai.ops.paged_attention.gpu_arguments import Extents, Pool, Sequences, Terms


@triton.jit
def sequence_of(starts_ptr, n, item, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr):
    """The sequence that holds token `item`, or, with BLOCKS, block `item` of QUERIES queries; n for what lies behind
    the last.

    Every sequence may leave a block unfilled, so the blocks of sequence s begin at `starts[s] // QUERIES + s`.
    """
    sequence = n * 0  # a tensor, as the loop assigns; a constant 0 would be another type
    for first in tl.range(0, n, CHUNK):
        # How many sequences begin at the item or before it: the loads of a binary search would wait for one
        # another.
        s = first + 1 + tl.arange(0, CHUNK)
        begin = tl.load(starts_ptr + s, mask=s <= n, other=0)
        if BLOCKS:
            begin = begin // QUERIES + s
        sequence += tl.sum(((s <= n) & (begin <= item)).to(tl.int32))
    return sequence


@triton.jit
def load_rows(ptr, offsets, rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`[rows, TILE]`: WIDTH elements from each of the offsets `offsets`; 0 beyond WIDTH and where `rows` is False."""
    column = tl.arange(0, TILE)
    mask = rows[:, None]
    if WIDTH < TILE:  # a width of a power of two needs no mask
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_pages(ptr, offsets, rows, FOUR: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`load_rows` of pages; FOUR: two numbers share a byte, the first in its lower bits, and `offsets` counts bytes."""
    if FOUR:
        pairs = load_rows(ptr, offsets, rows, WIDTH // 2, TILE // 2).to(tl.int32)
        return tl.join((pairs << 28) >> 28, pairs >> 4).reshape(offsets.shape[0], TILE)  # both halves sign-extended
    else:
        return load_rows(ptr, offsets, rows, WIDTH, TILE)


@triton.jit
def attend(
    query_ptr,
    k_pool: Pool,
    v_pool: Pool,
    sequences: Sequences,
    terms: Terms,
    out_ptr_init,
    logsumexp_ptr_init,
    out_ptr,
    logsumexp_ptr,
    lse_ptr,
    sizes: Extents,
    v_start,
    SCORES: tl.constexpr,
    ITEMS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    """Grid (batch * items * SPLITS * kv_heads * head_tiles,).

    Row r of a tile is query `r // HEADS` of the item and its query head `r % HEADS`. DIRECT: item s is sequence s,
    which counts if it has no more than QUERIES queries; the last item is what lies behind the last sequence, unless
    there is none. Otherwise items are blocks of the sequences of LEAST queries or more. One split: out
    `[batch, tokens, heads, DV]`, 0 for what lies behind the last sequence. Several: out and lse, float32, of rows that
    belong to a sequence that counts, `[SPLITS, batch, tokens, heads, (DV)]`, or with SLOTS
    `[SPLITS, batch, sequences, SLOTS, heads, (DV)]`; where a split has no key, lse is -inf. One split may write the
    natural logsumexp of the call too, `[batch, tokens, heads]`. FOUR: pages are of 4 bits, and their strides in bytes.
    """
    QUERIES: tl.constexpr = ITEMS.QUERIES
    SLOTS: tl.constexpr = ITEMS.SLOTS
    SPLITS: tl.constexpr = ITEMS.SPLITS
    ROWS: tl.constexpr = TILES.ROWS
    COLUMNS: tl.constexpr = TILES.COLUMNS
    HEADS: tl.constexpr = TILES.HEADS
    PAGE: tl.constexpr = TILES.PAGE
    D: tl.constexpr = WIDTHS.D
    DV: tl.constexpr = WIDTHS.DV
    DV_TILE: tl.constexpr = WIDTHS.DV_TILE
    KEY: tl.constexpr = WIDTHS.DV if WIDTHS.LATENT else WIDTHS.D
    REST: tl.constexpr = WIDTHS.D - WIDTHS.DV if WIDTHS.LATENT else 0
    PRECISION: tl.constexpr = SCORES.PRECISION
    SOFTCAP: tl.constexpr = SCORES.SOFTCAP
    batch, tokens, heads = sizes.batch, sizes.tokens, sizes.heads
    place = tl.program_id(0)
    tile = place % sizes.head_tiles  # innermost: tiles of one kv head read the same pages at the same time
    place = place // sizes.head_tiles
    h = place % sizes.kv_heads
    place = place // sizes.kv_heads
    split = place % SPLITS
    place = place // SPLITS
    item = sizes.items - 1 - place % sizes.items  # of a long run the last queries first, which see most
    b = (place // sizes.items).to(tl.int64)

    cu_q_lens_ptr = sequences.cu_q_lens_ptr + b * sequences.cu_q_lens_batch
    n = tile * 0 + sequences.total  # a tensor of int32, which the branch assigns too
    if sequences.num_seqs_ptr is not None:
        n = tl.minimum(n, tl.load(sequences.num_seqs_ptr + b * sequences.num_seqs_batch))
    if ITEMS.DIRECT:
        if (item >= n) & (item < sequences.total):
            return
        s = tl.minimum(item, n)  # items behind the last sequence fall together as item n
        first = item * 0
    else:
        s = sequence_of(cu_q_lens_ptr, n, item, QUERIES, True, TILES.CHUNK)
        first = (item - s) * QUERIES - tl.load(cu_q_lens_ptr + s) // QUERIES * QUERIES  # the item's first query in s
    start = tl.load(cu_q_lens_ptr + s)

    row = tl.arange(0, ROWS)
    head = tile * HEADS + row % HEADS
    mine = (row < QUERIES * HEADS) & (head < TILES.GROUP)  # rows beyond are padding of the tile
    head += h * TILES.GROUP
    column = tl.arange(0, DV_TILE)

    if s >= n:  # tokens of no sequence
        if lse_ptr is None:
            stop = tokens
            if not ITEMS.DIRECT:
                stop = tl.minimum(tokens, start + first + QUERIES)
            for t in tl.range(start + first, stop, QUERIES):
                token = t + row // HEADS
                offsets = (b * tokens + token) * heads + head
                inside = mine & (token < tokens)
                mask = inside[:, None] & (column < DV)[None, :]
                nothing = tl.zeros([ROWS, DV_TILE], out_ptr.dtype.element_ty)
                tl.store(out_ptr + (offsets * DV)[:, None] + column[None, :], nothing, mask=mask)
                if logsumexp_ptr is not None:
                    tl.store(logsumexp_ptr + offsets, tl.full([ROWS], float("-inf"), tl.float32), mask=inside)
        return

    length = tl.load(cu_q_lens_ptr + s + 1) - start
    if (first >= length) | (length < ITEMS.LEAST):
        return
    if SLOTS:
        if length > SLOTS:
            return
    kv_len = tl.load(sequences.kv_lens_ptr + b * sequences.kv_lens_batch + s)
    # new queries are the last of the sequence
    begin = kv_len - length + first  # position of the item's first query
    end = tl.minimum(begin + tl.minimum(QUERIES, length - first), tl.minimum(kv_len, sequences.entries * PAGE))
    low = n * 0
    if SCORES.WINDOW:
        low = tl.maximum(begin - terms.window, 0) // COLUMNS * COLUMNS  # aligned: a block of keys then lies in one page
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), COLUMNS), SPLITS) * COLUMNS  # whole blocks for each split
        low += split * share
        end = tl.minimum(end, low + share)  # a split past the last key has low >= end: an empty loop, lse of -inf

    query = first + row // HEADS
    token = start + query
    mine = mine & (query < length) & (token < tokens)
    offsets = (b * tokens + token) * heads + head
    q = load_rows(query_ptr, offsets * D, mine, KEY, WIDTHS.D_TILE)  # [ROWS, D_TILE]
    PRECISE: tl.constexpr = q.dtype == tl.float32
    scale = SCORES.SCALE
    if k_pool.scale_ptr is not None:
        # the pages' scale is linear in the logits: applied to them, not to each key
        scale = scale * tl.load(k_pool.scale_ptr + b * k_pool.scale_batch + h)
    k_ptr = k_pool.ptr + b * k_pool.batch + h.to(tl.int64) * k_pool.head
    if WIDTHS.LATENT:
        if REST > 0:
            # The latent's DV features and the rotary rest are tiles of their own: together they are no power of two.
            q_rest = load_rows(query_ptr + DV, offsets * D, mine, REST, WIDTHS.REST_TILE)
    elif v_pool.ptr is None:
        v_ptr = k_ptr + v_start
    else:
        v_ptr = v_pool.ptr + b * v_pool.batch + h.to(tl.int64) * v_pool.head
    page_indices_ptr = (
        sequences.page_indices_ptr + b * sequences.page_indices_batch + s.to(tl.int64) * sequences.entries
    )
    position = (begin + row // HEADS)[:, None]
    if terms.slopes_ptr is not None:
        slope = tl.load(terms.slopes_ptr + b * terms.slopes_batch + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
    if terms.tree_ptr is not None:
        first_new = kv_len - length  # the tree's mask covers the new keys alone
        tree_ptr = terms.tree_ptr + b * terms.tree_batch
        tree_row = token * terms.tree_columns  # below 2^31, which `why_not` sees to
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_TILE], tl.float32)

    for j in tl.range(low, end, COLUMNS):
        key = j + tl.arange(0, COLUMNS)
        live = key < end
        if PAGE % COLUMNS == 0:  # the block lies in one page
            page = tl.load(page_indices_ptr + j // PAGE).to(tl.int64)
            slot = j % PAGE + tl.arange(0, COLUMNS)
        else:
            # a gather: a block spans pages
            page = tl.load(page_indices_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
            slot = key % PAGE
        where = page * k_pool.page + slot.to(tl.int64) * k_pool.token
        # What is not live may hold anything, NaN included: it is never loaded.
        k = load_pages(k_ptr, where, live, WIDTHS.FOUR, KEY, WIDTHS.D_TILE).to(q.dtype)  # [COLUMNS, D_TILE]
        product = tl.dot(q, k.T, input_precision=PRECISION)  # [ROWS, COLUMNS]
        if WIDTHS.LATENT:
            v = k  # MLA: values are the key's first features
            if REST > 0:
                k_rest = load_pages(
                    k_ptr + (DV // 2 if WIDTHS.FOUR else DV), where, live, WIDTHS.FOUR, REST, WIDTHS.REST_TILE
                ).to(q.dtype)
                product = tl.dot(q_rest, k_rest.T, product, input_precision=PRECISION)
        else:
            # keys and values may lie in pools of different strides
            v_where = page * v_pool.page + slot.to(tl.int64) * v_pool.token
            v = load_pages(v_ptr, v_where, live, WIDTHS.FOUR, DV, DV_TILE).to(q.dtype)
        if SOFTCAP is not None:
            # the cap is stated in natural units
            x = SOFTCAP * LOG2E * tanh(product * (scale * (1.0 / SOFTCAP)), PRECISE)
        else:
            x = rounded_product(product, scale * LOG2E)
        if terms.slopes_ptr is not None:
            x -= slope[:, None] * (position - key[None, :]).to(tl.float32)
        seen = live[None, :] & (key[None, :] <= position)  # causal; without a mask in memory
        if SCORES.WINDOW:
            seen = seen & (key[None, :] >= position - terms.window)
        if terms.tree_ptr is not None:
            # most blocks hold no new key: no load for them
            if (j + COLUMNS > first_new) & (j < first_new + terms.tree_columns):
                new = (key - first_new)[None, :]
                among = mine[:, None] & (new >= 0) & (new < terms.tree_columns)
                seen = seen & (tl.load(tree_ptr + (tree_row[:, None] + new), mask=among, other=1) != 0)
        x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp2(x - m_ref[:, None])
        alpha = tl.exp2(m - m_ref)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)  # [ROWS, DV_TILE]
        m = m_new

    if lse_ptr is None:  # of several splits, `combine` adds the sink once
        if terms.sinks_ptr is not None:
            sink = tl.load(terms.sinks_ptr + b * terms.sinks_batch + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, sink)
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key, and a sink without weight
            alpha = tl.exp2(m - m_ref)
            l = l * alpha + tl.exp2(sink - m_ref)
            acc *= alpha[:, None]
            m = m_new
    if logsumexp_ptr is not None:
        tl.store(logsumexp_ptr + offsets, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LN2), mask=mine)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)  # rows without a key give 0
    if v_pool.scale_ptr is not None:
        # linear in the output: once a row, not once a value
        factor *= tl.load(v_pool.scale_ptr + b * v_pool.scale_batch + h)
    acc *= factor[:, None]
    if lse_ptr is not None:
        if SLOTS:
            offsets = ((b * sequences.total + s) * SLOTS + query) * heads + head
            offsets += split.to(tl.int64) * batch * sequences.total * SLOTS * heads
        else:
            offsets += split.to(tl.int64) * batch * tokens * heads
        # in units of log2, as `combine` reads it
        tl.store(lse_ptr + offsets, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), mask=mine)
    mask = mine[:, None] & (column < DV)[None, :]
    tl.store(out_ptr + (offsets * DV)[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
