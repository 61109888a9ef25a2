"""Triton body of paged attention: the walk over a sequence's pages.

The query heads of one kv head lie in the rows of a tile, next to the queries of a block, so that decoding fills what a
tensor core multiplies at once. The keys of a long sequence are split, and `gpu_kernels_combine` adds the splits. Logits
are kept in units of log2, for `exp2`.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E, rounded_product, tanh


@triton.jit
def sequence_of(starts_ptr, n, item, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr):
    """The sequence that holds token `item`, or, with BLOCKS, block `item` of QUERIES queries; n for what lies behind
    the last.

    Every sequence may leave a block unfilled, so the blocks of sequence s begin at `starts[s] // QUERIES + s`.
    """
    sequence = n * 0
    for first in tl.range(0, n, CHUNK):
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
    if WIDTH < TILE:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_pages(ptr, offsets, rows, FOUR: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`load_rows` of pages; FOUR: two numbers share a byte, the first in its lower bits, and `offsets` counts bytes."""
    if FOUR:
        pairs = load_rows(ptr, offsets, rows, WIDTH // 2, TILE // 2).to(tl.int32)
        return tl.join((pairs << 28) >> 28, pairs >> 4).reshape(offsets.shape[0], TILE)
    else:
        return load_rows(ptr, offsets, rows, WIDTH, TILE)


@triton.jit
def attend(
    query_ptr,
    k_ptr,
    v_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    cu_q_lens_ptr,
    num_seqs_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    tree_ptr,
    out_ptr_init,
    logsumexp_ptr_init,
    out_ptr,
    logsumexp_ptr,
    lse_ptr,
    batch,
    tokens,
    heads,
    kv_heads,
    head_tiles,
    items,
    sequences,
    entries,
    k_batch,
    k_page,
    k_token,
    k_head,
    v_batch,
    v_page,
    v_token,
    v_head,
    v_start,
    kv_lens_batch,
    page_indices_batch,
    cu_q_lens_batch,
    num_seqs_batch,
    sinks_batch,
    k_scale_batch,
    v_scale_batch,
    slopes_batch,
    tree_mask_batch,
    tree_columns,
    window,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIRECT: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LATENT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TILE: tl.constexpr,
    DV_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    FOUR: tl.constexpr,
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
    PACKED: tl.constexpr = 2 if FOUR else 1
    place = tl.program_id(0)
    tile = place % head_tiles
    place = place // head_tiles
    h = place % kv_heads
    place = place // kv_heads
    split = place % SPLITS
    place = place // SPLITS
    item = items - 1 - place % items  # of a long run the last queries first, which see most
    b = (place // items).to(tl.int64)

    cu_q_lens_ptr += b * cu_q_lens_batch
    n = tile * 0 + sequences
    if num_seqs_ptr is not None:
        n = tl.minimum(n, tl.load(num_seqs_ptr + b * num_seqs_batch))
    if DIRECT:
        if (item >= n) & (item < sequences):
            return
        s = tl.minimum(item, n)
        first = item * 0
    else:
        s = sequence_of(cu_q_lens_ptr, n, item, QUERIES, True, CHUNK)
        first = (item - s) * QUERIES - tl.load(cu_q_lens_ptr + s) // QUERIES * QUERIES
    start = tl.load(cu_q_lens_ptr + s)

    row = tl.arange(0, ROWS)
    head = tile * HEADS + row % HEADS
    mine = (row < QUERIES * HEADS) & (head < GROUP)
    head += h * GROUP
    column = tl.arange(0, DV_TILE)

    if s >= n:  # tokens of no sequence
        if lse_ptr is None:
            stop = tokens
            if not DIRECT:
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
    if (first >= length) | (length < LEAST):
        return
    if SLOTS:
        if length > SLOTS:
            return
    kv_len = tl.load(kv_lens_ptr + b * kv_lens_batch + s)
    begin = kv_len - length + first  # position of the item's first query
    end = tl.minimum(begin + tl.minimum(QUERIES, length - first), tl.minimum(kv_len, entries * PAGE))
    low = n * 0
    if WINDOW:
        low = tl.maximum(begin - window, 0) // COLUMNS * COLUMNS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), COLUMNS), SPLITS) * COLUMNS
        low += split * share
        end = tl.minimum(end, low + share)

    query = first + row // HEADS
    token = start + query
    mine = mine & (query < length) & (token < tokens)
    offsets = (b * tokens + token) * heads + head
    q = load_rows(query_ptr, offsets * D, mine, DV if LATENT else D, D_TILE)
    PRECISE: tl.constexpr = q.dtype == tl.float32
    scale = SCALE
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + b * k_scale_batch + h)
    k_ptr += b * k_batch + h.to(tl.int64) * k_head
    if LATENT:
        if D > DV:
            q_rest = load_rows(query_ptr + DV, offsets * D, mine, D - DV, REST_TILE)
    elif v_ptr is None:
        v_ptr = k_ptr + v_start
    else:
        v_ptr += b * v_batch + h.to(tl.int64) * v_head
    page_indices_ptr += b * page_indices_batch + s.to(tl.int64) * entries
    position = (begin + row // HEADS)[:, None]
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * slopes_batch + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
    if tree_ptr is not None:
        first_new = kv_len - length
        tree_ptr += b * tree_mask_batch
        tree_row = token * tree_columns  # below 2^31, which `why_not` sees to
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
            page = tl.load(page_indices_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
            slot = key % PAGE
        where = page * k_page + slot.to(tl.int64) * k_token
        # What is not live may hold anything, NaN included: it is never loaded.
        k = load_pages(k_ptr, where, live, FOUR, DV if LATENT else D, D_TILE).to(q.dtype)
        product = tl.dot(q, k.T, input_precision=PRECISION)
        if LATENT:
            v = k
            if D > DV:
                k_rest = load_pages(k_ptr + DV // PACKED, where, live, FOUR, D - DV, REST_TILE).to(q.dtype)
                product = tl.dot(q_rest, k_rest.T, product, input_precision=PRECISION)
        else:
            v_where = page * v_page + slot.to(tl.int64) * v_token
            v = load_pages(v_ptr, v_where, live, FOUR, DV, DV_TILE).to(q.dtype)
        if SOFTCAP is not None:
            x = SOFTCAP * LOG2E * tanh(product * (scale * (1.0 / SOFTCAP)), PRECISE)
        else:
            x = rounded_product(product, scale * LOG2E)
        if slopes_ptr is not None:
            x -= slope[:, None] * (position - key[None, :]).to(tl.float32)
        seen = live[None, :] & (key[None, :] <= position)
        if WINDOW:
            seen = seen & (key[None, :] >= position - window)
        if tree_ptr is not None:
            if (j + COLUMNS > first_new) & (j < first_new + tree_columns):
                new = (key - first_new)[None, :]
                among = mine[:, None] & (new >= 0) & (new < tree_columns)
                seen = seen & (tl.load(tree_ptr + (tree_row[:, None] + new), mask=among, other=1) != 0)
        x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp2(x - m_ref[:, None])
        alpha = tl.exp2(m - m_ref)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new

    if lse_ptr is None:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + b * sinks_batch + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, sink)
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key, and a sink without weight
            alpha = tl.exp2(m - m_ref)
            l = l * alpha + tl.exp2(sink - m_ref)
            acc *= alpha[:, None]
            m = m_new
    if logsumexp_ptr is not None:
        tl.store(logsumexp_ptr + offsets, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LN2), mask=mine)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    if v_scale_ptr is not None:
        factor *= tl.load(v_scale_ptr + b * v_scale_batch + h)
    acc *= factor[:, None]
    if lse_ptr is not None:
        if SLOTS:
            offsets = ((b * sequences + s) * SLOTS + query) * heads + head
            offsets += split.to(tl.int64) * batch * sequences * SLOTS * heads
        else:
            offsets += split.to(tl.int64) * batch * tokens * heads
        tl.store(lse_ptr + offsets, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), mask=mine)
    mask = mine[:, None] & (column < DV)[None, :]
    tl.store(out_ptr + (offsets * DV)[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
