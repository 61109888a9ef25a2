"""Triton bodies of attention's backward pass; `gpu.py` launches them.

Dao, "FlashAttention-2" (2023). Probabilities come back from the logsumexp. A program of `key_gradients` owns a block of
keys and walks over the queries that see it; one of `query_gradients` owns a block of queries and walks over the keys,
so that every sum has one order. `key_gradients` can add the queries' gradients too, by the copy engine's reduction: two
products fewer for each block, in an order that differs between runs.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E
from vishwamai.ops.attention.gpu_arguments import Extents, Rows, Starts, Terms, Walk
from vishwamai.ops.attention.gpu_kernels import keep_mask, logits
from vishwamai.ops.attention.gpu_kernels_tiles import (
    NOWHERE,
    behind,
    fill_behind,
    key_blocks,
    load_rows,
    masked_logits,
    of_sequence,
    packed,
    place,
    position_span,
    segment_span,
    shifted,
    source_of,
    store_rows,
)


@triton.jit
def delta(out_rows: Rows, dout_rows: Rows, dlse_ptr, delta_ptr, heads, length, OUTS: tl.constexpr):
    """Grid (cdiv(length, ROWS) * batch * heads,): each row's sum of out * dout, less the logsumexp's cotangent;
    `[batch, heads, length]`.
    """
    ROWS: tl.constexpr = OUTS.ROWS
    tiles = tl.cdiv(length, ROWS)
    plane, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    b, h = plane // heads, plane % heads
    out = load_rows(out_rows.ptr, out_rows, b, h, row, length, OUTS).to(tl.float32)
    dout = load_rows(dout_rows.ptr, dout_rows, b, h, row, length, OUTS).to(tl.float32)
    # delta = rowsum(dO * O) stands for rowsum(P * dP), without the logits.
    total = tl.sum(out * dout, 1)  # [ROWS]
    rows = row + tl.arange(0, ROWS)
    offsets = plane.to(tl.int64) * length + rows
    if dlse_ptr is not None:
        # d lse / d logits is P: its cotangent joins the same term
        total -= tl.load(dlse_ptr + offsets, mask=rows < length, other=0.0).to(tl.float32)
    tl.store(delta_ptr + offsets, total, mask=rows < length)


@triton.jit
def statistics(lse_ptr, delta_ptr, base, row, q_len, ROWS: tl.constexpr):
    """(logsumexp in units of log2, delta) of rows; +inf where nothing is seen, which makes every probability 0."""
    rows = row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + base + rows, mask=rows < q_len, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    return lse, tl.load(delta_ptr + base + rows, mask=rows < q_len, other=0.0)


@triton.jit
def after_dropout(p, dp, seed_ptr, plane, rows, columns, LOGITS: tl.constexpr):
    """(probabilities after dropout, gradient of those before it)."""
    if seed_ptr is not None:
        keep = keep_mask(seed_ptr, plane, rows, columns, LOGITS.KEEP_FROM)
        return tl.where(keep, p * LOGITS.RESCALE, 0.0), tl.where(keep, dp * LOGITS.RESCALE, 0.0)
    else:
        return p, dp


@triton.jit
def logit_gradient(p, dp, total, t, SOFTCAP: tl.constexpr):
    """Gradient of the scaled, biased logits; exactly 0 where the probability is."""
    ds = p * (dp - total)
    if SOFTCAP is not None:
        ds *= 1.0 - t * t  # through the cap: d tanh
    return tl.where(p == 0.0, 0.0, ds)  # 0 * inf is NaN: a hidden position with an infinite dP stays 0


@triton.jit
def key_gradients(
    query: Rows,
    key: Rows,
    value: Rows,
    dout_rows: Rows,
    lse_ptr,
    delta_ptr,
    terms: Terms,
    seed_ptr,
    starts: Starts,
    walk: Walk,
    dq_ptr_init,
    dk_ptr,
    dv_ptr,
    dq_ptr,
    sizes: Extents,
    LOGITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DOUTS: tl.constexpr,
    EDGE: tl.constexpr,
    TMA_DQ: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(kv_len, COLUMNS) * batch * kv_heads,): dk and dv; and dq, `[batch, q_heads, q_len, D]` float32 and
    zero before, if it is given.

    SEQ_FIRST (of dk and dv alone), `starts`: see `gpu_kernels.forward`; dq is `[q_heads, q_total, D]` of packed
    sequences. `walk` is of `gpu_blocks.Walks.by_key`.
    """
    ROWS: tl.constexpr = QUERIES.ROWS
    COLUMNS: tl.constexpr = KEYS.ROWS
    D: tl.constexpr = QUERIES.DIM
    D_TILE: tl.constexpr = QUERIES.COLUMNS
    DV_TILE: tl.constexpr = VALUES.COLUMNS
    tiles = tl.cdiv(sizes.kv_len, COLUMNS)
    # neighbouring programs share a plane's queries in the L2 cache
    kv_plane, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    b, kv_h, group = kv_plane // sizes.kv_heads, kv_plane % sizes.kv_heads, sizes.q_heads // sizes.kv_heads
    at_b, elements, q_first = b, sizes.batch, b * 0
    if starts.q_ptr is not None:
        q_first, q_len = packed(starts.q_ptr, b, sizes.batch, 0)
        kv_first, kv_len = packed(starts.kv_ptr, b, sizes.batch, sizes.kv_total)
        query, dout_rows = shifted(query, q_first), shifted(dout_rows, q_first)
        key, value = shifted(key, kv_first), shifted(value, kv_first)
        sizes = of_sequence(sizes, q_len, kv_len, BOTTOM_RIGHT)
        at_b, elements = b * 0, 1
        if column >= sizes.kv_len:
            return
    queries = source_of(query, elements, sizes.q_heads, sizes.q_len, QUERIES)
    douts = source_of(dout_rows, elements, sizes.q_heads, sizes.q_len, DOUTS)
    end = sizes.kv_len
    if terms.positions_ptr is not None:
        near, behind_near, largest = position_span(
            terms.positions_ptr + b.to(tl.int64) * terms.positions_b, sizes.q_len, column, sizes, COLUMNS, LOGITS.LOW,
            LOGITS.HIGH,
        )  # fmt: skip
        if LOGITS.HIGH:
            end = tl.maximum(1, tl.minimum(end, largest + 1 + sizes.high))
    elif LOGITS.HIGH:
        # at least 1: a descriptor of no rows is not legal
        end = tl.maximum(1, tl.minimum(end, sizes.q_len + sizes.high))
    keys = source_of(key, elements, sizes.kv_heads, end, KEYS)  # 0 past the last key that a query sees
    values = source_of(value, elements, sizes.kv_heads, sizes.kv_len, VALUES)
    if dq_ptr is not None:
        if TMA_DQ:
            # a reduction by descriptor clips rows past q_len of this sequence
            dq_base = dq_ptr + at_b.to(tl.int64) * sizes.q_heads * sizes.q_len * D + q_first.to(tl.int64) * D
            dq_plane = sizes.q_len * D
            if starts.q_ptr is not None:
                dq_plane = sizes.q_total * D
            dqs = tl.make_tensor_descriptor(
                dq_base, [sizes.q_heads, sizes.q_len, D], [dq_plane, D, 1], [1, ROWS, D_TILE]
            )
    k = load_rows(keys, key, at_b, kv_h, column, end, KEYS)  # [COLUMNS, D]
    if terms.kv_segments_ptr is not None and dq_ptr is not None:  # the keys outside of `kv_starts` and `kv_lens`
        positions = column + tl.arange(0, COLUMNS)
        ids = terms.kv_segments_ptr + b.to(tl.int64) * terms.kv_segments_b + positions
        k = tl.where(tl.load(ids, mask=positions < sizes.kv_len, other=0)[:, None] == NOWHERE, 0.0, k)
    # both stay for the whole walk
    v = load_rows(values, value, at_b, kv_h, column, sizes.kv_len, VALUES)  # [COLUMNS, DV]
    columns = (column + tl.arange(0, COLUMNS))[:, None]
    PRECISE: tl.constexpr = k.dtype == tl.float32
    dk = tl.zeros([COLUMNS, D_TILE], tl.float32)
    dv = tl.zeros([COLUMNS, DV_TILE], tl.float32)
    STEP: tl.constexpr = ROWS if walk.ptr is None else 1
    start = 0 * column
    stop = start + sizes.q_len
    if terms.positions_ptr is not None:
        start = near // ROWS * ROWS
        stop = behind_near
    else:
        if LOGITS.HIGH:
            # The first query that sees the block's first key; aligned, so that tiles are whole.
            start = tl.maximum(0, column - sizes.high) // ROWS * ROWS
        if LOGITS.LOW:
            stop = tl.minimum(sizes.q_len, column + COLUMNS - sizes.low)  # past the window of the block's last key
    if terms.q_segments_ptr is not None and walk.ptr is None:
        first, last = segment_span(
            terms.kv_segments_ptr + b.to(tl.int64) * terms.kv_segments_b, column + tl.arange(0, COLUMNS), sizes.kv_len,
            terms.q_segments_ptr + b.to(tl.int64) * terms.q_segments_b, sizes.q_len,
        )  # fmt: skip
        start = tl.maximum(start, first // ROWS * ROWS)
        stop = tl.minimum(stop, last)
    # All query heads of the group add to the same dk and dv, which stay in registers.
    for member in tl.range(0, group):
        h = kv_h * group + member
        plane = b * sizes.q_heads + h
        base = plane.to(tl.int64) * sizes.q_len  # rows of lse, delta and dq are numbered alike
        if starts.q_ptr is not None:
            base = h.to(tl.int64) * sizes.q_total + q_first
        if walk.ptr is not None:
            span = walk.ptr + (h * walk.head + column // COLUMNS) * 3
            start, stop = tl.load(span), tl.load(span + 2)
        for step in tl.range(start, stop, STEP):
            row = place(walk, step, ROWS)
            rows = (row + tl.arange(0, ROWS))[None, :]  # a row vector: logits are transposed here
            q = load_rows(queries, query, at_b, h, row, sizes.q_len, QUERIES)
            lse, total = statistics(lse_ptr, delta_ptr, base, row, sizes.q_len, ROWS)
            # [COLUMNS, ROWS]: the transposed probabilities are then a left operand, in registers.
            s = tl.dot(k, q.T, input_precision=LOGITS.PRECISION)
            s, t = logits(s, rows, columns, b, h, terms, sizes, LOGITS, EDGE, PRECISE, dq_ptr is not None)
            if walk.patterns_ptr is not None:
                number = tl.load(walk.ptr + 2 * step + 1)
                s = masked_logits(s, number, walk.patterns_ptr, rows - row, columns - column, ROWS, COLUMNS)
            # Normalized already: lse is subtracted. Bounded by 1, where the products' order makes s exceed lse; NaN
            # stays NaN.
            p = tl.exp2(tl.minimum(s - lse[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
            dout = load_rows(douts, dout_rows, at_b, h, row, sizes.q_len, DOUTS)
            dp = tl.dot(v, dout.T, input_precision=LOGITS.PRECISION)  # [COLUMNS, ROWS]
            # dV takes P after dropout, dS what is before it
            dropped, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, LOGITS)
            dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=LOGITS.PRECISION)  # [COLUMNS, DV]
            ds = logit_gradient(p, dp, total[None, :], t, LOGITS.SOFTCAP).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=LOGITS.PRECISION)  # [COLUMNS, D]
            if dq_ptr is not None:
                # scaled here: others add to the same rows
                dq = tl.dot(ds.T, k, input_precision=LOGITS.PRECISION) * LOGITS.SCALE  # [ROWS, D]
                if TMA_DQ:
                    # programs of other key blocks add to the same rows
                    dqs.atomic_add([h, row, 0], dq.reshape(1, ROWS, D_TILE))
                else:
                    offsets = (base + row + tl.arange(0, ROWS))[:, None] * D
                    d = tl.arange(0, D_TILE)[None, :]
                    inside = ((row + tl.arange(0, ROWS)) < sizes.q_len)[:, None] & (d < D)
                    # relaxed: only the sum matters, no order of memory
                    tl.atomic_add(dq_ptr + offsets + d, dq, mask=inside, sem="relaxed")
    if starts.q_ptr is not None:  # read again, rather than held in registers all the while
        kv_first, kv_len = packed(starts.kv_ptr, b, sizes.batch, sizes.kv_total)
        sizes = of_sequence(sizes, sizes.q_len, kv_len, False)
        dk_ptr += kv_first.to(tl.int64) * (sizes.kv_heads * D)
        dv_ptr += kv_first.to(tl.int64) * (sizes.kv_heads * VALUES.DIM)
        fill_behind(dk_ptr, kv_h, sizes.kv_heads, column, sizes.kv_len, tiles * COLUMNS, behind(b, sizes.batch), KEYS)
        fill_behind(dv_ptr, kv_h, sizes.kv_heads, column, sizes.kv_len, tiles * COLUMNS, behind(b, sizes.batch), VALUES)
    # ds is the gradient of the scaled logits: one scale for the whole sum
    store_rows(dk_ptr, dk * LOGITS.SCALE, at_b, kv_h, sizes.kv_heads, column, sizes.kv_len, KEYS, SEQ_FIRST)
    store_rows(dv_ptr, dv, at_b, kv_h, sizes.kv_heads, column, sizes.kv_len, VALUES, SEQ_FIRST)


@triton.jit
def query_gradients(
    query: Rows,
    key: Rows,
    value: Rows,
    dout_rows: Rows,
    lse_ptr,
    delta_ptr,
    terms: Terms,
    seed_ptr,
    starts: Starts,
    walk: Walk,
    dq_ptr,
    sizes: Extents,
    LOGITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DOUTS: tl.constexpr,
    EDGE: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """Grid (cdiv(q_len, ROWS) * batch * q_heads,): dq. SEQ_FIRST, `starts`, `walk`: see `gpu_kernels.forward`."""
    ROWS: tl.constexpr = QUERIES.ROWS
    COLUMNS: tl.constexpr = KEYS.ROWS
    D: tl.constexpr = QUERIES.DIM
    D_TILE: tl.constexpr = QUERIES.COLUMNS
    tiles = tl.cdiv(sizes.q_len, ROWS)
    plane = tl.program_id(0) // tiles
    row = (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # under a causal mask the longest first
    b, h = plane // sizes.q_heads, plane % sizes.q_heads
    kv_h = h // (sizes.q_heads // sizes.kv_heads)
    at_b, elements, base = b, sizes.batch, plane.to(tl.int64) * sizes.q_len
    if starts.q_ptr is not None:
        q_first, q_len = packed(starts.q_ptr, b, sizes.batch, sizes.q_total)
        kv_first, kv_len = packed(starts.kv_ptr, b, sizes.batch, 0)
        query, dout_rows = shifted(query, q_first), shifted(dout_rows, q_first)
        key, value = shifted(key, kv_first), shifted(value, kv_first)
        sizes = of_sequence(sizes, q_len, kv_len, BOTTOM_RIGHT)
        dq_ptr += q_first.to(tl.int64) * (sizes.q_heads * D)
        at_b, elements, base = b * 0, 1, h.to(tl.int64) * sizes.q_total + q_first

        fill_behind(dq_ptr, h, sizes.q_heads, row, sizes.q_len, tiles * ROWS, behind(b, sizes.batch), QUERIES)
        if row >= sizes.q_len:
            return
    queries = source_of(query, elements, sizes.q_heads, sizes.q_len, QUERIES)
    douts = source_of(dout_rows, elements, sizes.q_heads, sizes.q_len, DOUTS)
    values = source_of(value, elements, sizes.kv_heads, sizes.kv_len, VALUES)
    q = load_rows(queries, query, at_b, h, row, sizes.q_len, QUERIES)
    dout = load_rows(douts, dout_rows, at_b, h, row, sizes.q_len, DOUTS)  # [ROWS, DV], in registers with q
    lse, total = statistics(lse_ptr, delta_ptr, base, row, sizes.q_len, ROWS)
    rows = (row + tl.arange(0, ROWS))[:, None]
    PRECISE: tl.constexpr = q.dtype == tl.float32
    dq = tl.zeros([ROWS, D_TILE], tl.float32)
    # One loop for partial and whole blocks: the bounds of the whole ones are not used.
    start, full_lo, full_hi, stop = key_blocks(row, b, sizes, terms, ROWS, COLUMNS, LOGITS.LOW, LOGITS.HIGH)
    STEP: tl.constexpr = COLUMNS if walk.ptr is None else 1
    end = sizes.kv_len
    if walk.ptr is not None:
        span = walk.ptr + (h * walk.head + row // ROWS) * 3
        start, stop = tl.load(span), tl.load(span + 2)
    elif terms.q_segments_ptr is not None:
        first, last = segment_span(
            terms.q_segments_ptr + b.to(tl.int64) * terms.q_segments_b, row + tl.arange(0, ROWS), sizes.q_len,
            terms.kv_segments_ptr + b.to(tl.int64) * terms.kv_segments_b, sizes.kv_len,
        )  # fmt: skip
        start = tl.maximum(start, first)
        stop = tl.minimum(stop, last)
    if walk.ptr is None:
        end = stop
    keys = source_of(key, elements, sizes.kv_heads, tl.maximum(end, 1), KEYS)  # as values in `gpu_kernels.forward`
    ENDS: tl.constexpr = EDGE or terms.q_segments_ptr is not None  # blocks that begin anywhere end anywhere
    for step in tl.range(start, stop, STEP):
        n = place(walk, step, COLUMNS)
        columns = (n + tl.arange(0, COLUMNS))[None, :]
        k = load_rows(keys, key, at_b, kv_h, n, end, KEYS)
        s = tl.dot(q, k.T, input_precision=LOGITS.PRECISION)
        s, t = logits(s, rows, columns, b, h, terms, sizes, LOGITS, ENDS, PRECISE)
        if walk.patterns_ptr is not None:
            number = tl.load(walk.ptr + 2 * step + 1)
            s = masked_logits(s, number, walk.patterns_ptr, rows - row, columns - n, ROWS, COLUMNS)
        p = tl.exp2(tl.minimum(s - lse[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
        v = load_rows(values, value, at_b, kv_h, n, sizes.kv_len, VALUES)
        dp = tl.dot(dout, v.T, input_precision=LOGITS.PRECISION)  # [ROWS, COLUMNS]
        _, dp = after_dropout(p, dp, seed_ptr, plane, rows, columns, LOGITS)  # dP alone: dq needs no dropped P
        ds = logit_gradient(p, dp, total[:, None], t, LOGITS.SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=LOGITS.PRECISION)  # [ROWS, D]
    store_rows(dq_ptr, dq * LOGITS.SCALE, at_b, h, sizes.q_heads, row, sizes.q_len, QUERIES, SEQ_FIRST)


@triton.jit
def cast(x_ptr, y_ptr, size, COLUMNS: tl.constexpr):
    """Grid (cdiv(size, COLUMNS),): x in the dtype of y."""
    offsets = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(
        y_ptr + offsets,
        tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(y_ptr.dtype.element_ty),
        mask=offsets < size,
    )
