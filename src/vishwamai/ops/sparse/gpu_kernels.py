"""Triton bodies of the block-sparse product; `gpu.py` launches them.

Gray, Radford, Kingma, "GPU Kernels for Block-Sparse Weights" (2017). The blocks are listed by the column that they add
to, and a program walks the list of one column, so a block that is not there is never looked at. Where rows are
multiples of 16 bytes and blocks of whole tiles they come by the copy engine (tensor descriptors), else by masked loads.
"""

import triton
import triton.language as tl


@triton.jit
def arrange(
    indices_ptr,
    order_ptr,
    place_ptr,
    starts_ptr,
    blocks,
    targets,
    AXIS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (targets + 1, lists): the blocks of `indices` `[lists, blocks, 2]` in the order of their place along AXIS,
    equals in the caller's order.

    Writes their numbers and their places along the other axis, `[lists, blocks]`, and where each place's blocks start,
    `[lists, targets + 1]`.
    """
    target = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * blocks
    # A counting sort: a program counts the blocks before its own target, so no program waits for another.
    smaller = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(0, blocks, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        # padding sorts behind all targets
        along = tl.load(indices_ptr + (first + i) * 2 + AXIS, mask=i < blocks, other=targets)
        smaller += (along < target).to(tl.int32)
    start = tl.sum(smaller)
    tl.store(starts_ptr + tl.program_id(1).to(tl.int64) * (targets + 1) + target, start)
    for chunk in tl.range(0, blocks, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        along = tl.load(indices_ptr + (first + i) * 2 + AXIS, mask=i < blocks, other=targets + 1)
        across = tl.load(indices_ptr + (first + i) * 2 + (1 - AXIS), mask=i < blocks, other=0)
        matches = (along == target).to(tl.int32)
        to = first + start + tl.cumsum(matches, 0) - 1  # stable: equals keep the caller's order, so sums have one order
        tl.store(order_ptr + to, i, mask=matches != 0)
        tl.store(place_ptr + to, across, mask=matches != 0)
        start += tl.sum(matches)  # the next chunk goes on behind


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
def _load(source, plane, row, column, rows, columns, end, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The tile `[R, C]` at (row, column) of a plane; zeros past its end, and where the copy engine does not serve, from
    column `end` on.
    """
    if TMA:
        return source.load([plane, row, column]).reshape(R, C)
    else:
        i = row + tl.arange(0, R)
        j = column + tl.arange(0, C)
        offsets = (plane.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
        return tl.load(source + offsets, mask=(i < rows)[:, None] & (j < end)[None, :], other=0.0)


@triton.jit
def _store(ptr, z, plane, row, column, rows, columns, end, R: tl.constexpr, C: tl.constexpr):
    """Writes the columns before `end` of the tile `[R, C]` at (row, column)."""
    i = row + tl.arange(0, R)
    j = column + tl.arange(0, C)
    offsets = (plane.to(tl.int64) * rows + i)[:, None] * columns + j[None, :]
    tl.store(ptr + offsets, z.to(ptr.dtype.element_ty), mask=(i < rows)[:, None] & (j < end)[None, :])


@triton.jit
def product(
    dense_ptr,
    values_ptr,
    order_ptr,
    place_ptr,
    starts_ptr,
    out_ptr,
    groups,
    M,
    blocks,
    values_planes,
    values_stride,
    list_stride,
    contracted: tl.constexpr,
    width: tl.constexpr,
    TAKE: tl.constexpr,
    GIVE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_DENSE: tl.constexpr,
    TMA_VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of rows * tiles of columns, groups): out `[groups, M, width]`, dense `[groups, M, contracted]` times
    the blocks.

    A block takes TAKE features of a dense row and gives GIVE columns of the result: values
    `[values_planes, TAKE, GIVE]`, or, with TRANSPOSE, `[values_planes, GIVE, TAKE]`. `values_stride` and `list_stride`
    are values and lists from one group to the next, 0 where all share them.
    """
    g = tl.program_id(1)
    num_m = tl.cdiv(M, BLOCK_M)
    num_j: tl.constexpr = (GIVE + BLOCK_N - 1) // BLOCK_N  # constants: a block's size is part of the program
    num_k: tl.constexpr = (TAKE + BLOCK_K - 1) // BLOCK_K
    # Rows first, so that the programs at work share a column's blocks.
    row = tl.program_id(0) % num_m * BLOCK_M
    tile = tl.program_id(0) // num_m
    target = tile // num_j
    inner = tile % num_j * BLOCK_N
    dense = _tiles(dense_ptr, groups, M, contracted, BLOCK_M, BLOCK_K, TMA_DENSE)
    if TRANSPOSE:
        values = _tiles(values_ptr, values_planes, GIVE, TAKE, BLOCK_N, BLOCK_K, TMA_VALUES)
    else:
        values = _tiles(values_ptr, values_planes, TAKE, GIVE, BLOCK_K, BLOCK_N, TMA_VALUES)
    # [targets + 1]: this column's blocks are starts[0] ... starts[1]
    starts = starts_ptr + g.to(tl.int64) * list_stride * (width // GIVE + 1) + target
    first = g.to(tl.int64) * list_stride * blocks
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # one flat loop over blocks and their tiles: it pipelines across blocks
    for step in tl.range(tl.load(starts) * num_k, tl.load(starts + 1) * num_k):
        entry = first + step // num_k
        k = step % num_k * BLOCK_K
        source = tl.load(place_ptr + entry) * TAKE  # features of the dense row that the block takes
        # values stay in the caller's order: only their numbers are sorted
        number = g * values_stride + tl.load(order_ptr + entry)
        x = _load(dense, g, row, source + k, M, contracted, source + TAKE, BLOCK_M, BLOCK_K, TMA_DENSE)
        if TRANSPOSE:
            y = _load(values, number, inner, k, GIVE, TAKE, TAKE, BLOCK_N, BLOCK_K, TMA_VALUES).T
        else:
            y = _load(values, number, k, inner, TAKE, GIVE, GIVE, BLOCK_K, BLOCK_N, TMA_VALUES)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    column = target * GIVE
    # up to the block's last column: a tile may be wider than the block
    _store(out_ptr, acc, g, row, column + inner, M, width, column + GIVE, BLOCK_M, BLOCK_N)


@triton.jit
def values_gradient(
    left_ptr,
    right_ptr,
    indices_ptr,
    out_ptr,
    groups,
    M,
    blocks,
    list_stride,
    rows: tl.constexpr,
    columns: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA_LEFT: tl.constexpr,
    TMA_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks * tiles of a block, groups // MEMBERS): out `[groups // MEMBERS, blocks, ROWS, COLUMNS]`.

    Block (r, c) is the columns r of left `[groups, M, rows]`, transposed, times the columns c of right
    `[groups, M, columns]`; MEMBERS groups add to one result, in their order.
    """
    num_i: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    num_j: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    number = tl.program_id(0) // (num_i * num_j)
    i = tl.program_id(0) // num_j % num_i * BLOCK_M
    j = tl.program_id(0) % num_j * BLOCK_N
    left = _tiles(left_ptr, groups, M, rows, BLOCK_K, BLOCK_M, TMA_LEFT)
    right = _tiles(right_ptr, groups, M, columns, BLOCK_K, BLOCK_N, TMA_RIGHT)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for member in tl.range(0, MEMBERS):
        g = tl.program_id(1) * MEMBERS + member
        place_ptr = indices_ptr + (g.to(tl.int64) * list_stride * blocks + number) * 2
        column_of_left = tl.load(place_ptr) * ROWS + i
        column_of_right = tl.load(place_ptr + 1) * COLUMNS + j
        for m in tl.range(0, M, BLOCK_K):  # all rows: a sampled product, only blocks that exist are computed
            x = _load(left, g, m, column_of_left, M, rows, rows, BLOCK_K, BLOCK_M, TMA_LEFT)
            y = _load(right, g, m, column_of_right, M, columns, columns, BLOCK_K, BLOCK_N, TMA_RIGHT)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
    plane = tl.program_id(1) * blocks + number
    _store(out_ptr, acc, plane, i, j, ROWS, COLUMNS, COLUMNS, BLOCK_M, BLOCK_N)
