"""Triton bodies of attention's forward pass, and what the backward pass shares with it; `gpu.py` launches them.

Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024) for the order of the products: the next block's logits are issued before this
block's softmax, so that tensor cores and exponentials work side by side. Logits are kept in units of log2, for `exp2`.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E, tanh
from vishwamai.ops.attention.gpu_kernels_tiles import (
    behind,
    fill_behind,
    key_blocks,
    load_rows,
    packed,
    place,
    rows_of,
    segment_span,
    shown,
    store_rows,
)


@triton.jit
def logits(
    product,
    rows,
    columns,
    b,
    h,
    bias_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    q_len,
    kv_len,
    low,
    high,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    q_segments_b,
    kv_segments_b,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    EDGE: tl.constexpr,
    PRECISE: tl.constexpr,
    ENDS: tl.constexpr = True,
):
    """(logits in units of log2 with -inf where hidden, tanh of the soft-cap).

    `rows` and `columns` are absolute positions that broadcast to the shape of `product`, in either order. EDGE: the block may reach beyond the keys
    or the band; the mask and the segments are applied either way.
    """
    inside = (rows < q_len) & (columns < kv_len)
    if bias_ptr is not None or SOFTCAP is not None:
        s = product * SCALE
        if bias_ptr is not None:
            at = b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h + rows.to(tl.int64) * bias_q + columns * bias_k
            s += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        t = s
        if SOFTCAP is not None:
            t = tanh(s * (1.0 / SOFTCAP), PRECISE)
            s = t * SOFTCAP
        s *= LOG2E
    else:
        s = product * (SCALE * LOG2E)
        t = s
    if EDGE:
        if ENDS:
            s = tl.where(columns < kv_len, s, float("-inf"))
        if HIGH:
            s = tl.where(columns - rows <= high, s, float("-inf"))
        if LOW:
            s = tl.where(columns - rows >= low, s, float("-inf"))
    if mask_ptr is not None:
        at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h + rows.to(tl.int64) * mask_q + columns * mask_k
        s = tl.where(tl.load(mask_ptr + at, mask=inside, other=0) != 0, s, float("-inf"))
    if q_segments_ptr is not None:
        q_id = tl.load(q_segments_ptr + b.to(tl.int64) * q_segments_b + rows, mask=rows < q_len, other=0)
        kv_id = tl.load(kv_segments_ptr + b.to(tl.int64) * kv_segments_b + columns, mask=columns < kv_len, other=0)
        s = tl.where(q_id == kv_id, s, float("-inf"))
    return s, t


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return x ^ (x >> BITS)


@triton.jit
def kept(seed_ptr, plane, rows, columns, KEEP_FROM: tl.constexpr):
    """Which positions dropout keeps: the bits of `core.dropout.keep_mask`."""
    seed_0 = tl.load(seed_ptr + plane.to(tl.int64) * 2).to(tl.uint32)
    seed_1 = tl.load(seed_ptr + plane.to(tl.int64) * 2 + 1).to(tl.uint32)
    r = rows.to(tl.uint32) * 0x9E3779B1 + seed_0
    r = _shifted(_shifted(r, 16) * 0x85EBCA6B, 13)
    c = columns.to(tl.uint32) * 0xC2B2AE35 + seed_1
    c = _shifted(_shifted(c, 16) * 0x27D4EB2F, 15)
    z = _shifted(_shifted(r + c, 16) * 0x7FEB352D, 15)
    z = _shifted(z * 0x846CA68B, 16)
    return (z >> 8).to(tl.int32) >= KEEP_FROM


@triton.jit
def _absorb(
    s,
    v,
    m,
    l,
    acc,
    rows,
    columns,
    plane,
    seed_ptr,
    KEEP_FROM: tl.constexpr,
    RESCALE: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax: the rows' maximum m, sum l and output acc take in block (s, v)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    m_ref = m_new
    if GUARD:  # a row that has seen nothing yet
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_ref[:, None])
    alpha = tl.exp2(m - m_ref)
    l = l * alpha + tl.sum(p, 1)
    if seed_ptr is not None:
        p = tl.where(kept(seed_ptr, plane, rows, columns, KEEP_FROM), p * RESCALE, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    sinks_ptr,
    seed_ptr,
    q_starts_ptr,
    kv_starts_ptr,
    walk_ptr,
    patterns_ptr,
    out_ptr,
    lse_ptr,
    batch,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
    q_total,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    low,
    high,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    q_segments_b,
    kv_segments_b,
    sinks_b,
    walk_h,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    KEEP_FROM: tl.constexpr,
    RESCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TILE: tl.constexpr,
    DV_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA_Q: tl.constexpr,
    TMA_K: tl.constexpr,
    TMA_V: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(q_len, ROWS) * batch * q_heads,): out `[batch, q_heads, q_len, DV]` and lse `[batch, q_heads, q_len]` float32.

    SEQ_FIRST: out is `[batch, q_len, q_heads, DV]`. With `q_starts_ptr`, `[batch + 1]` int32, the sequences are packed: queries `[q_total, q_heads, D]`,
    keys `[kv_total, kv_heads, D]`, out like the queries, lse `[q_heads, q_total]`; q_len and kv_len are then the longest sequences', there is one
    batch element more, for what lies behind the last sequence, and BOTTOM_RIGHT aligns the band of each. With `walk_ptr`, only the tiles of a block
    mask's walk are visited (`gpu_blocks.Walks.by_query`, of which a head has `walk_h` lists).
    """
    tiles = tl.cdiv(q_len, ROWS)
    plane = tl.program_id(0) // tiles
    row = (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # under a causal mask the longest first
    b, h = plane // q_heads, plane % q_heads
    kv_h = h // (q_heads // kv_heads)
    at_b, elements = b, batch
    if q_starts_ptr is not None:
        q_first, q_len = packed(q_starts_ptr, b, batch, q_total)
        kv_first, kv_len = packed(kv_starts_ptr, b, batch, 0)
        query_ptr += q_first.to(tl.int64) * query_s
        key_ptr += kv_first.to(tl.int64) * key_s
        value_ptr += kv_first.to(tl.int64) * value_s
        at_b, elements = b * 0, 1
        if BOTTOM_RIGHT:
            low += kv_len - q_len
            high += kv_len - q_len
        if row >= q_len:
            return
    queries = rows_of(query_ptr, elements, q_heads, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    keys = rows_of(key_ptr, elements, kv_heads, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
    values = rows_of(value_ptr, elements, kv_heads, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
    q = load_rows(queries, at_b, h, row, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    rows = (row + tl.arange(0, ROWS))[:, None]
    PRECISE: tl.constexpr = q.dtype == tl.float32
    STEP: tl.constexpr = COLUMNS if walk_ptr is None else 1
    MASKED: tl.constexpr = bias_ptr is not None or mask_ptr is not None or q_segments_ptr is not None
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_TILE], tl.float32)
    lo, full_lo, full_hi, hi = key_blocks(row, q_len, kv_len, low, high, ROWS, COLUMNS, LOW, HIGH)
    if walk_ptr is not None:
        span = walk_ptr + (h * walk_h + row // ROWS) * 3
        lo, full_lo, full_hi, hi = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 2)
    elif q_segments_ptr is not None:
        start, stop = segment_span(
            q_segments_ptr + b.to(tl.int64) * q_segments_b, row + tl.arange(0, ROWS), q_len,
            kv_segments_ptr + b.to(tl.int64) * kv_segments_b, kv_len, 2048,
        )  # fmt: skip
        lo = tl.maximum(lo, start // COLUMNS * COLUMNS)
        hi = tl.minimum(hi, stop)
        full_lo = tl.maximum(full_lo, lo)
        full_hi = tl.maximum(full_lo, tl.minimum(full_hi, tl.cdiv(stop, COLUMNS) * COLUMNS))

    for side in tl.static_range(2 if LOW and walk_ptr is None else 1):
        # The diagonal and the keys' ragged end, then the window's left edge; of a walk, all that is seen in part.
        start = full_hi if side == 0 and walk_ptr is None else lo
        stop = hi if side == 0 and walk_ptr is None else full_lo
        for step in tl.range(start, stop, STEP):
            n = place(walk_ptr, step, COLUMNS)
            columns = (n + tl.arange(0, COLUMNS))[None, :]
            k = load_rows(keys, at_b, kv_h, n, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s, _ = logits(
                s, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low, high,
                bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
                SCALE, SOFTCAP, LOW, HIGH, True, PRECISE,
            )  # fmt: skip
            if patterns_ptr is not None:
                number = tl.load(walk_ptr + 2 * step + 1)
                s = shown(s, number, patterns_ptr, rows - row, columns - n, ROWS, COLUMNS)
            v = load_rows(values, at_b, kv_h, n, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
            m, l, acc = _absorb(
                s, v, m, l, acc, rows, columns, plane, seed_ptr, KEEP_FROM, RESCALE, True, PRECISION
            )  # fmt: skip

    if full_lo < full_hi:
        n = place(walk_ptr, full_lo, COLUMNS)
        k = load_rows(keys, at_b, kv_h, n, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
        product = tl.dot(q, k.T, input_precision=PRECISION)
        for step in tl.range(full_lo + STEP, full_hi, STEP):
            n = place(walk_ptr, step, COLUMNS)
            k = load_rows(keys, at_b, kv_h, n, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
            following = tl.dot(q, k.T, input_precision=PRECISION)
            before = place(walk_ptr, step - STEP, COLUMNS)
            columns = (before + tl.arange(0, COLUMNS))[None, :]
            s, _ = logits(
                product, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low,
                high, bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
                SCALE, SOFTCAP, LOW, HIGH, False, PRECISE,
            )  # fmt: skip
            v = load_rows(values, at_b, kv_h, before, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
            m, l, acc = _absorb(
                s, v, m, l, acc, rows, columns, plane, seed_ptr, KEEP_FROM, RESCALE, MASKED, PRECISION
            )  # fmt: skip
            product = following
        n = place(walk_ptr, full_hi - STEP, COLUMNS)
        columns = (n + tl.arange(0, COLUMNS))[None, :]
        s, _ = logits(
            product, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low,
            high, bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
            SCALE, SOFTCAP, LOW, HIGH, False, PRECISE,
        )  # fmt: skip
        v = load_rows(values, at_b, kv_h, n, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
        m, l, acc = _absorb(
            s, v, m, l, acc, rows, columns, plane, seed_ptr, KEEP_FROM, RESCALE, MASKED, PRECISION
        )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + b.to(tl.int64) * sinks_b + h).to(tl.float32) * LOG2E
        if q_starts_ptr is not None:
            sink = tl.where(b == batch, float("-inf"), sink)
        m_new = tl.maximum(m, sink)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_ref)
        l = l * alpha + tl.exp2(sink - m_ref)
        acc *= alpha[:, None]
        m = m_new
    nothing = l == 0.0
    l = tl.where(nothing, 1.0, l)
    statistics = (b.to(tl.int64) * q_heads + h) * q_len
    if q_starts_ptr is not None:  # read again, rather than held in registers all the while
        q_first, q_len = packed(q_starts_ptr, b, batch, q_total)
        statistics = h.to(tl.int64) * q_total + q_first
        out_ptr += q_first.to(tl.int64) * (q_heads * DV)
        fill_behind(out_ptr, h, q_heads, row, q_len, tiles * ROWS, behind(b, batch), DV, ROWS, DV_TILE)
        if lse_ptr is not None:
            fill_behind(lse_ptr + statistics, h * 0, 1, row, q_len, tiles * ROWS, float("-inf"), 1, ROWS, 1)
    if lse_ptr is not None:
        at = row + tl.arange(0, ROWS)
        lse = tl.where(nothing, float("-inf"), (m + tl.log2(l)) * LN2)
        tl.store(lse_ptr + statistics + at, lse, mask=at < q_len)
    store_rows(out_ptr, acc / l[:, None], at_b, h, q_heads, row, q_len, DV, ROWS, DV_TILE, SEQ_FIRST)
