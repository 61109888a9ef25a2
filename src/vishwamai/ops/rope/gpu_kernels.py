"""Triton body of the rotary embedding; `gpu.py` launches it.

A program reads the angles of a few positions once and turns several heads of the query and of the key by them.
"""

import triton
import triton.language as tl


@triton.jit
def _head(
    x_ptr,
    y_ptr,
    x_row,
    y_row,
    keep,
    cos,
    sin,
    pairs,
    features,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """One head: rows start at offsets `x_row` and `y_row`, `[ROWS]`; `keep` says which are inside; cos and sin are
    `[ROWS, PAIRS]`.
    """
    pair = tl.arange(0, PAIRS)
    dtype = y_ptr.dtype.element_ty
    if INTERLEAVED:
        feature = tl.arange(0, 2 * PAIRS)
        inside = keep[:, None] & (feature < 2 * pairs)[None, :]
        x = tl.load(x_ptr + x_row[:, None] + feature[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [ROWS, 2 * PAIRS])
        tl.store(y_ptr + y_row[:, None] + feature[None, :], y.to(dtype), mask=inside)
    else:
        inside = keep[:, None] & (pair < pairs)[None, :]
        x_at = x_ptr + x_row[:, None] + pair[None, :]
        y_at = y_ptr + y_row[:, None] + pair[None, :]
        a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_at + pairs, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_at, (a * cos - b * sin).to(dtype), mask=inside)
        tl.store(y_at + pairs, (b * cos + a * sin).to(dtype), mask=inside)
    if REST > 0:  # features that do not turn
        feature = 2 * pairs + tl.arange(0, REST)
        inside = keep[:, None] & (feature < features)[None, :]
        x = tl.load(x_ptr + x_row[:, None] + feature[None, :], mask=inside, other=0.0)
        tl.store(y_ptr + y_row[:, None] + feature[None, :], x, mask=inside)


@triton.jit
def turn(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_out_ptr,
    key_out_ptr,
    positions,
    pairs,
    features,
    blocks,
    table_batch,
    query_heads,
    query_share,
    query_batch_stride,
    query_head_stride,
    query_position_stride,
    query_out_batch_stride,
    query_out_head_stride,
    query_out_position_stride,
    key_heads,
    key_share,
    key_batch_stride,
    key_head_stride,
    key_position_stride,
    key_out_batch_stride,
    key_out_head_stride,
    key_out_position_stride,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Grid (batch * blocks, groups of heads): each takes ROWS positions of `query_share` heads of the query and
    `key_share` of the key.

    Tables are `[batch or 1, positions, pairs]`, `table_batch` their stride (0 where shared); BACK turns the other way.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    batch = (program // blocks).to(tl.int64)
    row = (program % blocks) * ROWS + tl.arange(0, ROWS)
    keep = row < positions
    row = row.to(tl.int64)
    pair = tl.arange(0, PAIRS)
    table = batch * table_batch + row[:, None] * pairs + pair[None, :]
    inside = keep[:, None] & (pair < pairs)[None, :]
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    x_row = batch * query_batch_stride + row * query_position_stride
    y_row = batch * query_out_batch_stride + row * query_out_position_stride
    for head in tl.range(group * query_share, tl.minimum(query_heads, (group + 1) * query_share)):
        x_start = x_row + tl.cast(head, tl.int64) * query_head_stride
        y_start = y_row + tl.cast(head, tl.int64) * query_out_head_stride
        _head(
            query_ptr, query_out_ptr, x_start, y_start, keep, cos, sin, pairs, features, INTERLEAVED, ROWS, PAIRS, REST
        )
    if key_ptr is not None:
        x_row = batch * key_batch_stride + row * key_position_stride
        y_row = batch * key_out_batch_stride + row * key_out_position_stride
        for head in tl.range(group * key_share, tl.minimum(key_heads, (group + 1) * key_share)):
            x_start = x_row + tl.cast(head, tl.int64) * key_head_stride
            y_start = y_row + tl.cast(head, tl.int64) * key_out_head_stride
            _head(
                key_ptr, key_out_ptr, x_start, y_start, keep, cos, sin, pairs, features, INTERLEAVED, ROWS, PAIRS, REST
            )
