"""Triton bodies that several operations' kernels share: activations, tiles, the inner loop of a product. An operation's
`gpu_kernels.py` calls them.

A matrix is `[groups, rows, columns]`, contiguous. Tiles come by the copy engine where there is a tensor descriptor,
else by masked loads.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh(x) of float32; PRECISE keeps its relative accuracy near zero too."""
    t = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0)  # an overflow of exp2 gives the limit 1; an underflow -1
    if PRECISE:  # the difference above cancels near zero
        y = x * x
        # the odd Taylor series to x^9, in float32 exact to rounding below 0.2
        series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        t = tl.where(tl.abs(x) < 0.2, series, t)
    return t


@triton.jit
def rounded_product(x, factor):
    """x * factor of float32, rounded by itself: the compiler fuses a plain product with the difference that follows. Of
    huge logits, what is left after the maximum is subtracted is then their rounding: an exponential overflows, or a
    whole row vanishes. A product that is compared with a mean of itself has to be the same number in both.
    """
    return tl.fma(x, factor, 0.0)


@triton.jit
def gaussian(z):
    """(P(x < z), exp(-z^2 / 2)) of a standard normal x, float32, by the fit of `core/activations.py`."""
    # beyond, the tail is 0 in float32, and t^2 stays finite
    t = tl.minimum(tl.abs(z), 14.5, propagate_nan=tl.PropagateNan.ALL)
    u = 1.0 / (1.0 + 0.3 * t)
    p = u * 0.0354237221 - 0.156158388
    p = p * u + 0.204556704
    p = p * u - 0.0520339490
    p = p * u + 0.127691736
    p = p * u + 0.100175962
    p = p * u + 0.120712139
    p = p * u + 0.119632006
    e = tl.exp(-0.5 * t * t)
    tail = e * (p * u)
    return tl.where(z < 0.0, tail, 1.0 - tail), e  # the tail itself on the left, where 1 - p would cancel


@triton.jit
def clamp(z, BOUND: tl.constexpr):
    """z within +-BOUND; a NaN stays."""
    z = tl.minimum(z, BOUND, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(z, -BOUND, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """activation(z) of float32, by the formulas of `core/activations.py`, an infinite z gives the limit;
    tanh is 1 - 2 / (exp(2z) + 1), which overflows to its limits.
    """
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        z = z * z
    elif ACTIVATION == "silu":
        # -inf / inf is NaN: below -110 the quotient is 0 in float32 either way.
        z = tl.maximum(z, -110.0, propagate_nan=tl.PropagateNan.ALL) / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        p, _ = gaussian(z)
        z = tl.maximum(z, -15.0, propagate_nan=tl.PropagateNan.ALL) * p  # -inf * 0 is NaN: p is 0 there
    elif ACTIVATION == "gelu_tanh":
        p = 1.0 / (1.0 + tl.exp(-2 * 0.7978845608028654 * (z + 0.044715 * z * z * z)))
        z = tl.maximum(z, -11.0, propagate_nan=tl.PropagateNan.ALL) * p
    elif ACTIVATION == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    elif ACTIVATION == "tanh":
        z = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
    return z


@triton.jit
def derivative(z, ACTIVATION: tl.constexpr):
    """d activation(z) / dz of float32; relu's is 0 at 0."""
    if ACTIVATION == "relu":
        d = tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        d = 2.0 * tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        z = clamp(z, 110.0)
        s = 1.0 / (1.0 + tl.exp(-z))
        d = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "gelu":
        z = clamp(z, 15.0)
        p, e = gaussian(z)
        d = p + z * 0.3989422804014327 * e
    elif ACTIVATION == "gelu_tanh":
        z = clamp(z, 11.0)
        p = 1.0 / (1.0 + tl.exp(-2 * 0.7978845608028654 * (z + 0.044715 * z * z * z)))
        d = p * (1.0 + 2 * 0.7978845608028654 * z * (1.0 - p) * (1.0 + 3 * 0.044715 * z * z))
    elif ACTIVATION == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-z))
        d = s * (1.0 - s)
    elif ACTIVATION == "tanh":
        t = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
        d = 1.0 - t * t
    else:
        d = tl.full(z.shape, 1.0, tl.float32)
    return d


@triton.jit
def describe(pointer, groups, rows, columns, group_stride, TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The tensor descriptor of a matrix in tiles `[R, C]`, or None where the copy engine cannot take it."""
    descriptor = None
    if TMA:
        descriptor = tl.make_tensor_descriptor(pointer, [groups, rows, columns], [group_stride, columns, 1], [1, R, C])
    return descriptor


@triton.jit
def load_tile(
    pointer,
    descriptor,
    group,
    group_stride,
    row,
    column,
    rows,
    columns,
    TMA: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """The tile `[R, C]` at (row, column) of a matrix, zeros past its end."""
    if TMA:
        return descriptor.load([group, row, column]).reshape(R, C)  # the copy engine fills what lies outside with zeros
    i = row + tl.arange(0, R)
    j = column + tl.arange(0, C)
    offsets = pointer + tl.cast(group, tl.int64) * group_stride + i.to(tl.int64)[:, None] * columns + j[None, :]
    return tl.load(offsets, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0.0)


@triton.jit
def place(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile among `num_m x num_n`: GROUP_M rows are walked column by column, so that programs at work
    share tiles of both operands.
    """
    band = tile // (GROUP_M * num_n)
    height = tl.minimum(num_m - band * GROUP_M, GROUP_M)  # the last band may be lower
    local = tile % (GROUP_M * num_n)
    return band * GROUP_M + local % height, local // height


@triton.jit
def grow(
    acc,
    a_ptr,
    a_desc,
    a_group,
    a_stride,
    a_rows,
    a_columns,
    b_ptr,
    b_desc,
    b_group,
    b_stride,
    b_rows,
    b_columns,
    row,
    column,
    first_b,
    depth,
    TRANSPOSE_A: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc `[BLOCK_M, BLOCK_N]` + a @ b at (row, column), over `depth` of the contracted axis; b's part of it begins at
    `first_b`.

    TRANSPOSE_A: a is stored as `[groups, K, M]`; TRANSPOSE_B: b is stored as `[groups, N, K]`.
    """
    for k in tl.range(0, depth, BLOCK_K):
        if TRANSPOSE_A:
            a = load_tile(a_ptr, a_desc, a_group, a_stride, k, row, a_rows, a_columns, TMA, BLOCK_K, BLOCK_M).T
        else:
            a = load_tile(a_ptr, a_desc, a_group, a_stride, row, k, a_rows, a_columns, TMA, BLOCK_M, BLOCK_K)
        b_row = first_b + k  # b may be a part of a longer matrix, such as some entries of a vocabulary
        if TRANSPOSE_B:
            b = load_tile(b_ptr, b_desc, b_group, b_stride, column, b_row, b_rows, b_columns, TMA, BLOCK_N, BLOCK_K).T
        else:
            b = load_tile(b_ptr, b_desc, b_group, b_stride, b_row, column, b_rows, b_columns, TMA, BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)  # zeros past the ends add nothing, so no step is masked
    return acc


@triton.jit
def sum_rows(partial_ptr, out_ptr, count, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (cdiv(features, COLUMNS), groups): `[groups, count, features]` summed over its second axis, always in the
    same order.
    """
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows side by side, reduced once at the end
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        keep = (row < count)[:, None] & (columns < features)[None, :]
        total += tl.load(
            partial_ptr + (group * count + row)[:, None] * features + columns[None, :], mask=keep, other=0.0
        )
    tl.store(
        out_ptr + group * features + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < features
    )
