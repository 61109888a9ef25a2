"""Triton bodies of the linear cross entropy, backward: the products and sums that the gradient of the logits enters."""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import describe, grow, place


@triton.jit
def gradient_of_x(
    dz_ptr,
    weight_ptr,
    step_ptr,
    dx_ptr_init,
    dx_ptr,
    GROUPS,
    T,
    V,
    D,
    entries,
    W_GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (tiles of `[T, D]`, GROUPS): dx, where it starts from something, grows by dz `[GROUPS, T, entries]` times
    part `step` of the entries.
    """
    group = tl.program_id(1)
    in_w = group if W_GROUPS > 1 else group * 0  # a shared weight has one group; `* 0` keeps the type
    num_m = tl.cdiv(T, BLOCK_M)
    row, column = place(tl.program_id(0), num_m, tl.cdiv(D, BLOCK_N), GROUP_M)
    row *= BLOCK_M
    column *= BLOCK_N
    # A tensor, as what the branch assigns: Triton gives a variable one type.
    first = group * 0
    if step_ptr is not None:
        first = tl.load(step_ptr) * entries
    dz_stride = tl.cast(T, tl.int64) * entries  # elements of a group, which may pass 2^31
    weight_stride = tl.cast(V, tl.int64) * D
    dz_desc = describe(dz_ptr, GROUPS, T, entries, dz_stride, TMA, BLOCK_M, BLOCK_K)
    weight_desc = describe(weight_ptr, W_GROUPS, V, D, weight_stride, TMA, BLOCK_K, BLOCK_N)
    i = row + tl.arange(0, BLOCK_M)
    j = column + tl.arange(0, BLOCK_N)
    offsets = (tl.cast(group, tl.int64) * T + i)[:, None] * D + j[None, :]
    inside = (i < T)[:, None] & (j < D)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dx_ptr_init is not None:
        # parts of the vocabulary add up in float32 in memory
        acc = tl.load(dx_ptr_init + offsets, mask=inside, other=0.0)
    acc = grow(
        acc,
        dz_ptr,
        dz_desc,
        group,
        dz_stride,
        T,
        entries,
        weight_ptr,
        weight_desc,
        in_w,
        weight_stride,
        V,
        D,
        row,
        column,
        first,
        tl.minimum(entries, V - first),  # the last part of the vocab may be shorter
        False,
        False,
        PRECISION,
        TMA,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    tl.store(dx_ptr + offsets, acc.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_weight(
    dz_ptr,
    x_ptr,
    step_ptr,
    dweight_ptr_init,
    dweight_ptr,
    GROUPS,
    T,
    V,
    D,
    entries,
    W_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (tiles of `[entries, D]`, W_GROUPS): the rows of part `step` of the entries are dz^T @ x; SUMMED groups are
    added to one. Other rows stay as they are.
    """
    group = tl.program_id(1)
    num_m = tl.cdiv(entries, BLOCK_M)
    row, column = place(tl.program_id(0), num_m, tl.cdiv(D, BLOCK_N), GROUP_M)
    row *= BLOCK_M
    column *= BLOCK_N
    first = group * 0  # the first entry of the part
    if step_ptr is not None:
        first = tl.load(step_ptr) * entries
    dz_stride = tl.cast(T, tl.int64) * entries
    x_stride = tl.cast(T, tl.int64) * D
    dz_desc = describe(dz_ptr, GROUPS, T, entries, dz_stride, TMA, BLOCK_K, BLOCK_M)
    x_desc = describe(x_ptr, GROUPS, T, D, x_stride, TMA, BLOCK_K, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Groups that share the weight add up here, in one order and without atomics.
    for member in tl.range(0, SUMMED):
        weight_group = member if SUMMED > 1 else group
        acc = grow(
            acc,
            dz_ptr,
            dz_desc,
            weight_group,
            dz_stride,
            T,
            entries,
            x_ptr,
            x_desc,
            weight_group,
            x_stride,
            T,
            D,
            row,
            column,
            0,
            T,
            True,
            False,
            PRECISION,
            TMA,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    i = row + tl.arange(0, BLOCK_M)
    j = column + tl.arange(0, BLOCK_N)
    offsets = (tl.cast(group, tl.int64) * V + first + i)[:, None] * D + j[None, :]
    inside = ((i < entries) & (first + i < V))[:, None] & (j < D)[None, :]  # the last part may end before `entries`
    tl.store(dweight_ptr + offsets, acc.to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_bias(
    partial_ptr,
    step_ptr,
    dbias_ptr_init,
    dbias_ptr,
    V,
    entries,
    count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (cdiv(entries, COLUMNS), groups): `[groups, count, entries]` summed over its second axis, always in the same
    order, to part `step` of the entries.
    """
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows side by side, reduced once at the end
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        keep = (row < count)[:, None] & (columns < entries)[None, :]
        total += tl.load(
            partial_ptr + (group * count + row)[:, None] * entries + columns[None, :], mask=keep, other=0.0
        )
    entry = columns
    if step_ptr is not None:
        entry += tl.load(step_ptr) * entries
    tl.store(dbias_ptr + group * V + entry, tl.sum(total, 0), mask=(columns < entries) & (entry < V))


@triton.jit
def rounded(wide_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Grid (cdiv(count, BLOCK),): the same numbers in another dtype."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(wide_ptr + offsets, mask=offsets < count, other=0.0)
    tl.store(out_ptr + offsets, wide.to(out_ptr.dtype.element_ty), mask=offsets < count)
