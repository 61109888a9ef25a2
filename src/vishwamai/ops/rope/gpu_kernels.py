"""Triton body of the rotary embedding; `gpu.py` launches it.

A program reads the angles of a few positions once and turns several heads of the query and of the key by them.
"""

import triton
import triton.language as tl

from vishwamai.ops.rope.gpu_arguments import Heads


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
        # one wide load, split in registers: two strided loads would read each sector twice
        a, b = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [ROWS, 2 * PAIRS])
        tl.store(y_ptr + y_row[:, None] + feature[None, :], y.to(dtype), mask=inside)
    else:
        inside = keep[:, None] & (pair < pairs)[None, :]
        x_at = x_ptr + x_row[:, None] + pair[None, :]
        y_at = y_ptr + y_row[:, None] + pair[None, :]
        a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)  # halves: each is contiguous
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
    query: Heads,
    key: Heads,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Grid (batch * blocks, groups of heads): each takes ROWS positions of `query.share` heads of the query and
    `key.share` of the key.

    Tables are `[batch or 1, positions, pairs]`, `table_batch` their stride (0 where shared); BACK turns the other way.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    batch = (program // blocks).to(tl.int64)
    row = (program % blocks) * ROWS + tl.arange(0, ROWS)
    keep = row < positions
    row = row.to(tl.int64)  # offsets of long batches pass 2^31
    pair = tl.arange(0, PAIRS)
    table = batch * table_batch + row[:, None] * pairs + pair[None, :]
    inside = keep[:, None] & (pair < pairs)[None, :]
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin  # the inverse rotation is the gradient: a rotation's transpose
    x_row = batch * query.batch + row * query.position
    y_row = batch * query.out_batch + row * query.out_position
    for head in tl.range(group * query.share, tl.minimum(query.total, (group + 1) * query.share)):
        x_start = x_row + tl.cast(head, tl.int64) * query.head
        y_start = y_row + tl.cast(head, tl.int64) * query.out_head
        _head(
            query_ptr, query_out_ptr, x_start, y_start, keep, cos, sin, pairs, features, INTERLEAVED, ROWS, PAIRS, REST
        )
    if key_ptr is not None:
        x_row = batch * key.batch + row * key.position
        y_row = batch * key.out_batch + row * key.out_position
        for head in tl.range(group * key.share, tl.minimum(key.total, (group + 1) * key.share)):
            x_start = x_row + tl.cast(head, tl.int64) * key.head
            y_start = y_row + tl.cast(head, tl.int64) * key.out_head
            _head(
                key_ptr, key_out_ptr, x_start, y_start, keep, cos, sin, pairs, features, INTERLEAVED, ROWS, PAIRS, REST
            )
