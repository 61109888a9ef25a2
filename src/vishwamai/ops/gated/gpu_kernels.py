"""Triton bodies of the gated linear unit; `gpu.py` launches them.

One persistent kernel multiplies one left side by two right sides, tile by tile, into two accumulators: the forward pass
gates them, the gradient of the weights keeps both. Matrices are `[groups, rows, columns]`; the second right side lies
beside the first, or in an array of its own.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import activate, derivative, describe, grow, load_tile, place
from vishwamai.ops.gated.gpu_arguments import Strides


@triton.jit
def _second(first_ptr, second_ptr, gap):
    """Where the second of two arrays begins: in its own, or `gap` elements after the first."""
    if second_ptr is not None:
        return second_ptr
    else:
        return first_ptr + tl.cast(gap, tl.int64)


@triton.jit
def products(
    x_ptr,
    gate_ptr,
    up_ptr,
    h_ptr,
    keep_gate_ptr,
    keep_up_ptr,
    GROUPS,
    M,
    N,
    K,
    strides: Strides,
    X_GROUPS: tl.constexpr,
    W_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    TRANSPOSE_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (PROGRAMS,): g = x @ gate and u = x @ up, `[GROUPS, M, N]`; h = activation(g) * u where it is wanted, g and
    u where they are.

    x is `[X_GROUPS, M, K]`, or `[X_GROUPS, K, M]` if TRANSPOSE_X; gate and up `[W_GROUPS, K, N]`. A group axis of 1 is
    shared. SUMMED > 1: the products of that many groups are added to one result (GROUPS is 1).
    """
    up_base = _second(gate_ptr, up_ptr, strides.weight_gap)
    if TRANSPOSE_X:
        X_ROWS, X_COLUMNS = K, M
    else:
        X_ROWS, X_COLUMNS = M, K
    XR: tl.constexpr = BLOCK_K if TRANSPOSE_X else BLOCK_M
    XC: tl.constexpr = BLOCK_M if TRANSPOSE_X else BLOCK_K
    x_stride = tl.cast(M, tl.int64) * K
    x_desc = describe(x_ptr, X_GROUPS, X_ROWS, X_COLUMNS, x_stride, TMA, XR, XC)
    gate_desc = describe(gate_ptr, W_GROUPS, K, N, strides.weight, TMA, BLOCK_K, BLOCK_N)
    up_desc = describe(up_base, W_GROUPS, K, N, strides.weight, TMA, BLOCK_K, BLOCK_N)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), GROUPS * num_m * num_n, PROGRAMS):  # persistent: every PROGRAMS-th tile
        group = tile // (num_m * num_n)
        row, column = place(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        row *= BLOCK_M
        column *= BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # Two accumulators in registers: x is read once, and g and u need not go through memory.
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, SUMMED * num_k):
            if SUMMED > 1:
                member = step // num_k
                k = (step % num_k) * BLOCK_K
            else:
                member = group
                k = step * BLOCK_K
            in_x = member if X_GROUPS > 1 else member * 0  # a shared operand has one group; `* 0` keeps the type
            in_w = member if W_GROUPS > 1 else member * 0
            if TRANSPOSE_X:
                x = load_tile(x_ptr, x_desc, in_x, x_stride, k, row, X_ROWS, X_COLUMNS, TMA, XR, XC).T
            else:
                x = load_tile(x_ptr, x_desc, in_x, x_stride, row, k, X_ROWS, X_COLUMNS, TMA, XR, XC)
            w = load_tile(gate_ptr, gate_desc, in_w, strides.weight, k, column, K, N, TMA, BLOCK_K, BLOCK_N)
            gate = tl.dot(x, w, gate, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]; x is read once for both products
            w = load_tile(up_base, up_desc, in_w, strides.weight, k, column, K, N, TMA, BLOCK_K, BLOCK_N)
            up = tl.dot(x, w, up, input_precision=PRECISION)
        i = tl.arange(0, BLOCK_M)
        j = tl.arange(0, BLOCK_N)
        inside = (row + i < M)[:, None] & (column + j < N)[None, :]
        # From the tile's own corner on, 32 bits hold every offset, and half the registers.
        offsets = i[:, None] * N + j[None, :]
        corner = tl.cast(row, tl.int64) * N + column
        if keep_gate_ptr is not None:
            base = corner + tl.cast(group, tl.int64) * strides.keep
            up_out = _second(keep_gate_ptr, keep_up_ptr, strides.keep_gap)  # kept next to each other, or apart
            tl.store(keep_gate_ptr + base + offsets, gate.to(keep_gate_ptr.dtype.element_ty), mask=inside)
            tl.store(up_out + base + offsets, up.to(keep_gate_ptr.dtype.element_ty), mask=inside)
        if h_ptr is not None:
            h = activate(gate, ACTIVATION) * up  # from float32 sums, before either is rounded
            corner += tl.cast(group, tl.int64) * M * N
            tl.store(h_ptr + corner + offsets, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def slopes(gate_ptr, up_ptr, dh_ptr, d_gate_ptr, d_up_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (cdiv(count, BLOCK),): gradients of both products from that of h, element by element."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    d_gate = dh * up * derivative(gate, ACTIVATION)  # d (act(g) u) / dg
    tl.store(d_gate_ptr + offsets, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    d_up = dh * activate(gate, ACTIVATION)
    tl.store(d_up_ptr + offsets, d_up.to(d_up_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_x(
    d_gate_ptr,
    d_up_ptr,
    gate_ptr,
    up_ptr,
    dx_ptr,
    GROUPS,
    M,
    N,
    K,
    weight_stride,
    weight_gap,
    D_GROUPS: tl.constexpr,
    W_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (PROGRAMS,): d_gate @ gate^T + d_up @ up^T in one accumulator, `[GROUPS, M, N]`, from `[D_GROUPS, M, K]` and
    `[W_GROUPS, N, K]`.
    """
    up_base = _second(gate_ptr, up_ptr, weight_gap)
    d_stride = tl.cast(M, tl.int64) * K
    d_gate_desc = describe(d_gate_ptr, D_GROUPS, M, K, d_stride, TMA, BLOCK_M, BLOCK_K)
    d_up_desc = describe(d_up_ptr, D_GROUPS, M, K, d_stride, TMA, BLOCK_M, BLOCK_K)
    gate_desc = describe(gate_ptr, W_GROUPS, N, K, weight_stride, TMA, BLOCK_N, BLOCK_K)
    up_desc = describe(up_base, W_GROUPS, N, K, weight_stride, TMA, BLOCK_N, BLOCK_K)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), GROUPS * num_m * num_n, PROGRAMS):
        group = tile // (num_m * num_n)
        row, column = place(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        row *= BLOCK_M
        column *= BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in tl.range(0, SUMMED):  # both products grow one accumulator: dx is their sum
            in_d = member if SUMMED > 1 else group
            in_w = in_d if W_GROUPS > 1 else in_d * 0
            acc = grow(
                acc,
                d_gate_ptr,
                d_gate_desc,
                in_d,
                d_stride,
                M,
                K,
                gate_ptr,
                gate_desc,
                in_w,
                weight_stride,
                N,
                K,
                row,
                column,
                0,
                K,
                False,
                True,
                PRECISION,
                TMA,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            acc = grow(
                acc,
                d_up_ptr,
                d_up_desc,
                in_d,
                d_stride,
                M,
                K,
                up_base,
                up_desc,
                in_w,
                weight_stride,
                N,
                K,
                row,
                column,
                0,
                K,
                False,
                True,
                PRECISION,
                TMA,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        i = row + tl.arange(0, BLOCK_M)
        j = column + tl.arange(0, BLOCK_N)
        offsets = (tl.cast(group, tl.int64) * M + i)[:, None] * N + j[None, :]
        tl.store(dx_ptr + offsets, acc.to(dx_ptr.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])
