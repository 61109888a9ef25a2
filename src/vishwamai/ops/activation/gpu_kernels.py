"""Triton body of the activations; `gpu.py` launches it: one read and one write, the dropout's mask formed in
registers.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import activate, derivative


@triton.jit
def _keep(seed_0, seed_1, rows, columns, threshold):
    """`core.dropout.keep_mask` of rows `[ROWS]` and columns `[COLUMNS]`, uint32."""
    r = rows * tl.cast(0x9E3779B1, tl.uint32) + seed_0
    r = (r ^ (r >> 16)) * tl.cast(0x85EBCA6B, tl.uint32)
    r = r ^ (r >> 13)
    c = columns * tl.cast(0xC2B2AE35, tl.uint32) + seed_1
    c = (c ^ (c >> 16)) * tl.cast(0x27D4EB2F, tl.uint32)
    c = c ^ (c >> 15)
    z = r[:, None] + c[None, :]  # rows and columns are hashed apart: two hashes of a line instead of one a position
    z = (z ^ (z >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
    z = (z ^ (z >> 15)) * tl.cast(0x846CA68B, tl.uint32)
    z = z ^ (z >> 16)
    return (z >> 8).to(tl.int32) >= threshold  # 24 bits, non-negative as int32


@triton.jit
def apply(
    x_ptr,
    dy_ptr,
    rows_ptr,
    columns_ptr,
    seed_ptr,
    out_ptr,
    rows,
    features,
    row_blocks,
    column_blocks,
    rows_stride,
    columns_stride,
    seed_stride,
    threshold,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (groups * row_blocks * column_blocks,): y of x, or, with dy, the gradient of x, all
    `[groups, rows, features]`.

    With a seed, positions are dropped and the rest multiplied by SCALE; `rows_ptr` and `columns_ptr` number them.
    Strides of what groups share are 0.
    """
    program = tl.program_id(0)
    group = (program // (row_blocks * column_blocks)).to(tl.int64)
    row = (program // column_blocks % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < features)[None, :]
    offsets = (group * rows + row)[:, None] * features + column[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if dy_ptr is not None:
        y = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * derivative(x, ACTIVATION)
    else:
        y = activate(x, ACTIVATION)
    if seed_ptr is not None:
        # global numbers: a shard draws what the whole array draws there
        r = tl.load(rows_ptr + group * rows_stride + row, mask=row < rows, other=0).to(tl.uint32)
        c = tl.load(columns_ptr + group * columns_stride + column, mask=column < features, other=0).to(tl.uint32)
        seed_0 = tl.load(seed_ptr + group * seed_stride).to(tl.uint32)
        seed_1 = tl.load(seed_ptr + group * seed_stride + 1).to(tl.uint32)
        y = tl.where(_keep(seed_0, seed_1, r, c, threshold), y * SCALE, 0.0)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)
