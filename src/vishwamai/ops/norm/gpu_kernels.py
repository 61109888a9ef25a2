"""Triton bodies of the normalizations; `gpu.py` launches them.

A program holds whole rows in registers, so one read of memory gives the statistics and the result. Layer norm's
variance is that of the centred row (two passes over registers), so a large mean costs no precision.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import rounded_product


@triton.jit
def _standardize(s, keep, features, LAYER: tl.constexpr, EPS: tl.constexpr):
    """(xhat, rstd) of float32 rows; columns past the end are zero and stay so."""
    if LAYER:
        mean = tl.sum(s, 1) / features  # masked columns are 0: the sum is of the features alone
        s = tl.where(keep, s - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(s * s, 1) / features + EPS)  # [ROWS]
    return s * rstd[:, None], rstd


@triton.jit
def _parameter(pointer, group, stride, columns, features):
    """A parameter's row, `[1, COLUMNS]`; every program reads it, so it stays in the cache."""
    offsets = pointer + group * stride + columns
    return tl.load(offsets, mask=columns < features, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]


@triton.jit
def forward(
    x_ptr,
    residual_ptr,
    scale_ptr,
    offset_ptr,
    y_ptr,
    total_ptr,
    rows,
    features,
    scale_stride,
    offset_stride,
    LAYER: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (cdiv(rows, ROWS), groups): y and, with a residual, total, of `[groups, rows, features]`. Strides of shared
    parameters are 0.
    """
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    keep = (row < rows)[:, None] & (columns < features)[None, :]
    offsets = (group * rows + row)[:, None] * features + columns[None, :]  # [ROWS, COLUMNS] int64
    s = tl.load(x_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        # Added in float32 and rounded once, which is what adding in the array's own dtype gives.
        s += tl.load(residual_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        total = s.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=keep)
        s = total.to(tl.float32)
    y, _ = _standardize(s, keep, features, LAYER, EPS)
    if scale_ptr is not None:
        y *= _parameter(scale_ptr, group, scale_stride, columns, features)
    if offset_ptr is not None:
        y += _parameter(offset_ptr, group, offset_stride, columns, features)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def backward(
    s_ptr,
    dy_ptr,
    dtotal_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    doffset_ptr,
    rows,
    features,
    scale_stride,
    band,
    LAYER: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (programs, groups): each program takes a band of `band` rows, ROWS at a time, and leaves one partial row of
    each parameter's gradient.

    `dscale_ptr` and `doffset_ptr` are float32 `[groups, programs, features]`.
    """
    group = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    dscale = tl.zeros([ROWS, COLUMNS], tl.float32)  # by row of the tile: one reduction after the loop, not one a step
    doffset = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(
        program * band, tl.minimum(rows, (program + 1) * band), ROWS, num_stages=2
    ):  # the next rows are on their way
        row = first + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & (columns < features)[None, :]
        offsets = (group * rows + row)[:, None] * features + columns[None, :]
        s = tl.load(s_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        xhat, rstd = _standardize(s, keep, features, LAYER, EPS)
        if dscale_ptr is not None:
            dscale += dy * xhat
        if doffset_ptr is not None:
            doffset += dy
        g = dy
        if scale_ptr is not None:
            # Rounded by itself: g and its mean below must be the same numbers.
            g = rounded_product(dy, _parameter(scale_ptr, group, scale_stride, columns, features))
        dx = g - xhat * (tl.sum(g * xhat, 1) / features)[:, None]  # minus the part along xhat, which the norm takes out
        if LAYER:
            dx -= (tl.sum(g, 1) / features)[:, None]  # and along the mean, which the centring takes out
        dx *= rstd[:, None]
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=keep)
    # a row for each program, added later: no atomics, one order
    partial = (group * tl.num_programs(0) + program) * features + columns
    if dscale_ptr is not None:
        tl.store(dscale_ptr + partial, tl.sum(dscale, 0), mask=columns < features)
    if doffset_ptr is not None:
        tl.store(doffset_ptr + partial, tl.sum(doffset, 0), mask=columns < features)
