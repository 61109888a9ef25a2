"""Triton bodies of the gradients of attention's bias and sinks; `gpu.py` launches them."""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E
from vishwamai.ops.attention.gpu_kernels import logits
from vishwamai.ops.attention.gpu_kernels_backward import after_dropout, logit_gradient, statistics
from vishwamai.ops.attention.gpu_kernels_tiles import load_rows, rows_of, shown


@triton.jit
def bias_gradient(
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
    tiles_ptr,
    patterns_ptr,
    dbias_ptr,
    batch,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
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
    tiles_h,
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
):
    """Grid (tiles of the bias,): the logits' gradients summed over the axes along which the bias is shared (those of stride 0), in one order.

    `tiles_ptr` is `gpu_blocks.Walks.tiles`, of which a head has `tiles_h`.
    """
    owned_b = batch if bias_b != 0 else 1
    owned_h = q_heads if bias_h != 0 else 1
    q_tiles, kv_tiles = tl.cdiv(q_len, ROWS), tl.cdiv(kv_len, COLUMNS)
    owned_q = q_tiles if bias_q != 0 else 1
    owned_k = kv_tiles if bias_k != 0 else 1
    program = tl.program_id(0)
    at_k = program % owned_k
    at_q = program // owned_k % owned_q
    at_h = program // (owned_k * owned_q) % owned_h
    at_b = program // (owned_k * owned_q * owned_h)
    many_h, many_q, many_k = q_heads // owned_h, q_tiles // owned_q, kv_tiles // owned_k
    queries = rows_of(query_ptr, batch, q_heads, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
    douts = rows_of(dout_ptr, batch, q_heads, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
    keys = rows_of(key_ptr, batch, kv_heads, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
    values = rows_of(value_ptr, batch, kv_heads, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
    PRECISE: tl.constexpr = query_ptr.dtype.element_ty == tl.float32
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.range(0, batch // owned_b * many_h * many_q * many_k):
        column = (at_k + i % many_k) * COLUMNS
        row = (at_q + i // many_k % many_q) * ROWS
        h = at_h + i // (many_k * many_q) % many_h
        b = at_b + i // (many_k * many_q * many_h)
        plane, kv_h = b * q_heads + h, h // (q_heads // kv_heads)
        there = True
        if tiles_ptr is not None:
            tile = tl.load(tiles_ptr + h * tiles_h + row // ROWS * kv_tiles + column // COLUMNS)
            there = tile > 0
        if there:
            rows = (row + tl.arange(0, ROWS))[:, None]
            columns = (column + tl.arange(0, COLUMNS))[None, :]
            q = load_rows(queries, b, h, row, q_len, query_b, query_h, query_s, D, ROWS, D_TILE, TMA_Q)
            k = load_rows(keys, b, kv_h, column, kv_len, key_b, key_h, key_s, D, COLUMNS, D_TILE, TMA_K)
            lse, total = statistics(lse_ptr, delta_ptr, plane.to(tl.int64) * q_len, row, q_len, ROWS)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s, t = logits(
                s, rows, columns, b, h, bias_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, q_len, kv_len, low, high,
                bias_b, bias_h, bias_q, bias_k, mask_b, mask_h, mask_q, mask_k, q_segments_b, kv_segments_b,
                SCALE, SOFTCAP, LOW, HIGH, EDGE, PRECISE,
            )  # fmt: skip
            if patterns_ptr is not None:
                s = shown(s, tile - 1, patterns_ptr, rows - row, columns - column, ROWS, COLUMNS)
            p = tl.exp2(s - lse[:, None])
            dout = load_rows(douts, b, h, row, q_len, dout_b, dout_h, dout_s, DV, ROWS, DV_TILE, TMA_DO)
            v = load_rows(values, b, kv_h, column, kv_len, value_b, value_h, value_s, DV, COLUMNS, DV_TILE, TMA_V)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)
            _, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, KEEP_FROM, RESCALE)
            dbias += logit_gradient(p, dp, total[:, None], t, SOFTCAP)
    at = at_b.to(tl.int64) * bias_b + at_h.to(tl.int64) * bias_h
    rows = at_q * ROWS + tl.arange(0, ROWS)
    columns = at_k * COLUMNS + tl.arange(0, COLUMNS)
    kind = dbias_ptr.dtype.element_ty
    if bias_q != 0 and bias_k != 0:
        at += rows.to(tl.int64)[:, None] * bias_q + columns[None, :] * bias_k
        tl.store(dbias_ptr + at, dbias.to(kind), mask=(rows < q_len)[:, None] & (columns < kv_len)[None, :])
    elif bias_q != 0:
        tl.store(dbias_ptr + at + rows.to(tl.int64) * bias_q, tl.sum(dbias, 1).to(kind), mask=rows < q_len)
    elif bias_k != 0:
        tl.store(dbias_ptr + at + columns * bias_k, tl.sum(dbias, 0).to(kind), mask=columns < kv_len)
    else:
        tl.store(dbias_ptr + at, tl.sum(tl.sum(dbias, 1), 0).to(kind))


@triton.jit
def sink_gradient(
    sinks_ptr, lse_ptr, delta_ptr, dsinks_ptr, members, q_heads, q_len, batch_stride, COLUMNS: tl.constexpr
):
    """Grid (sinks,): each sink's gradient, summed over its `members` batch elements (all of them where it is shared) and its rows."""
    program = tl.program_id(0)
    sink = tl.load(sinks_ptr + program).to(tl.float32)
    first = program // q_heads * batch_stride * q_heads + program % q_heads
    total = tl.zeros([COLUMNS], tl.float32)
    for member in tl.range(0, members):
        plane = first + member * q_heads
        for row in tl.range(0, q_len, COLUMNS):
            rows = row + tl.arange(0, COLUMNS)
            at = plane.to(tl.int64) * q_len + rows
            lse = tl.load(lse_ptr + at, mask=rows < q_len, other=float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            share = tl.exp2((sink - lse) * LOG2E)
            total -= share * tl.load(delta_ptr + at, mask=rows < q_len, other=0.0)
    tl.store(dsinks_ptr + program, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))
