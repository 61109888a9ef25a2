"""Triton body of the update of pages; `gpu_update.py` launches it."""

import triton
import triton.language as tl

from vishwamai.ops.paged_attention.gpu_arguments import Pool, Sequences
from vishwamai.ops.paged_attention.gpu_kernels import load_rows, sequence_of


@triton.jit
def _stored(x, scale_ptr, h, STORED: tl.constexpr, MOST: tl.constexpr):
    """`x / scale` as pages hold it: integers rounded to the nearest, 8-bit floats no larger than their largest."""
    if scale_ptr is not None:
        # Rounded to the nearest, as XLA divides: Triton's own division is approximate, and integers would differ.
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
    column = tl.arange(0, TILE) - FIRST  # numbers within the part that turns; negative before it
    turns = (column >= 0) & (column < 2 * PAIRS)
    if INTERLEAVED:
        pair = column // 2
        first = column % 2 == 0
        partner = tl.where(first, column + 1, column - 1)  # (0, 1), (2, 3), ...
    else:
        first = column < PAIRS
        pair = tl.where(first, column, column - PAIRS)
        partner = tl.where(first, column + PAIRS, column - PAIRS)  # halves: (0, PAIRS), (1, PAIRS + 1), ...
    # The other column of a pair was read a moment ago: it comes from the L1 cache.
    y = tl.load(key_ptr + row[:, None] + FIRST + partner[None, :], mask=mine[:, None] & turns[None, :], other=0.0)
    offsets = position.to(tl.int64) * PAIRS + pair
    covered = turns & (position < positions)
    cos = tl.load(cos_ptr + offsets, mask=covered, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, mask=covered, other=float("nan")).to(tl.float32)
    sin = tl.where(first, -sin, sin)  # (a cos - b sin, b cos + a sin)
    turned = x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]
    return tl.where(turns[None, :], turned.to(x.dtype), x)  # rounded before the pages' scale, as without the fusion


@triton.jit
def update(
    k_pool: Pool,
    v_pool: Pool,
    key_ptr,
    value_ptr,
    sequences: Sequences,
    cos_ptr,
    sin_ptr,
    pages,
    kv_heads,
    positions,
    v_start,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    WIDTHS: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    TURN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (tokens, cdiv(kv_heads, HEADS)): rows `[tokens, kv_heads, K]` of keys, and of values, to their places in the
    pages, which are changed.

    Columns K ... D of a key become 0. With cos and sin, `[positions, PAIRS]`, columns FIRST ... FIRST + 2 PAIRS of a
    key are turned by its position, and rounded, before it is scaled.
    """
    token = tl.program_id(0)
    n = token * 0 + sequences.total
    if sequences.num_seqs_ptr is not None:
        n = tl.minimum(n, tl.load(sequences.num_seqs_ptr))
    s = sequence_of(sequences.cu_q_lens_ptr, n, token, 1, False, CHUNK)
    if s >= n:
        return
    position = tl.load(sequences.kv_lens_ptr + s) - tl.load(sequences.cu_q_lens_ptr + s + 1) + token
    if position < 0 or position // PAGE >= sequences.entries:  # no entry of the table is for this position
        return
    page = tl.load(sequences.page_indices_ptr + s.to(tl.int64) * sequences.entries + position // PAGE).to(tl.int64)
    if page < 0 or page >= pages:  # never outside of the pool, whatever the table says
        return
    slot = position % PAGE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = head < kv_heads
    head = tl.where(mine, head, 0).to(tl.int64)  # masked heads still form addresses: legal ones
    from_row = token.to(tl.int64) * kv_heads + head
    column = tl.arange(0, WIDTHS.D_TILE)
    x = load_rows(key_ptr, from_row * K, mine, K, WIDTHS.D_TILE)
    if TURN.PAIRS > 0:
        x = _turned(
            x,
            key_ptr,
            from_row * K,
            mine,
            cos_ptr,
            sin_ptr,
            position,
            positions,
            TURN.PAIRS,
            TURN.FIRST,
            TURN.INTERLEAVED,
            WIDTHS.D_TILE,
        )
    offsets = page * k_pool.page + slot * k_pool.token + head * k_pool.head
    x = _stored(x, k_pool.scale_ptr, head, k_pool.ptr.dtype.element_ty, MOST)
    tl.store(k_pool.ptr + offsets[:, None] + column[None, :], x, mask=mine[:, None] & (column < WIDTHS.D)[None, :])
    if value_ptr is not None:
        if v_pool.ptr is None:
            v_ptr = k_pool.ptr + v_start
        else:
            v_ptr = v_pool.ptr
        column = tl.arange(0, WIDTHS.DV_TILE)
        x = load_rows(value_ptr, from_row * WIDTHS.DV, mine, WIDTHS.DV, WIDTHS.DV_TILE)
        offsets = page * v_pool.page + slot * v_pool.token + head * v_pool.head
        x = _stored(x, v_pool.scale_ptr, head, k_pool.ptr.dtype.element_ty, MOST)
        tl.store(v_ptr + offsets[:, None] + column[None, :], x, mask=mine[:, None] & (column < WIDTHS.DV)[None, :])


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
