"""Triton bodies of attention's backward pass; `gpu.py` launches them.

Dao, "FlashAttention-2" (2023). Probabilities come back from the logsumexp. A program of `key_gradients` owns a block of keys and walks over the queries
that see it; one of `query_gradients` owns a block of queries and walks over the keys, so that every sum has one order. `key_gradients` can add the
queries' gradients too, by the copy engine's reduction: two products fewer for each block, in an order that differs between runs.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E
from vishwamai.ops.attention.gpu_kernels import kept, logits
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
def delta(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    heads,
    length,
    out_b,
    out_h,
    out_s,
    dout_b,
    dout_h,
    dout_s,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (cdiv(length, ROWS) * batch * heads,): each row's sum of out * dout, less the logsumexp's cotangent; `[batch, heads, length]`."""
    tiles = tl.cdiv(length, ROWS)
    plane, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    b, h = plane // heads, plane % heads
    out = load_rows(out_ptr, b, h, row, length, out_b, out_h, out_s, DV, ROWS, DV_TILE, False).to(tl.float32)
    dout = load_rows(dout_ptr, b, h, row, length, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, False).to(tl.float32)
    total = tl.sum(out * dout, 1)
    rows = row + tl.arange(0, ROWS)
    at = plane.to(tl.int64) * length + rows
    if dlse_ptr is not None:
        total -= tl.load(dlse_ptr + at, mask=rows < length, other=0.0).to(tl.float32)
    tl.store(delta_ptr + at, total, mask=rows < length)


@triton.jit
def statistics(lse_ptr, delta_ptr, base, row, q_len, ROWS: tl.constexpr):
    """(logsumexp in units of log2, delta) of rows; +inf where nothing is seen, which makes every probability 0."""
    rows = row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + base + rows, mask=rows < q_len, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    return lse, tl.load(delta_ptr + base + rows, mask=rows < q_len, other=0.0)


@triton.jit
def after_dropout(p, dp, seed_ptr, plane, rows, columns, KEEP_FROM: tl.constexpr, RESCALE: tl.constexpr):
    """(probabilities after dropout, gradient of those before it)."""
    if seed_ptr is not None:
        keep = kept(seed_ptr, plane, rows, columns, KEEP_FROM)
        return tl.where(keep, p * RESCALE, 0.0), tl.where(keep, dp * RESCALE, 0.0)
    else:
        return p, dp


@triton.jit
def logit_gradient(p, dp, total, t, SOFTCAP: tl.constexpr):
    """Gradient of the scaled, biased logits; exactly 0 where the probability is."""
    ds = p * (dp - total)
    if SOFTCAP is not None:
        ds *= 1.0 - t * t
    return tl.where(p == 0.0, 0.0, ds)


@triton.jit
def key_gradients(
    query_ptr,
    key_ptr,
    value_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    bias_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    seed_ptr,
    q_starts_ptr,
    kv_starts_ptr,
    walk_ptr,
    patterns_ptr,
    dq_ptr_init,
    dk_ptr,
    dv_ptr,
    dq_ptr,
    batch,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
    q_total,
    kv_total,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    dout_b,
    dout_h,
    dout_s,
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
    TMA_DO: tl.constexpr,
    EDGE: tl.constexpr,
    TMA_DQ: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(kv_len, COLUMNS) * batch * kv_heads,): dk and dv; and dq, `[batch, q_heads, q_len, D]` float32 and zero before, if it is given.

    SEQ_FIRST (of dk and dv alone), `q_starts_ptr`: see `gpu_kernels.forward`; dq is `[q_heads, q_total, D]` of packed sequences.
    `walk_ptr` is `gpu_blocks.Walks.by_key`.
    """
    tiles = tl.cdiv(kv_len, COLUMNS)
    kv_plane, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    b, kv_h, group = kv_plane // kv_heads, kv_plane % kv_heads, q_heads // kv_heads
    at_b, elements, q_first = b, batch, b * 0
    if q_starts_ptr is not None:
        q_first, q_len = packed(q_starts_ptr, b, batch, 0)
        kv_first, kv_len = packed(kv_starts_ptr, b, batch, kv_total)
        query_ptr += q_first.to(tl.int64) * query_s
        dout_ptr += q_first.to(tl.int64) * dout_s
        key_ptr += kv_first.to(tl.int64) * key_s
        value_ptr += kv_first.to(tl.int64) * value_s
        at_b, elements = b * 0, 1
        if BOTTOM_RIGHT:
            low += kv_len - q_len
            high += kv_len - q_len
        if column >= kv_len:
            return
    queries = rows_of(query_ptr, elements, q_heads, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    douts = rows_of(dout_ptr, elements, q_heads, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
    keys = rows_of(key_ptr, elements, kv_heads, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
    values = rows_of(value_ptr, elements, kv_heads, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
    if dq_ptr is not None:
        if TMA_DQ:
            dq_base = dq_ptr + at_b.to(tl.int64) * q_heads * q_len * D + q_first.to(tl.int64) * D
            dq_plane = q_len * D
            if q_starts_ptr is not None:
                dq_plane = q_total * D
            dqs = tl.make_tensor_descriptor(dq_base, [q_heads, q_len, D], [dq_plane, D, 1], [1, ROWS, D_TILE])
    k = load_rows(keys, at_b, kv_h, column, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
    v = load_rows(values, at_b, kv_h, column, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
    columns = (column + tl.arange(0, COLUMNS))[:, None]
    PRECISE: tl.constexpr = k.dtype == tl.float32
    dk = tl.zeros([COLUMNS, D_TILE], tl.float32)
    dv = tl.zeros([COLUMNS, DV_TILE], tl.float32)
    STEP: tl.constexpr = ROWS if walk_ptr is None else 1
    start = 0 * column
    stop = start + q_len
    if HIGH:
        start = tl.maximum(0, column - high) // ROWS * ROWS
    if LOW:
        stop = tl.minimum(q_len, column + COLUMNS - low)
    if q_segments_ptr is not None and walk_ptr is None:
        first, last = segment_span(
            kv_segments_ptr + b.to(tl.int64) * kv_segments_b, column + tl.arange(0, COLUMNS), kv_len,
            q_segments_ptr + b.to(tl.int64) * q_segments_b, q_len, 2048,
        )  # fmt: skip
        start = tl.maximum(start, first // ROWS * ROWS)
        stop = tl.minimum(stop, last)
    for member in tl.range(0, group):
        h = kv_h * group + member
        plane = b * q_heads + h
        base = plane.to(tl.int64) * q_len
        if q_starts_ptr is not None:
            base = h.to(tl.int64) * q_total + q_first
        if walk_ptr is not None:
            span = walk_ptr + (h * walk_h + column // COLUMNS) * 3
            start, stop = tl.load(span), tl.load(span + 2)
        for step in tl.range(start, stop, STEP):
            row = place(walk_ptr, step, ROWS)
            rows = (row + tl.arange(0, ROWS))[None, :]
            q = load_rows(queries, at_b, h, row, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
            lse, total = statistics(lse_ptr, delta_ptr, base, row, q_len, ROWS)
            # [COLUMNS, ROWS]: the transposed probabilities are then a left operand, in registers.
            s = tl.dot(k, q.T, input_precision=PRECISION)
            s, t = logits(
                s, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low, high,
                bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
                SCALE, SOFTCAP, LOW, HIGH, EDGE, PRECISE, dq_ptr is not None,
            )  # fmt: skip
            if patterns_ptr is not None:
                number = tl.load(walk_ptr + 2 * step + 1)
                s = shown(s, number, patterns_ptr, rows - row, columns - column, ROWS, COLUMNS)
            p = tl.exp2(s - lse[None, :])
            dout = load_rows(douts, at_b, h, row, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            dropped, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, KEEP_FROM, RESCALE)
            dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = logit_gradient(p, dp, total[None, :], t, SOFTCAP).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if dq_ptr is not None:
                dq = tl.dot(ds.T, k, input_precision=PRECISION) * SCALE
                if TMA_DQ:
                    dqs.atomic_add([h, row, 0], dq.reshape(1, ROWS, D_TILE))
                else:
                    at = (base + row + tl.arange(0, ROWS))[:, None] * D
                    d = tl.arange(0, D_TILE)[None, :]
                    inside = ((row + tl.arange(0, ROWS)) < q_len)[:, None] & (d < D)
                    tl.atomic_add(dq_ptr + at + d, dq, mask=inside, sem="relaxed")
    if q_starts_ptr is not None:  # read again, rather than held in registers all the while
        kv_first, kv_len = packed(kv_starts_ptr, b, batch, kv_total)
        dk_ptr += kv_first.to(tl.int64) * (kv_heads * D)
        dv_ptr += kv_first.to(tl.int64) * (kv_heads * DV)
        fill_behind(dk_ptr, kv_h, kv_heads, column, kv_len, tiles * COLUMNS, behind(b, batch), D, COLUMNS, D_TILE)
        fill_behind(dv_ptr, kv_h, kv_heads, column, kv_len, tiles * COLUMNS, behind(b, batch), DV, COLUMNS, DV_TILE)
    store_rows(dk_ptr, dk * SCALE, at_b, kv_h, kv_heads, column, kv_len, D, COLUMNS, D_TILE, SEQ_FIRST)
    store_rows(dv_ptr, dv, at_b, kv_h, kv_heads, column, kv_len, DV, COLUMNS, DV_TILE, SEQ_FIRST)


@triton.jit
def query_gradients(
    query_ptr,
    key_ptr,
    value_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    bias_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    seed_ptr,
    q_starts_ptr,
    kv_starts_ptr,
    walk_ptr,
    patterns_ptr,
    dq_ptr,
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
    dout_b,
    dout_h,
    dout_s,
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
    TMA_DO: tl.constexpr,
    EDGE: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(q_len, ROWS) * batch * q_heads,): dq. SEQ_FIRST, `q_starts_ptr`: see `gpu_kernels.forward`; `walk_ptr` too."""
    tiles = tl.cdiv(q_len, ROWS)
    plane = tl.program_id(0) // tiles
    row = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    b, h = plane // q_heads, plane % q_heads
    kv_h = h // (q_heads // kv_heads)
    at_b, elements, base = b, batch, plane.to(tl.int64) * q_len
    if q_starts_ptr is not None:
        q_first, q_len = packed(q_starts_ptr, b, batch, q_total)
        kv_first, kv_len = packed(kv_starts_ptr, b, batch, 0)
        query_ptr += q_first.to(tl.int64) * query_s
        dout_ptr += q_first.to(tl.int64) * dout_s
        key_ptr += kv_first.to(tl.int64) * key_s
        value_ptr += kv_first.to(tl.int64) * value_s
        dq_ptr += q_first.to(tl.int64) * (q_heads * D)
        at_b, elements, base = b * 0, 1, h.to(tl.int64) * q_total + q_first
        if BOTTOM_RIGHT:
            low += kv_len - q_len
            high += kv_len - q_len
        fill_behind(dq_ptr, h, q_heads, row, q_len, tiles * ROWS, behind(b, batch), D, ROWS, D_TILE)
        if row >= q_len:
            return
    queries = rows_of(query_ptr, elements, q_heads, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    douts = rows_of(dout_ptr, elements, q_heads, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
    keys = rows_of(key_ptr, elements, kv_heads, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
    values = rows_of(value_ptr, elements, kv_heads, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
    q = load_rows(queries, at_b, h, row, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    dout = load_rows(douts, at_b, h, row, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
    lse, total = statistics(lse_ptr, delta_ptr, base, row, q_len, ROWS)
    rows = (row + tl.arange(0, ROWS))[:, None]
    PRECISE: tl.constexpr = q.dtype == tl.float32
    dq = tl.zeros([ROWS, D_TILE], tl.float32)
    start, full_lo, full_hi, stop = key_blocks(row, q_len, kv_len, low, high, ROWS, COLUMNS, LOW, HIGH)
    STEP: tl.constexpr = COLUMNS if walk_ptr is None else 1
    if walk_ptr is not None:
        span = walk_ptr + (h * walk_h + row // ROWS) * 3
        start, stop = tl.load(span), tl.load(span + 2)
    elif q_segments_ptr is not None:
        first, last = segment_span(
            q_segments_ptr + b.to(tl.int64) * q_segments_b, row + tl.arange(0, ROWS), q_len,
            kv_segments_ptr + b.to(tl.int64) * kv_segments_b, kv_len, 2048,
        )  # fmt: skip
        start = tl.maximum(start, first // COLUMNS * COLUMNS)
        stop = tl.minimum(stop, last)
    for step in tl.range(start, stop, STEP):
        n = place(walk_ptr, step, COLUMNS)
        columns = (n + tl.arange(0, COLUMNS))[None, :]
        k = load_rows(keys, at_b, kv_h, n, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s, t = logits(
            s, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low, high,
            bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
            SCALE, SOFTCAP, LOW, HIGH, EDGE, PRECISE,
        )  # fmt: skip
        if patterns_ptr is not None:
            number = tl.load(walk_ptr + 2 * step + 1)
            s = shown(s, number, patterns_ptr, rows - row, columns - n, ROWS, COLUMNS)
        p = tl.exp2(s - lse[:, None])
        v = load_rows(values, at_b, kv_h, n, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        _, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, KEEP_FROM, RESCALE)
        ds = logit_gradient(p, dp, total[:, None], t, SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(dq_ptr, dq * SCALE, at_b, h, q_heads, row, q_len, D, ROWS, D_TILE, SEQ_FIRST)


@triton.jit
def cast(x_ptr, y_ptr, size, COLUMNS: tl.constexpr):
    """Grid (cdiv(size, COLUMNS),): x in the dtype of y."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < size, other=0.0).to(y_ptr.dtype.element_ty), mask=at < size)
