"""Triton bodies of the softmaxes; `gpu.py` launches them. A program holds whole rows in registers: one read of memory,
one write. Rows that do not fit are walked in tiles, twice: first for the sums, then for the result.
"""

import triton
import triton.language as tl


@triton.jit
def _place(rows, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(offsets, which of them are inside) of a program's rows in `[rows, features]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    keep = (row < rows)[:, None] & (columns < features)[None, :]
    return row.to(tl.int64)[:, None] * features + columns[None, :], keep


@triton.jit
def forward(x_ptr, y_ptr, rows, features, LOG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (cdiv(rows, ROWS),): the softmax of every row, or its logarithm."""
    offsets, keep = _place(rows, features, ROWS, COLUMNS)
    x = tl.load(x_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32)
    shifted = x - tl.max(x, 1)[:, None]  # exponents of at most 0: no overflow
    # Rows past the end are -inf throughout, and -inf - -inf is NaN: `keep` sets them to 0.
    e = tl.where(keep, tl.exp(shifted), 0.0)
    total = tl.sum(e, 1)[:, None]  # [ROWS, 1]
    if LOG:
        y = shifted - tl.log(total)  # not log(y): that loses small probabilities
    else:
        y = e / total
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def backward(source_ptr, dy_ptr, dx_ptr, rows, features, LOG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same grid: dx from y = softmax(x), or, for the logarithm, from x, whose softmax is formed again."""
    offsets, keep = _place(rows, features, ROWS, COLUMNS)
    dy = tl.load(dy_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    if LOG:
        x = tl.load(source_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32)
        e = tl.where(keep, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
        # d log_softmax: dy - softmax(x) * rowsum(dy)
        dx = dy - e * (tl.sum(dy, 1) / tl.sum(e, 1))[:, None]
    else:
        y = tl.load(source_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, 1)[:, None])  # y past the end is 0, and so is dx
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _tile(row, rows, first, features, COLUMNS: tl.constexpr):
    """(offsets, which of them are inside) of the tile that begins at column `first` of each row."""
    columns = first + tl.arange(0, COLUMNS)
    keep = (row < rows)[:, None] & (columns < features)[None, :]
    return row.to(tl.int64)[:, None] * features + columns[None, :], keep


@triton.jit
def _renewed(largest, total, x):
    """(the largest element of each row, `[ROWS, COLUMNS]` sums of exp(x - largest)) after one more tile x. A row that
    is -inf so far has sums of 0.
    """
    new = tl.maximum(largest, tl.max(x, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # a row of -inf so far: -inf - -inf would be NaN
    return new, total * tl.exp(largest - base)[:, None] + tl.exp(x - base[:, None])


@triton.jit
def forward_in_tiles(x_ptr, y_ptr, rows, features, LOG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`forward` of rows of any length (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    # Sums by column: they are added up across the columns once, after the last tile.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, features, COLUMNS):
        offsets, keep = _tile(row, rows, first, features, COLUMNS)
        x = tl.load(x_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32)
        largest, total = _renewed(largest, total, x)
    row_sum = tl.sum(total, 1)[:, None]  # [ROWS, 1]
    for first in tl.range(0, features, COLUMNS):
        offsets, keep = _tile(row, rows, first, features, COLUMNS)
        shifted = tl.load(x_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32) - largest[:, None]
        if LOG:
            y = shifted - tl.log(row_sum)
        else:
            y = tl.exp(shifted) / row_sum
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def backward_in_tiles(
    source_ptr, dy_ptr, dx_ptr, rows, features, LOG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`backward` of rows of any length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, features, COLUMNS):
        offsets, keep = _tile(row, rows, first, features, COLUMNS)
        dy = tl.load(dy_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        if LOG:
            x = tl.load(source_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32)
            largest, total = _renewed(largest, total, x)
            weighted += dy
        else:
            weighted += dy * tl.load(source_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    slope = tl.sum(weighted, 1)  # [ROWS]: rowsum(y * dy), or for the logarithm rowsum(dy)
    if LOG:
        slope /= tl.sum(total, 1)
    for first in tl.range(0, features, COLUMNS):
        offsets, keep = _tile(row, rows, first, features, COLUMNS)
        dy = tl.load(dy_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        if LOG:
            x = tl.load(source_ptr + offsets, mask=keep, other=float("-inf")).to(tl.float32)
            dx = dy - tl.exp(x - largest[:, None]) * slope[:, None]
        else:
            y = tl.load(source_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
            dx = y * (dy - slope[:, None])
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=keep)
