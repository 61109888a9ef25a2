"""Triton body of the update of pages; `gpu_update.py` launches it."""

import triton
import triton.language as tl

from vishwamai.ops.paged_attention.gpu_kernels import load_rows, sequence_of


@triton.jit
def _stored(x, scale_ptr, h, STORED: tl.constexpr, MOST: tl.constexpr):
    """`x / scale` as pages hold it: integers rounded to the nearest, 8-bit floats no larger than their largest."""
    if scale_ptr is not None:
        x = tl.div_rn(x.to(tl.float32), tl.load(scale_ptr + h)[:, None] + tl.zeros_like(x).to(tl.float32))
    if MOST is not None:
        x = x.to(tl.float32)
        # Not tl.clamp: a NaN is to stay one.
        x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
        if STORED == tl.int8:
            x = (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to the nearest, ties to even
    return x.to(STORED)


@triton.jit
def _turned(
    x,
    key_ptr,
    row,
    mine,
    cos_ptr,
    sin_ptr,
    position,
    positions,
    PAIRS: tl.constexpr,
    FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """`x`, the key rows that begin at offsets `row`, with its 2 PAIRS columns from FIRST on turned by the angles of
    `position`: each column times its cos, plus or minus the other one of its pair times its sin. NaN past the tables.
    """
    column = tl.arange(0, TILE) - FIRST
    turns = (column >= 0) & (column < 2 * PAIRS)
    if INTERLEAVED:
        pair = column // 2
        first = column % 2 == 0
        partner = tl.where(first, column + 1, column - 1)
    else:
        first = column < PAIRS
        pair = tl.where(first, column, column - PAIRS)
        partner = tl.where(first, column + PAIRS, column - PAIRS)
    # The other column of a pair was read a moment ago: it comes from the L1 cache.
    y = tl.load(key_ptr + row[:, None] + FIRST + partner[None, :], mask=mine[:, None] & turns[None, :], other=0.0)
    offsets = position.to(tl.int64) * PAIRS + pair
    covered = turns & (position < positions)
    cos = tl.load(cos_ptr + offsets, mask=covered, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, mask=covered, other=float("nan")).to(tl.float32)
    sin = tl.where(first, -sin, sin)
    turned = x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]
    return tl.where(turns[None, :], turned.to(x.dtype), x)


@triton.jit
def update(
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    kv_lens_ptr,
    page_indices_ptr,
    cu_q_lens_ptr,
    num_seqs_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    sequences,
    entries,
    pages,
    kv_heads,
    positions,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    v_start,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TILE: tl.constexpr,
    DV_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    PAIRS: tl.constexpr,
    FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (tokens, cdiv(kv_heads, HEADS)): rows `[tokens, kv_heads, K]` of keys, and of values, to their places in the
    pages, which are changed.

    Columns K ... D of a key become 0. With cos and sin, `[positions, PAIRS]`, columns FIRST ... FIRST + 2 PAIRS of a
    key are turned by its position, and rounded, before it is scaled.
    """
    token = tl.program_id(0)
    n = token * 0 + sequences
    if num_seqs_ptr is not None:
        n = tl.minimum(n, tl.load(num_seqs_ptr))
    s = sequence_of(cu_q_lens_ptr, n, token, 1, False, CHUNK)
    if s >= n:
        return
    position = tl.load(kv_lens_ptr + s) - tl.load(cu_q_lens_ptr + s + 1) + token
    if position < 0 or position // PAGE >= entries:
        return
    page = tl.load(page_indices_ptr + s.to(tl.int64) * entries + position // PAGE).to(tl.int64)
    if page < 0 or page >= pages:
        return
    slot = position % PAGE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = head < kv_heads
    head = tl.where(mine, head, 0).to(tl.int64)
    from_row = token.to(tl.int64) * kv_heads + head
    column = tl.arange(0, D_TILE)
    x = load_rows(key_ptr, from_row * K, mine, K, D_TILE)
    if PAIRS > 0:
        x = _turned(
            x,
            key_ptr,
            from_row * K,
            mine,
            cos_ptr,
            sin_ptr,
            position,
            positions,
            PAIRS,
            FIRST,
            INTERLEAVED,
            D_TILE,
        )
    offsets = page * k_page + slot * k_token + head * k_head
    x = _stored(x, k_scale_ptr, head, k_ptr.dtype.element_ty, MOST)
    tl.store(k_ptr + offsets[:, None] + column[None, :], x, mask=mine[:, None] & (column < D)[None, :])
    if value_ptr is not None:
        if v_ptr is None:
            v_ptr = k_ptr + v_start
        column = tl.arange(0, DV_TILE)
        x = load_rows(value_ptr, from_row * DV, mine, DV, DV_TILE)
        offsets = page * v_page + slot * v_token + head * v_head
        x = _stored(x, v_scale_ptr, head, k_ptr.dtype.element_ty, MOST)
        tl.store(v_ptr + offsets[:, None] + column[None, :], x, mask=mine[:, None] & (column < DV)[None, :])


@triton.jit
def put(
    rows_ptr,
    page_ptr,
    slot_ptr,
    pool_ptr_init,
    pool_ptr,
    pages,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (tokens, cdiv(SIZE, TILE)): rows `[tokens, SIZE]` of bytes to their places in the pool
    `[pages, SLOTS, SIZE]`; a row whose page is out of range is not written.
    """
    token = tl.program_id(0)
    page = tl.load(page_ptr + token)
    if (page < 0) | (page >= pages):
        return
    offset = page.to(tl.int64) * SLOTS + tl.load(slot_ptr + token)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(rows_ptr + token.to(tl.int64) * SIZE + column, mask=column < SIZE)
    tl.store(pool_ptr + offset * SIZE + column, x, mask=column < SIZE)
