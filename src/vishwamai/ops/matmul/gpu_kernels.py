"""Triton body of the matrix product with its epilogue; `gpu.py` launches it.

Persistent: as many programs as there are multiprocessors walk over the tiles, in an order that keeps neighbours in the
cache. Where rows are multiples of 16 bytes the tiles come by the copy engine (tensor descriptors), else by masked
loads.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import activate, load_tile
from vishwamai.ops.matmul.gpu_arguments import Vectors


@triton.jit
def _finish(
    z,
    vectors: Vectors,
    out_ptr,
    pre_ptr,
    group,
    row,
    column,
    M,
    N,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The epilogue of the sums `z` `[ROWS, COLUMNS]` at (row, column)."""
    i = row + tl.arange(0, ROWS)
    j = column + tl.arange(0, COLUMNS)
    if vectors.scale_a_ptr is not None:
        scale_offsets = vectors.scale_a_ptr + group * vectors.scale_a_group + i * vectors.scale_a_row
        # scales before the bias, which is stated in the result's units
        z = z * tl.load(scale_offsets, mask=i < M, other=0.0).to(tl.float32)[:, None]
    if vectors.scale_b_ptr is not None:
        scale_offsets = vectors.scale_b_ptr + group * vectors.scale_b_group + j * vectors.scale_b_column
        z = z * tl.load(scale_offsets, mask=j < N, other=0.0).to(tl.float32)[None, :]
    if vectors.bias_ptr is not None:
        z = (
            z
            + tl.load(vectors.bias_ptr + group * vectors.bias_group + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
        )
    scale_offsets = (group.to(tl.int64) * M + i)[:, None] * N + j[None, :]
    keep = (i < M)[:, None] & (j < N)[None, :]
    if pre_ptr is not None:  # the backward pass wants the activation's argument, not its value
        tl.store(pre_ptr + scale_offsets, z.to(pre_ptr.dtype.element_ty), mask=keep)
    if ACTIVATION is not None:
        z = activate(z.to(tl.float32), ACTIVATION)
    tl.store(out_ptr + scale_offsets, z.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def transpose(x_ptr, y_ptr, ROWS, COLUMNS, TILE: tl.constexpr):
    """y `[groups, COLUMNS, ROWS]` of x `[groups, ROWS, COLUMNS]`, a tile by each program."""
    across = tl.cdiv(COLUMNS, TILE)
    i = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    j = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    first = tl.program_id(1).to(tl.int64) * ROWS * COLUMNS  # a group's offset passes 2^31
    keep = (i < ROWS)[:, None] & (j < COLUMNS)[None, :]
    x = tl.load(x_ptr + first + i.to(tl.int64)[:, None] * COLUMNS + j[None, :], mask=keep)
    tl.store(y_ptr + first + j.to(tl.int64)[:, None] * ROWS + i[None, :], x.T, mask=keep.T)


@triton.jit
def _halves(z, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # `split` takes a last axis of 2, so the halves are moved there.
    return z.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    vectors: Vectors,
    out_ptr,
    pre_ptr,
    GROUPS,
    M,
    N,
    K,
    FORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ORDER: tl.constexpr,
):
    """out `[GROUPS, M, N]` = activation(scale_a * scale_b * (a @ b) + bias); pre, if wanted, holds the activation's
    argument.

    a is `[A_GROUPS, M, K]`, or `[A_GROUPS, K, M]` if TRANSPOSE_A; b `[B_GROUPS, K, N]` or `[B_GROUPS, N, K]`; a group
    axis of 1 is shared. SUMMED > 1: the products of that many groups are added to one result (GROUPS is 1).
    """
    A_GROUPS: tl.constexpr = FORM.A_GROUPS
    B_GROUPS: tl.constexpr = FORM.B_GROUPS
    SUMMED: tl.constexpr = FORM.SUMMED
    TRANSPOSE_A: tl.constexpr = FORM.TRANSPOSE_A
    TRANSPOSE_B: tl.constexpr = FORM.TRANSPOSE_B
    GROUP_M: tl.constexpr = ORDER.GROUP_M
    a_desc = None
    b_desc = None
    if TRANSPOSE_A:
        A_ROWS, A_COLUMNS = K, M
    else:
        A_ROWS, A_COLUMNS = M, K
    if TRANSPOSE_B:
        B_ROWS, B_COLUMNS = N, K
    else:
        B_ROWS, B_COLUMNS = K, N
    AR: tl.constexpr = BLOCK_K if TRANSPOSE_A else BLOCK_M
    AC: tl.constexpr = BLOCK_M if TRANSPOSE_A else BLOCK_K
    BR: tl.constexpr = BLOCK_N if TRANSPOSE_B else BLOCK_K
    BC: tl.constexpr = BLOCK_K if TRANSPOSE_B else BLOCK_N
    a_stride = tl.cast(A_ROWS, tl.int64) * A_COLUMNS  # elements of a group
    b_stride = tl.cast(B_ROWS, tl.int64) * B_COLUMNS
    if TMA:
        a_desc = tl.make_tensor_descriptor(a_ptr, [A_GROUPS, A_ROWS, A_COLUMNS], [a_stride, A_COLUMNS, 1], [1, AR, AC])
        b_desc = tl.make_tensor_descriptor(b_ptr, [B_GROUPS, B_ROWS, B_COLUMNS], [b_stride, B_COLUMNS, 1], [1, BR, BC])
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    per_group = num_m * num_n
    for tile in tl.range(tl.program_id(0), GROUPS * per_group, ORDER.PROGRAMS):
        group = tile // per_group
        local = tile % per_group
        # GROUP_M rows of tiles are walked column by column, so that the programs at work share tiles of both operands.
        band = local // (GROUP_M * num_n)
        height = tl.minimum(num_m - band * GROUP_M, GROUP_M)
        place = local % (GROUP_M * num_n)
        row = (band * GROUP_M + place % height) * BLOCK_M
        column = (place // height) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATE)
        for step in tl.range(0, SUMMED * num_k):  # groups and depth in one loop: the accumulator stays in registers
            if SUMMED > 1:
                member = step // num_k
                k = (step % num_k) * BLOCK_K
            else:
                member = group
                k = step * BLOCK_K
            in_a = member if A_GROUPS > 1 else member * 0  # a shared operand has one group; `* 0` keeps the type
            in_b = member if B_GROUPS > 1 else member * 0
            if TRANSPOSE_A:
                a = load_tile(a_ptr, a_desc, in_a, a_stride, k, row, A_ROWS, A_COLUMNS, TMA, AR, AC).T
            else:
                a = load_tile(a_ptr, a_desc, in_a, a_stride, row, k, A_ROWS, A_COLUMNS, TMA, AR, AC)
            if TRANSPOSE_B:
                b = load_tile(b_ptr, b_desc, in_b, b_stride, column, k, B_ROWS, B_COLUMNS, TMA, BR, BC).T
            else:
                b = load_tile(b_ptr, b_desc, in_b, b_stride, k, column, B_ROWS, B_COLUMNS, TMA, BR, BC)
            if COMPUTE is not None:
                a = a.to(COMPUTE)  # a dtype that the tensor cores do not take is widened in registers
                b = b.to(COMPUTE)
            # IMPRECISE bounds how long fp8 sums stay in the tensor core's narrow accumulator
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATE)
        if ORDER.SPLIT:
            # By quarters, so that the epilogue of a wide tile needs no more registers than there are.
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            parts = _halves(left, BLOCK_M, BLOCK_N // 2) + _halves(right, BLOCK_M, BLOCK_N // 2)
        else:
            parts = (acc,)
        PARTS: tl.constexpr = 4 if ORDER.SPLIT else 1
        for part in tl.static_range(PARTS):
            _finish(
                parts[part],
                vectors,
                out_ptr,
                pre_ptr,
                group,
                row,
                column + part * (BLOCK_N // PARTS),
                M,
                N,
                ACTIVATION,
                BLOCK_M,
                BLOCK_N // PARTS,
            )
