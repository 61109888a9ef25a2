"""Triton bodies of the gradients of attention's bias and sinks; `gpu.py` launches them."""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E
from vishwamai.ops.attention.gpu_arguments import Extents, Rows, Terms, Walk
from vishwamai.ops.attention.gpu_kernels import logits
from vishwamai.ops.attention.gpu_kernels_backward import after_dropout, logit_gradient, statistics
from vishwamai.ops.attention.gpu_kernels_tiles import load_rows, masked_logits, source_of


@triton.jit
def bias_gradient(
    query: Rows,
    key: Rows,
    value: Rows,
    dout_rows: Rows,
    lse_ptr,
    delta_ptr,
    terms: Terms,
    seed_ptr,
    walk: Walk,
    dbias_ptr,
    sizes: Extents,
    LOGITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DOUTS: tl.constexpr,
    EDGE: tl.constexpr,
    OWN: tl.constexpr,
):
    """Grid (tiles of the bias,): the logits' gradients summed over the axes along which the bias is shared (those that
    are not in OWN), in one order.

    `walk` is of `gpu_blocks.Walks.tiles`.
    """
    ROWS: tl.constexpr = QUERIES.ROWS
    COLUMNS: tl.constexpr = KEYS.ROWS
    # Extents of the bias along the axes that it has: one program for each of its tiles.
    owned_b = sizes.batch if OWN.BATCH else 1
    owned_h = sizes.q_heads if OWN.HEADS else 1
    q_tiles, kv_tiles = tl.cdiv(sizes.q_len, ROWS), tl.cdiv(sizes.kv_len, COLUMNS)
    owned_q = q_tiles if OWN.QUERIES else 1
    owned_k = kv_tiles if OWN.KEYS else 1
    program = tl.program_id(0)
    at_k = program % owned_k  # keys innermost: neighbours share the tile of queries
    at_q = program // owned_k % owned_q
    at_h = program // (owned_k * owned_q) % owned_h
    at_b = program // (owned_k * owned_q * owned_h)
    # tiles of logits along each axis that the bias repeats over
    many_h, many_q, many_k = sizes.q_heads // owned_h, q_tiles // owned_q, kv_tiles // owned_k
    queries = source_of(query, sizes.batch, sizes.q_heads, sizes.q_len, QUERIES)
    douts = source_of(dout_rows, sizes.batch, sizes.q_heads, sizes.q_len, DOUTS)
    keys = source_of(key, sizes.batch, sizes.kv_heads, sizes.kv_len, KEYS)
    values = source_of(value, sizes.batch, sizes.kv_heads, sizes.kv_len, VALUES)
    PRECISE: tl.constexpr = query.ptr.dtype.element_ty == tl.float32
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    # The tiles of logits that this tile of the bias is added to.
    for i in tl.range(0, sizes.batch // owned_b * many_h * many_q * many_k):
        column = (at_k + i % many_k) * COLUMNS
        row = (at_q + i // many_k % many_q) * ROWS
        h = at_h + i // (many_k * many_q) % many_h
        b = at_b + i // (many_k * many_q * many_h)
        plane, kv_h = b * sizes.q_heads + h, h // (sizes.q_heads // sizes.kv_heads)
        visible = True  # a tensor where there is a walk, a constant otherwise
        if walk.ptr is not None:
            # 0: no position is seen; else the pattern's number plus 1
            tile = tl.load(walk.ptr + h * walk.head + row // ROWS * kv_tiles + column // COLUMNS)
            visible = tile > 0
        if visible:
            rows = (row + tl.arange(0, ROWS))[:, None]
            columns = (column + tl.arange(0, COLUMNS))[None, :]
            q = load_rows(queries, query, b, h, row, sizes.q_len, QUERIES)
            k = load_rows(keys, key, b, kv_h, column, sizes.kv_len, KEYS)
            lse, total = statistics(lse_ptr, delta_ptr, plane.to(tl.int64) * sizes.q_len, row, sizes.q_len, ROWS)
            s = tl.dot(q, k.T, input_precision=LOGITS.PRECISION)
            s, t = logits(s, rows, columns, b, h, terms, sizes, LOGITS, EDGE, PRECISE)
            if walk.patterns_ptr is not None:
                s = masked_logits(s, tile - 1, walk.patterns_ptr, rows - row, columns - column, ROWS, COLUMNS)
            # At most 1: products in another order than the forward pass may exceed lse. NaN stays NaN.
            p = tl.exp2(tl.minimum(s - lse[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
            dout = load_rows(douts, dout_rows, b, h, row, sizes.q_len, DOUTS)
            v = load_rows(values, value, b, kv_h, column, sizes.kv_len, VALUES)
            dp = tl.dot(dout, v.T, input_precision=LOGITS.PRECISION)
            _, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, LOGITS)
            # A bias that is added after the cap is not differentiated through it.
            if LOGITS.BIAS_AFTER:
                dbias += logit_gradient(p, dp, total[:, None], t, None)
            else:
                dbias += logit_gradient(p, dp, total[:, None], t, LOGITS.SOFTCAP)
    offsets = at_b.to(tl.int64) * terms.bias_b + at_h.to(tl.int64) * terms.bias_h
    rows = at_q * ROWS + tl.arange(0, ROWS)
    columns = at_k * COLUMNS + tl.arange(0, COLUMNS)
    kind = dbias_ptr.dtype.element_ty
    if OWN.QUERIES and OWN.KEYS:
        offsets += rows.to(tl.int64)[:, None] * terms.bias_q + columns[None, :] * terms.bias_k
        tl.store(
            dbias_ptr + offsets, dbias.to(kind), mask=(rows < sizes.q_len)[:, None] & (columns < sizes.kv_len)[None, :]
        )
    elif OWN.QUERIES:
        tl.store(
            dbias_ptr + offsets + rows.to(tl.int64) * terms.bias_q, tl.sum(dbias, 1).to(kind), mask=rows < sizes.q_len
        )
    elif OWN.KEYS:
        tl.store(dbias_ptr + offsets + columns * terms.bias_k, tl.sum(dbias, 0).to(kind), mask=columns < sizes.kv_len)
    else:
        # one number: a bias of head and batch alone
        tl.store(dbias_ptr + offsets, tl.sum(tl.sum(dbias, 1), 0).to(kind))


@triton.jit
def sink_gradient(
    sinks_ptr, lse_ptr, delta_ptr, dsinks_ptr, members, q_heads, q_len, batch_stride, COLUMNS: tl.constexpr
):
    """Grid (sinks,): each sink's gradient, summed over its `members` batch elements (all of them where it is shared)
    and its rows.
    """
    program = tl.program_id(0)
    sink = tl.load(sinks_ptr + program).to(tl.float32)
    first = program // q_heads * batch_stride * q_heads + program % q_heads
    total = tl.zeros([COLUMNS], tl.float32)
    for member in tl.range(0, members):
        plane = first + member * q_heads
        for row in tl.range(0, q_len, COLUMNS):
            rows = row + tl.arange(0, COLUMNS)
            offsets = plane.to(tl.int64) * q_len + rows
            lse = tl.load(lse_ptr + offsets, mask=rows < q_len, other=float("inf"))  # +inf past the end: a share of 0
            lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a row that sees nothing: a share of 0
            share = tl.exp2((sink - lse) * LOG2E)
            # a sink has no value: dP is 0, and dS = -P * delta
            total -= share * tl.load(delta_ptr + offsets, mask=rows < q_len, other=0.0)
    tl.store(dsinks_ptr + program, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))
