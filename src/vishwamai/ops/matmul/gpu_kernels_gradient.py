"""Triton bodies of what surrounds the products in the matmul's backward pass; `gpu_gradient.py` launches them.

A program takes one tile. What it sums over the tile's rows or columns it leaves as a partial row, and `core.gpu_sums`
adds those up.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import derivative


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(strip, tile, strips, tiles, group, rows' numbers, columns' numbers) of this program, of
    `[groups, rows, columns]`.
    """
    strips, tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    tile, strip = program % tiles, program // tiles % strips
    group = (program // (tiles * strips)).to(tl.int64)  # its offset passes 2^31
    return strip, tile, strips, tiles, group, strip * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _scaled(x, of_row, of_column):
    """`x` times the scales of its rows and of its columns; None is 1."""
    if of_row is not None:
        x = x * of_row[:, None]
    if of_column is not None:
        x = x * of_column[None, :]
    return x


@triton.jit
def epilogue_gradient(
    dout_ptr,
    kept_ptr,
    total_ptr,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    dz_a_ptr,
    dz_b_ptr,
    dbias_ptr,
    dscale_a_ptr,
    dscale_b_ptr,
    M,
    N,
    scale_a_group,
    scale_a_row,
    scale_b_group,
    scale_b_column,
    bias_group,
    bias_column,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (strips * tiles * groups,): dz = dout * act'(z) times the scale of a's rows (dz_a), and times that of b's
    columns (dz_b).

    `kept_ptr` is relu's output, else the activation's argument. Partial rows: dbias and dscale_b `[groups, strips, N]`,
    dscale_a `[groups, tiles, M]`; those of the scales from the sums `total_ptr`, and from the activation's argument as
    these sums give it, unrounded.
    """
    strip, tile, strips, tiles, group, i, j = _tile(M, N, ROWS, COLUMNS)
    keep = (i < M)[:, None] & (j < N)[None, :]
    offsets = (group * M + i)[:, None] * N + j[None, :]
    dout = tl.load(dout_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    dz = dout
    if kept_ptr is not None:
        saved = tl.load(kept_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        if ACTIVATION == "relu":  # read off the output, which is kept anyway
            dz = tl.where(saved > 0.0, dz, 0.0)
        else:
            dz *= derivative(saved, ACTIVATION)
    of_row = None
    if scale_a_ptr is not None:
        of_row = tl.load(scale_a_ptr + group * scale_a_group + i * scale_a_row, mask=i < M, other=0.0).to(tl.float32)
    of_column = None
    if scale_b_ptr is not None:
        at_column = scale_b_ptr + group * scale_b_group + j * scale_b_column
        of_column = tl.load(at_column, mask=j < N, other=0.0).to(tl.float32)
    # each factor's gradient takes the other one's scale
    dz_a, dz_b = _scaled(dz, of_row, None), _scaled(dz, None, of_column)
    if dz_a_ptr is not None:
        tl.store(dz_a_ptr + offsets, dz_a.to(dz_a_ptr.dtype.element_ty), mask=keep)
    if dz_b_ptr is not None:
        tl.store(dz_b_ptr + offsets, dz_b.to(dz_b_ptr.dtype.element_ty), mask=keep)
    by_column = (group * strips + strip) * N + j
    if dbias_ptr is not None:
        tl.store(dbias_ptr + by_column, tl.sum(dz, 0), mask=j < N)
    if total_ptr is not None:
        total = tl.load(total_ptr + offsets, mask=keep, other=0).to(tl.float32)
        # The kept argument is rounded; a scale's gradient sums many such terms, so it is formed again from the sums.
        if kept_ptr is not None and ACTIVATION != "relu":
            z = _scaled(total, of_row, of_column)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + group * bias_group + j * bias_column, mask=j < N, other=0.0)
                z += bias.to(tl.float32)[None, :]
            dz = dout * derivative(z, ACTIVATION)
            dz_a, dz_b = _scaled(dz, of_row, None), _scaled(dz, None, of_column)
        if dscale_a_ptr is not None:
            # d out / d scale_a is the unscaled sum times b's scale
            tl.store(dscale_a_ptr + (group * tiles + tile) * M + i, tl.sum(dz_b * total, 1), mask=i < M)
        if dscale_b_ptr is not None:
            tl.store(dscale_b_ptr + by_column, tl.sum(dz_a * total, 0), mask=j < N)


@triton.jit
def scale_gradient(
    gradient_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    groups,
    rows,
    columns,
    scale_group,
    scale_step,
    BY_ROW: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (strips * tiles * x's groups,): dx = the sum over `groups` of scale * gradient, cut off at LARGEST, in the
    dtype of x.

    The gradient is that of scale * x: `[x's groups * groups, rows, columns]`. A scale is of a row (BY_ROW), or of a
    column. Partial rows of the scale's gradient, the sums of gradient * x (where `dscale_ptr` is given):
    `[groups, tiles, rows]` or `[groups, strips, columns]`.
    """
    strip, tile, strips, tiles, x_group, i, j = _tile(rows, columns, ROWS, COLUMNS)
    keep = (i < rows)[:, None] & (j < columns)[None, :]
    offsets = i.to(tl.int64)[:, None] * columns + j[None, :]
    x_offsets = x_group * rows * columns + offsets
    dx = tl.zeros([ROWS, COLUMNS], tl.float32)
    for g in tl.range(0, groups):  # groups that share x add up in order, in registers
        group = x_group * groups + g
        part = tl.load(gradient_ptr + group * rows * columns + offsets, mask=keep, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            if dscale_ptr is not None:
                x = tl.load(x_ptr + x_offsets, mask=keep, other=0.0).to(tl.float32)
                if BY_ROW:
                    tl.store(dscale_ptr + (group * tiles + tile) * rows + i, tl.sum(part * x, 1), mask=i < rows)
                else:
                    tl.store(dscale_ptr + (group * strips + strip) * columns + j, tl.sum(part * x, 0), mask=j < columns)
            if BY_ROW:
                scale = tl.load(scale_ptr + group * scale_group + i * scale_step, mask=i < rows, other=0.0)
                part *= scale.to(tl.float32)[:, None]
            else:
                scale = tl.load(scale_ptr + group * scale_group + j * scale_step, mask=j < columns, other=0.0)
                part *= scale.to(tl.float32)[None, :]
        dx += part
    if LARGEST is not None:  # a plain conversion would give NaN or infinity
        dx = tl.where(dx > LARGEST, LARGEST, tl.where(dx < -LARGEST, -LARGEST, dx))
    tl.store(dx_ptr + x_offsets, dx.to(dx_ptr.dtype.element_ty), mask=keep)
