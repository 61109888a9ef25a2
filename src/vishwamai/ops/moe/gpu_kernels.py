"""Triton bodies of the grouped product and of its weights' gradient; `gpu.py` launches them.

Persistent: a program walks over tiles by their number, and finds the group of each by the sizes, which it holds in
registers; so the host never waits for them. A group's tiles begin at its first row, wherever that is. Where a matrix's
rows are multiples of 16 bytes its tiles come by the copy engine (tensor descriptors), else by masked loads, as wide as
the rows' length, which is a constant, lets them be.
"""

import triton
import triton.language as tl

from vishwamai.ops.moe.gpu_arguments import Strides


@triton.jit
def _tiles(ptr, planes, rows, columns, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """What `_load` reads `[planes, rows, columns]` through: a tensor descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(
            ptr, [planes, rows, columns], [tl.cast(rows, tl.int64) * columns, columns, 1], [1, R, C]
        )
    else:
        return ptr


@triton.jit
def _load(source, plane, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The tile `[R, C]` at (row, column) of a plane, zeros past its end."""
    if TMA:
        return source.load([plane, row, column]).reshape(R, C)
    else:
        i = row + tl.arange(0, R)
        j = column + tl.arange(0, C)
        offsets = (plane.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
        return tl.load(source + offsets, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0.0)


@triton.jit
def _store(ptr, z, plane, row, column, rows, columns, end, R: tl.constexpr, C: tl.constexpr):
    """Writes rows before `end` of the tile `[R, C]` at (row, column)."""
    i = row + tl.arange(0, R)
    j = column + tl.arange(0, C)
    offsets = (plane.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
    tl.store(ptr + offsets, z.to(ptr.dtype.element_ty), mask=(i < end)[:, None] & (j < columns)[None, :])


@triton.jit
def _finish(ptr, acc, plane, row, column, rows, columns, end, R: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr):
    """`_store`; a wide tile by halves, so that it needs no more registers than there are."""
    if SPLIT:
        left, right = acc.reshape(R, 2, C // 2).permute(0, 2, 1).split()
        _store(ptr, left, plane, row, column, rows, columns, end, R, C // 2)
        _store(ptr, right, plane, row, column + C // 2, rows, columns, end, R, C // 2)
    else:
        _store(ptr, acc, plane, row, column, rows, columns, end, R, C)


@triton.jit
def _place(local, num_i, num_j, SUPER: tl.constexpr):
    """(i, j) of a tile: SUPER rows of tiles are walked column by column, so that the programs at work share tiles of
    both operands.
    """
    band = local // (SUPER * num_j)
    height = tl.minimum(num_i - band * SUPER, SUPER)
    place = local % (SUPER * num_j)
    return band * SUPER + place % height, place // height


@triton.jit
def _unpack(pairs, FOUR: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """`[R, C]` float32: the two numbers of each byte of `[R, C // 2]`, the one in the lower bits first. FOUR is "int"
    or "float" (e2m1).

    Exponent and mantissa of e2m1, moved to where float32 has them, give f, which is the number where it is normal (1
    and more). Below, where the leading one is not there, it is 2 f - 1, the smaller of the two exactly there.
    """
    byte = pairs.to(tl.int32)
    # int32, where a shift to the left and back extends the sign.
    code = tl.join((byte << 28) >> 28, byte >> 4).reshape(R, C)  # both halves sign-extended
    if FOUR == "int":
        return code.to(tl.float32)
    f = (((code & 7) << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    size = tl.minimum(f, f + f - 1.0)  # f >= 1: f is smaller; below, 2 f - 1
    return tl.where(code < 0, -size, size)


@triton.jit
def _scale(ptr, offsets, mask):
    """Scales as float32, 0 where masked; uint8 ones are the bits of e8m0."""
    scale = tl.load(ptr + offsets, mask=mask, other=0)
    if ptr.dtype.element_ty == tl.uint8:
        power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # e8m0 is float32's exponent
        scale = tl.where(scale == 255, float("nan"), power)
    return scale.to(tl.float32)


@triton.jit
def _column_scale(ptr, plane, columns, mask, WIDTH: tl.constexpr):
    """The scales of a matrix's columns `columns`, which have one each, or share one (WIDTH 1)."""
    return _scale(ptr, plane.to(tl.int64) * WIDTH + (columns if WIDTH > 1 else columns * 0), mask)


@triton.jit
def _by_block(
    y,
    ptr,
    plane,
    row,
    column,
    columns,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """The tile y `[R, C]` at (row, column) of a matrix, float32, times the scales `[BLOCKS, WIDTH]` of its blocks of
    SIZE rows; WIDTH is the matrix's columns or 1.
    """
    j = column + tl.arange(0, C)
    place = j if WIDTH > 1 else j * 0
    first = plane.to(tl.int64) * BLOCKS
    if R % SIZE == 0 or SIZE % R == 0:  # tile and block borders meet: few scales, spread by broadcast
        PARTS: tl.constexpr = R // SIZE if R % SIZE == 0 else 1
        block = row // SIZE + tl.arange(0, PARTS)
        mask = (block < BLOCKS)[:, None] & (j < columns)[None, :]
        scale = _scale(ptr, (first + block)[:, None] * WIDTH + place[None, :], mask)
        return y * scale[:, None, :].broadcast_to(PARTS, R // PARTS, C).reshape(R, C)
    else:
        block = (row + tl.arange(0, R)) // SIZE  # a scale for each row: blocks begin anywhere in the tile
        mask = (block < BLOCKS)[:, None] & (j < columns)[None, :]
        return y * _scale(ptr, (first + block)[:, None] * WIDTH + place[None, :], mask)


@triton.jit
def _load_matrix(
    source,
    scale_ptr,
    plane,
    scale_plane,
    row,
    column,
    rows,
    columns,
    dtype: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    FOUR: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TMA: tl.constexpr,
):
    """`_load` of a tile of a matrix that may be quantized, in `dtype`; a scale of a whole column (SIZE 0) is left
    out.
    """
    if FOUR is None:
        y = _load(source, plane, row, column, rows, columns, R, C, TMA)
    else:
        y = _load(source, plane, row, column // 2, rows, columns // 2, R, C // 2, TMA)  # pairs of columns share a byte
        y = _unpack(y, FOUR, R, C)
    if SIZE > 0:
        y = _by_block(y.to(tl.float32), scale_ptr, scale_plane, row, column, columns, BLOCKS, SIZE, WIDTH, R, C)
    return y.to(dtype)


@triton.jit
def rows_product(
    lhs_ptr,
    rhs_ptr,
    scale_ptr,
    sizes_ptr,
    first_ptr,
    out_ptr,
    batch,
    groups,
    M,
    strides: Strides,
    N: tl.constexpr,
    K: tl.constexpr,
    MATRICES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_LHS: tl.constexpr,
    TMA_RHS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (PROGRAMS, batch): out `[batch, M, N]`, each row of lhs `[batch, M, K]` times its group's matrix of rhs
    `[PLANES, K, N]`.

    TRANSPOSE: rhs is `[PLANES, N, K]`. `first_ptr`: the rows where the first groups begin, None for 0. The rows
    after the last group are a group more, whose sums are empty, and so are those before the first: GROUPS is a power of
    two that has entries for both.

    A quantized rhs has scales `[., BLOCKS, WIDTH]` for blocks of SIZE rows of its matrices as they are stored, or, with
    SIZE 0, one for each of their columns; WIDTH is those columns or 1. FOUR: two numbers of 4 bits share a byte.
    """
    BLOCKS: tl.constexpr = MATRICES.BLOCKS
    SIZE: tl.constexpr = MATRICES.SIZE
    WIDTH: tl.constexpr = MATRICES.WIDTH
    FOUR: tl.constexpr = MATRICES.FOUR
    TRANSPOSE: tl.constexpr = MATRICES.TRANSPOSE
    b = tl.program_id(1)
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    lhs = _tiles(lhs_ptr, batch, M, K, BLOCK_M, BLOCK_K, TMA_LHS)
    PAIR: tl.constexpr = 1 if FOUR is None else 2  # numbers in a stored element
    ROWS: tl.constexpr = N if TRANSPOSE else K
    COLUMNS: tl.constexpr = K if TRANSPOSE else N
    R: tl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    C: tl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    rhs = _tiles(rhs_ptr, MATRICES.PLANES, ROWS, COLUMNS // PAIR, R, C // PAIR, TMA_RHS)
    dtype: tl.constexpr = lhs_ptr.dtype.element_ty
    ids = tl.arange(0, GROUPS)
    # read on the device: the host never waits
    sizes = tl.load(sizes_ptr + b * strides.sizes + ids, mask=ids < groups, other=0)
    ends = tl.cumsum(sizes, 0)  # [GROUPS]
    if first_ptr is not None:
        first = tl.load(first_ptr + b * strides.first)
        ends += first
    starts = tl.minimum(ends - sizes, M)  # sizes may promise more rows than there are
    ends = tl.where(ids < groups, tl.minimum(ends, M), M)  # the group behind the last ends with the array
    last = groups
    if first_ptr is not None:
        last = groups + 1  # the rows before the first group, which no group computes
        starts = tl.where(ids == last, 0, starts)
        ends = tl.where(ids == last, tl.minimum(first, M), ends)
    tiles = tl.where(ids <= last, tl.cdiv(ends - starts, BLOCK_M), 0) * num_n  # [GROUPS]: tiles of each group's result
    done = tl.cumsum(tiles, 0)
    # Persistent programs: loads of groups differ, and each program takes every PROGRAMS-th tile of all groups.
    for tile in tl.range(tl.program_id(0), tl.sum(tiles), PROGRAMS):
        group = tl.sum((done <= tile).to(tl.int32))  # groups whose tiles are all before this one
        # A lookup in registers: select and sum, since Triton indexes no register tensor.
        selected = ids == group
        start = tl.sum(tl.where(selected, starts, 0))
        end = tl.sum(tl.where(selected, ends, 0))
        local = tile - tl.sum(tl.where(selected, done - tiles, 0))
        i, j = _place(local, tl.cdiv(end - start, BLOCK_M), num_n, GROUP_M)  # tiles of this group alone
        row = start + i * BLOCK_M  # groups begin at any row: no alignment, no padding
        column = j * BLOCK_N
        matrix = b * strides.rhs + group
        scales = b * strides.scale + group
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.where(group < groups, num_k, 0)):  # no product for rows of no group: zeros
            k = step * BLOCK_K
            x = _load(lhs, b, row, k, M, K, BLOCK_M, BLOCK_K, TMA_LHS)
            y = _load_matrix(
                rhs,
                scale_ptr,
                matrix,
                scales,
                column if TRANSPOSE else k,
                k if TRANSPOSE else column,
                ROWS,
                COLUMNS,
                dtype,
                BLOCKS,
                SIZE,
                WIDTH,
                FOUR,
                R,
                C,
                TMA_RHS,
            )
            if TRANSPOSE:
                # A scale of a stored column is one of K here: it belongs to the depth, and cannot wait for the result.
                y = y.T
                if scale_ptr is not None and SIZE == 0:
                    positions = k + tl.arange(0, BLOCK_K)
                    x = (
                        x.to(tl.float32) * _column_scale(scale_ptr, scales, positions, positions < K, WIDTH)[None, :]
                    ).to(dtype)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if scale_ptr is not None and SIZE == 0 and not TRANSPOSE:
            positions = column + tl.arange(0, BLOCK_N)
            acc = acc * _column_scale(scale_ptr, scales, positions, (positions < N) & (group < groups), WIDTH)[None, :]
        # rows from `end` on belong to the next group's tiles
        _finish(out_ptr, acc, b, row, column, M, N, end, BLOCK_M, BLOCK_N, SPLIT)


@triton.jit
def weights_product(
    lhs_ptr,
    dout_ptr,
    sizes_ptr,
    first_ptr,
    out_ptr,
    batch,
    groups,
    M,
    sizes_stride,
    first_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_LHS: tl.constexpr,
    TMA_DOUT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (PROGRAMS, batch // MEMBERS): out `[batch // MEMBERS, groups, K, N]`, for each group its rows of lhs,
    transposed, times those of dout.

    A tile is BLOCK_M columns of lhs by BLOCK_N of dout, and sums BLOCK_K rows at a time, in their order; MEMBERS batch
    entries add to one result. `first_ptr` as in `rows_product`.
    """
    ids = tl.arange(0, GROUPS)
    num_i = tl.cdiv(K, BLOCK_M)
    num_j = tl.cdiv(N, BLOCK_N)
    lhs = _tiles(lhs_ptr, batch, M, K, BLOCK_K, BLOCK_M, TMA_LHS)
    dout = _tiles(dout_ptr, batch, M, N, BLOCK_K, BLOCK_N, TMA_DOUT)
    for tile in tl.range(tl.program_id(0), groups * num_i * num_j, PROGRAMS):
        group = tile // (num_i * num_j)
        i, j = _place(tile % (num_i * num_j), num_i, num_j, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in tl.range(0, MEMBERS):
            b = tl.program_id(1) * MEMBERS + member
            sizes = tl.load(sizes_ptr + b * sizes_stride + ids, mask=ids < groups, other=0)
            start = tl.sum(tl.where(ids < group, sizes, 0))  # rows of the groups before
            if first_ptr is not None:
                start += tl.load(first_ptr + b * first_stride)
            start = tl.minimum(start, M)
            # an empty group: start = end, and its weights' gradient is 0
            end = tl.minimum(start + tl.sum(tl.where(ids == group, sizes, 0)), M)
            full_end = start + (end - start) // BLOCK_K * BLOCK_K  # the steps before need no mask
            for row in tl.range(start, full_end, BLOCK_K):
                x = _load(lhs, b, row, i * BLOCK_M, M, K, BLOCK_K, BLOCK_M, TMA_LHS)
                y = _load(dout, b, row, j * BLOCK_N, M, N, BLOCK_K, BLOCK_N, TMA_DOUT)
                acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
            if full_end < end:
                # The next group's rows are left out of both factors: one of them may hold a NaN.
                inside = (full_end + tl.arange(0, BLOCK_K) < end)[:, None]
                x = _load(lhs, b, full_end, i * BLOCK_M, M, K, BLOCK_K, BLOCK_M, TMA_LHS)
                y = _load(dout, b, full_end, j * BLOCK_N, M, N, BLOCK_K, BLOCK_N, TMA_DOUT)
                x = tl.where(inside, x, 0.0).to(x.dtype)
                y = tl.where(inside, y, 0.0).to(y.dtype)
                acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        plane = tl.program_id(1) * groups + group
        _finish(out_ptr, acc, plane, i * BLOCK_M, j * BLOCK_N, K, N, K, BLOCK_M, BLOCK_N, SPLIT)


@triton.jit
def cast(x_ptr, y_ptr, size, COLUMNS: tl.constexpr):
    """Grid (cdiv(size, COLUMNS),): x in the dtype of y."""
    offsets = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(
        y_ptr + offsets,
        tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(y_ptr.dtype.element_ty),
        mask=offsets < size,
    )
