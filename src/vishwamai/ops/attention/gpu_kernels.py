"""Triton bodies of attention's forward pass, and what the backward pass shares with it; `gpu.py` launches them.

Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024) for the order of the products: the next block's
logits are issued before this block's softmax, so that tensor cores and exponentials work side by side. Logits are kept
in units of log2, for `exp2`.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E, rounded_product, tanh
from vishwamai.ops.attention.gpu_arguments import Extents, Rows, Starts, Terms, Walk
from vishwamai.ops.attention.gpu_kernels_tiles import (
    behind,
    fill_behind,
    fill_statistics,
    key_blocks,
    load_rows,
    masked_logits,
    of_sequence,
    packed,
    place,
    segment_span,
    shifted,
    source_of,
    store_rows,
)


@triton.jit
def logits(
    product,
    rows,
    columns,
    b,
    h,
    terms: Terms,
    sizes: Extents,
    LOGITS: tl.constexpr,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
    ENDS: tl.constexpr = True,
):
    """(logits in units of log2 with -inf where hidden, tanh of the soft-cap).

    `rows` and `columns` are absolute positions that broadcast to the shape of `product`, in either order. EDGE: the
    block may reach beyond the keys or the band; the mask, the segments and ALiBi are applied either way.
    """
    SCALE: tl.constexpr = LOGITS.SCALE
    SOFTCAP: tl.constexpr = LOGITS.SOFTCAP
    inside = (rows < sizes.q_len) & (columns < sizes.kv_len)  # [ROWS, COLUMNS], or transposed, as the product is
    if terms.bias_ptr is not None or SOFTCAP is not None:
        s = product * SCALE
        if terms.bias_ptr is not None:
            offsets = (
                # int64: a bias of every head and query can pass 2^31 elements.
                b.to(tl.int64) * terms.bias_b
                + h.to(tl.int64) * terms.bias_h
                + rows.to(tl.int64) * terms.bias_q
                + columns * terms.bias_k
            )
            bias = tl.load(terms.bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            # Some models cap the biased logits, others bias the capped ones.
            if not LOGITS.BIAS_AFTER:
                s += bias
        t = s
        if SOFTCAP is not None:
            t = tanh(s * (1.0 / SOFTCAP), PRECISE)  # t goes out too: the cap's derivative is 1 - t^2
            s = t * SOFTCAP
            if LOGITS.BIAS_AFTER:
                s += bias
        s = rounded_product(s, LOG2E)  # to log2 units once, after all that is stated in natural ones
    else:
        s = rounded_product(product, SCALE * LOG2E)  # one constant: scale and change of base are a single product
        t = s
    stand = rows  # a query's position: its row, unless positions say otherwise
    if terms.positions_ptr is not None:
        stand = tl.load(
            terms.positions_ptr + b.to(tl.int64) * terms.positions_b + rows, mask=rows < sizes.q_len, other=0
        )
    if terms.slopes_ptr is not None:
        slope = tl.load(terms.slopes_ptr + b.to(tl.int64) * terms.slopes_b + h).to(tl.float32)
        # ALiBi is stated in natural units, and s is in log2
        s -= slope * LOG2E * tl.abs(columns - stand - sizes.offset).to(tl.float32)
    if EDGE:
        if ENDS:  # a gradient of keys drops the rows past the end when it stores
            s = tl.where(columns < sizes.kv_len, s, float("-inf"))
        if LOGITS.HIGH:
            s = tl.where(columns - stand <= sizes.high, s, float("-inf"))
        if LOGITS.LOW:
            s = tl.where(columns - stand >= sizes.low, s, float("-inf"))
    if terms.mask_ptr is not None:
        offsets = (
            b.to(tl.int64) * terms.mask_b
            + h.to(tl.int64) * terms.mask_h
            + rows.to(tl.int64) * terms.mask_q
            + columns * terms.mask_k
        )
        # other=0: positions outside count as hidden
        s = tl.where(tl.load(terms.mask_ptr + offsets, mask=inside, other=0) != 0, s, float("-inf"))
    if terms.q_segments_ptr is not None:
        q_id = tl.load(
            terms.q_segments_ptr + b.to(tl.int64) * terms.q_segments_b + rows, mask=rows < sizes.q_len, other=0
        )
        kv_id = tl.load(
            terms.kv_segments_ptr + b.to(tl.int64) * terms.kv_segments_b + columns, mask=columns < sizes.kv_len, other=0
        )
        s = tl.where(q_id == kv_id, s, float("-inf"))
    return s, t


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return x ^ (x >> BITS)


@triton.jit
def keep_mask(seed_ptr, plane, rows, columns, KEEP_FROM: tl.constexpr):
    """Which positions dropout keeps: the bits of `core.dropout.keep_mask`."""
    # two words of a plane's seed: a hash for rows and one for columns
    seed_0 = tl.load(seed_ptr + plane.to(tl.int64) * 2).to(tl.uint32)
    seed_1 = tl.load(seed_ptr + plane.to(tl.int64) * 2 + 1).to(tl.uint32)
    r = rows.to(tl.uint32) * 0x9E3779B1 + seed_0
    r = _shifted(_shifted(r, 16) * 0x85EBCA6B, 13)
    c = columns.to(tl.uint32) * 0xC2B2AE35 + seed_1
    c = _shifted(_shifted(c, 16) * 0x27D4EB2F, 15)
    z = _shifted(_shifted(r + c, 16) * 0x7FEB352D, 15)  # the sum alone is linear in both: mixed again
    z = _shifted(z * 0x846CA68B, 16)
    return (z >> 8).to(tl.int32) >= KEEP_FROM  # 24 bits: a non-negative int32, compared without sign trouble


@triton.jit
def _absorb(s, v, m, l, acc, rows, columns, plane, seed_ptr, LOGITS: tl.constexpr, GUARD: tl.constexpr):
    """One step of the online softmax: the rows' maximum m, sum l and output acc take in block (s, v)."""
    m_new = tl.maximum(m, tl.max(s, 1))  # [ROWS]
    m_ref = m_new
    if GUARD:  # a row that has seen nothing yet
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_ref[:, None])  # [ROWS, COLUMNS]
    # What the sums so far are worth under the new maximum; 0 for the first block.
    alpha = tl.exp2(m - m_ref)
    l = l * alpha + tl.sum(p, 1)  # before dropout: the sum is of all probabilities
    if seed_ptr is not None:
        p = tl.where(keep_mask(seed_ptr, plane, rows, columns, LOGITS.KEEP_FROM), p * LOGITS.RESCALE, 0.0)
    # The product adds to the rescaled accumulator, so the old and the new share one register tile.
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=LOGITS.PRECISION)  # [ROWS, DV]
    return m_new, l, acc


@triton.jit
def forward(
    query: Rows,
    key: Rows,
    value: Rows,
    terms: Terms,
    sinks_ptr,
    seed_ptr,
    starts: Starts,
    walk: Walk,
    out_ptr,
    lse_ptr,
    sizes: Extents,
    sinks_b,
    LOGITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    OUTS: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(q_len, ROWS) * batch * q_heads,): out `[batch, q_heads, q_len, DV]` and lse `[batch, q_heads, q_len]`
    float32.

    SEQ_FIRST: out is `[batch, q_len, q_heads, DV]`. With `starts` the sequences are packed: queries
    `[q_total, q_heads, D]`, keys `[kv_total, kv_heads, D]`, out like the queries, lse `[q_heads, q_total]`; q_len and
    kv_len are then the longest sequences', there is one batch element more, for what lies behind the last sequence, and
    BOTTOM_RIGHT aligns the band of each. With `walk`, only the tiles of a block mask's walk are visited
    (`gpu_blocks.Walks.by_query`).
    """
    ROWS: tl.constexpr = QUERIES.ROWS
    COLUMNS: tl.constexpr = KEYS.ROWS
    DV_TILE: tl.constexpr = OUTS.COLUMNS
    tiles = tl.cdiv(sizes.q_len, ROWS)  # blocks of rows of one head
    plane = tl.program_id(0) // tiles
    row = (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # under a causal mask the longest first
    b, h = plane // sizes.q_heads, plane % sizes.q_heads
    kv_h = h // (sizes.q_heads // sizes.kv_heads)  # grouped queries: consecutive heads share keys
    at_b, elements = b, sizes.batch
    if starts.q_ptr is not None:
        q_first, q_len = packed(starts.q_ptr, b, sizes.batch, sizes.q_total)
        # no keys behind the last sequence: its rows become 0
        kv_first, kv_len = packed(starts.kv_ptr, b, sizes.batch, 0)
        query, key, value = shifted(query, q_first), shifted(key, kv_first), shifted(value, kv_first)
        sizes = of_sequence(sizes, q_len, kv_len, BOTTOM_RIGHT)
        at_b, elements = b * 0, 1  # the pointers stand at the sequence already
        if row >= sizes.q_len:  # the grid is of the longest sequence; shorter ones have fewer blocks
            return
    queries = source_of(query, elements, sizes.q_heads, sizes.q_len, QUERIES)
    keys = source_of(key, elements, sizes.kv_heads, sizes.kv_len, KEYS)
    q = load_rows(queries, query, at_b, h, row, sizes.q_len, QUERIES)  # [ROWS, D], in registers for the whole walk
    rows = (row + tl.arange(0, ROWS))[:, None]
    PRECISE: tl.constexpr = q.dtype == tl.float32  # narrower logits lose more than tanh's cancellation does
    STEP: tl.constexpr = COLUMNS if walk.ptr is None else 1  # a walk counts tiles, the plain loop keys
    # a whole block may still be hidden by these: guard its maximum
    MASKED: tl.constexpr = terms.bias_ptr is not None or terms.mask_ptr is not None or terms.q_segments_ptr is not None
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_TILE], tl.float32)
    # Keys lo ... hi are seen by some row, full_lo ... full_hi by all rows: those blocks need no mask of the band.
    lo, full_lo, full_hi, hi = key_blocks(row, b, sizes, terms, ROWS, COLUMNS, LOGITS.LOW, LOGITS.HIGH)
    end = sizes.kv_len
    if walk.ptr is not None:
        # (first tile, first whole one, end) of the block of queries
        span = walk.ptr + (h * walk.head + row // ROWS) * 3
        lo, full_lo, full_hi, hi = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 2)
    elif terms.q_segments_ptr is not None:
        start, stop = segment_span(
            terms.q_segments_ptr + b.to(tl.int64) * terms.q_segments_b, row + tl.arange(0, ROWS), sizes.q_len,
            terms.kv_segments_ptr + b.to(tl.int64) * terms.kv_segments_b, sizes.kv_len,
        )  # fmt: skip
        # Blocks are counted from the first key of the stretch, so that none before it is read.
        lo = tl.maximum(lo, start)
        hi = tl.minimum(hi, stop)
        full_lo = lo + tl.cdiv(tl.maximum(full_lo - lo, 0), COLUMNS) * COLUMNS
        # A last block that is cut short by `stop` counts as full: keys past it are of other segments, which the id mask
        # hides.
        most = tl.minimum(full_hi, stop + COLUMNS - 1)
        full_hi = full_lo + tl.maximum(most - full_lo, 0) // COLUMNS * COLUMNS
    if walk.ptr is None:
        end = hi
    # Values past the last key that a row of the block sees are read as 0: infinity or NaN times 0 is NaN.
    values = source_of(value, elements, sizes.kv_heads, tl.maximum(end, 1), VALUES)

    for side in tl.static_range(2 if LOGITS.LOW and walk.ptr is None else 1):
        # The diagonal and the keys' ragged end, then the window's left edge; of a walk, all that is seen in part.
        start = full_hi if side == 0 and walk.ptr is None else lo
        stop = hi if side == 0 and walk.ptr is None else full_lo
        for step in tl.range(start, stop, STEP):
            n = place(walk, step, COLUMNS)
            columns = (n + tl.arange(0, COLUMNS))[None, :]
            k = load_rows(keys, key, at_b, kv_h, n, sizes.kv_len, KEYS)
            s = tl.dot(q, k.T, input_precision=LOGITS.PRECISION)
            s, _ = logits(s, rows, columns, b, h, terms, sizes, LOGITS, True, PRECISE)
            if walk.patterns_ptr is not None:
                number = tl.load(walk.ptr + 2 * step + 1)
                s = masked_logits(s, number, walk.patterns_ptr, rows - row, columns - n, ROWS, COLUMNS)
            v = load_rows(values, value, at_b, kv_h, n, end, VALUES)
            m, l, acc = _absorb(s, v, m, l, acc, rows, columns, plane, seed_ptr, LOGITS, True)

    if full_lo < full_hi:
        n = place(walk, full_lo, COLUMNS)
        k = load_rows(keys, key, at_b, kv_h, n, sizes.kv_len, KEYS)
        # The scores of the next block are computed beside this block's softmax, on other units.
        product = tl.dot(q, k.T, input_precision=LOGITS.PRECISION)  # [ROWS, COLUMNS]
        for step in tl.range(full_lo + STEP, full_hi, STEP):
            n = place(walk, step, COLUMNS)
            k = load_rows(keys, key, at_b, kv_h, n, sizes.kv_len, KEYS)
            following = tl.dot(q, k.T, input_precision=LOGITS.PRECISION)
            before = place(walk, step - STEP, COLUMNS)  # softmax of the block whose product was issued a turn ago
            columns = (before + tl.arange(0, COLUMNS))[None, :]
            s, _ = logits(product, rows, columns, b, h, terms, sizes, LOGITS, False, PRECISE)
            v = load_rows(values, value, at_b, kv_h, before, end, VALUES)
            m, l, acc = _absorb(s, v, m, l, acc, rows, columns, plane, seed_ptr, LOGITS, MASKED)
            product = following  # the matrix unit has worked on it meanwhile
        n = place(walk, full_hi - STEP, COLUMNS)  # the last product has no next one to hide behind
        columns = (n + tl.arange(0, COLUMNS))[None, :]
        s, _ = logits(product, rows, columns, b, h, terms, sizes, LOGITS, False, PRECISE)
        v = load_rows(values, value, at_b, kv_h, n, end, VALUES)
        m, l, acc = _absorb(s, v, m, l, acc, rows, columns, plane, seed_ptr, LOGITS, MASKED)

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + b.to(tl.int64) * sinks_b + h).to(tl.float32) * LOG2E
        if starts.q_ptr is not None:
            # rows behind the last sequence stay 0 with a sink, too
            sink = tl.where(b == sizes.batch, float("-inf"), sink)
        m_new = tl.maximum(m, sink)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_ref)
        l = l * alpha + tl.exp2(sink - m_ref)  # a sink takes weight and gives no value: it enters l alone
        acc *= alpha[:, None]
        m = m_new
    nothing = l == 0.0  # rows that see no key give 0 and -inf
    l = tl.where(nothing, 1.0, l)  # no 0 / 0
    statistics = (b.to(tl.int64) * sizes.q_heads + h) * sizes.q_len  # offset of the plane's first row in lse
    if starts.q_ptr is not None:  # read again, rather than held in registers all the while
        q_first, q_len = packed(starts.q_ptr, b, sizes.batch, sizes.q_total)
        statistics = h.to(tl.int64) * sizes.q_total + q_first
        sizes = of_sequence(sizes, q_len, sizes.kv_len, False)
        out_ptr += q_first.to(tl.int64) * (sizes.q_heads * OUTS.DIM)
        fill_behind(out_ptr, h, sizes.q_heads, row, sizes.q_len, tiles * ROWS, behind(b, sizes.batch), OUTS)
        if lse_ptr is not None:
            fill_statistics(lse_ptr + statistics, row, sizes.q_len, tiles * ROWS, ROWS)
    if lse_ptr is not None:
        positions = row + tl.arange(0, ROWS)
        lse = tl.where(nothing, float("-inf"), (m + tl.log2(l)) * LN2)
        tl.store(lse_ptr + statistics + positions, lse, mask=positions < sizes.q_len)
    store_rows(out_ptr, acc / l[:, None], at_b, h, sizes.q_heads, row, sizes.q_len, OUTS, SEQ_FIRST)
