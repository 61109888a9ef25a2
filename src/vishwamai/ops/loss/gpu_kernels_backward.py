"""Triton bodies of the linear cross entropy, backward: the slopes of the logits, a part of the vocabulary at a time, and the products that they enter."""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E, describe, grow, place
from vishwamai.ops.loss.gpu_kernels import logits, products


@triton.jit
def _slope(
    z,
    first,
    dz_ptr,
    partial_ptr,
    keep,
    label,
    logsumexp,
    dlogsumexp,
    dlabel,
    dsum,
    bias_ptr,
    known,
    stride,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Stores the gradient of the columns from `first` on of a tile of logits, from their products `z`, and its sum over tokens.

    The pointers, labels and `known` words are those of the tile's first column, and its rows are `stride` apart; rows that are not kept have vectors of
    0, and so a gradient of 0.
    """
    j = first + tl.arange(0, z.shape[1])
    z = logits(z, bias_ptr, j, known, SOFTCAP)
    dz = tl.exp2((z - logsumexp[:, None]) * LOG2E) * dlogsumexp[:, None] + dsum[:, None]
    dz += tl.where(j[None, :] == label[:, None], dlabel[:, None], 0.0)
    if SOFTCAP is not None:
        dz *= 1.0 - z * z * (1.0 / (SOFTCAP * SOFTCAP))
    if RAGGED:
        dz = tl.where((j < known)[None, :], dz, 0.0)
    if partial_ptr is not None:
        tl.store(partial_ptr + j, tl.sum(dz, 0))
    within = tl.arange(0, z.shape[0])[:, None] * stride + j[None, :]
    tl.store(dz_ptr + within, dz.to(dz_ptr.dtype.element_ty), mask=keep[:, None])


@triton.jit
def slopes(
    x_ptr,
    weight_ptr,
    bias_ptr,
    labels_ptr,
    logsumexp_ptr,
    dlogsumexp_ptr,
    dlabel_ptr,
    dsum_ptr,
    step_ptr,
    dz_ptr,
    partial_ptr,
    GROUPS,
    T,
    V,
    D,
    row_blocks,
    words,
    bias_stride,
    W_GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUPER_M: tl.constexpr,
):
    """Grid (row_blocks * words / BLOCK_V, GROUPS): the gradient `[GROUPS, T, words]` of the logits of part `step` of the vocabulary, before the cap.

    RAGGED: the vocabulary ends within a tile, whose words past the end have a gradient of 0; of whole tiles past the end nobody reads it. With a bias, `partial` `[GROUPS, row_blocks, words]` takes the sums over each block of tokens.
    """
    group = tl.program_id(1)
    block, column = place(tl.program_id(0), row_blocks, words // BLOCK_V, SUPER_M)
    row = block * BLOCK_T
    column *= BLOCK_V
    word = column
    if step_ptr is not None:
        word += tl.load(step_ptr) * words
    x_desc = describe(x_ptr, GROUPS, T, D, tl.cast(T, tl.int64) * D, TMA, BLOCK_T, BLOCK_D)
    weight_desc = describe(weight_ptr, W_GROUPS, V, D, tl.cast(V, tl.int64) * D, TMA, BLOCK_V, BLOCK_D)
    z = products(
        x_ptr,
        x_desc,
        weight_ptr,
        weight_desc,
        group,
        T,
        V,
        D,
        row,
        word,
        W_GROUPS,
        PRECISION,
        TMA,
        BLOCK_T,
        BLOCK_V,
        BLOCK_D,
    )
    i = tl.arange(0, BLOCK_T)
    keep = row + i < T
    at = tl.cast(group, tl.int64) * T + row + i
    logsumexp = tl.load(logsumexp_ptr + at, mask=keep, other=0.0)
    logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp)
    dlogsumexp = tl.load(dlogsumexp_ptr + at, mask=keep, other=0.0)
    dlabel = tl.load(dlabel_ptr + at, mask=keep, other=0.0)
    label = tl.load(labels_ptr + at, mask=keep, other=-1)
    dsum = tl.zeros([BLOCK_T], tl.float32)
    if dsum_ptr is not None:
        dsum = tl.load(dsum_ptr + at, mask=keep, other=0.0)
    # From the tile's own corner on, 32 bits hold every offset, and half the registers.
    corner = dz_ptr + (tl.cast(group, tl.int64) * T + row) * words + column
    sums = partial_ptr
    if partial_ptr is not None:
        sums += (tl.cast(group, tl.int64) * row_blocks + block) * words + column
    bias = bias_ptr
    if bias_ptr is not None:
        bias += tl.cast(group, tl.int64) * bias_stride + word
    if BLOCK_V >= 256:
        # By parts, so that the slope of a wide tile needs no more registers than there are; the cap's take the most.
        H: tl.constexpr = BLOCK_V // 2
        Q: tl.constexpr = BLOCK_V // 4
        left, right = z.reshape(BLOCK_T, 2, H).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            part = left if half == 0 else right
            if SOFTCAP is not None:
                first, second = part.reshape(BLOCK_T, 2, Q).permute(0, 2, 1).split()
                for quarter in tl.static_range(2):
                    at = half * H + quarter * Q
                    _slope(
                        first if quarter == 0 else second,
                        at,
                        corner,
                        sums,
                        keep,
                        label - word,
                        logsumexp,
                        dlogsumexp,
                        dlabel,
                        dsum,
                        bias,
                        V - word,
                        words,
                        SOFTCAP,
                        RAGGED,
                    )
            else:
                _slope(
                    part,
                    half * H,
                    corner,
                    sums,
                    keep,
                    label - word,
                    logsumexp,
                    dlogsumexp,
                    dlabel,
                    dsum,
                    bias,
                    V - word,
                    words,
                    SOFTCAP,
                    RAGGED,
                )
    else:
        _slope(
            z,
            0,
            corner,
            sums,
            keep,
            label - word,
            logsumexp,
            dlogsumexp,
            dlabel,
            dsum,
            bias,
            V - word,
            words,
            SOFTCAP,
            RAGGED,
        )


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
    words,
    W_GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUPER_M: tl.constexpr,
):
    """Grid (tiles of `[T, D]`, GROUPS): dx, where it starts from something, grows by dz `[GROUPS, T, words]` times part `step` of the words."""
    group = tl.program_id(1)
    in_w = group if W_GROUPS > 1 else group * 0
    num_m = tl.cdiv(T, BLOCK_M)
    row, column = place(tl.program_id(0), num_m, tl.cdiv(D, BLOCK_N), SUPER_M)
    row *= BLOCK_M
    column *= BLOCK_N
    first = group * 0
    if step_ptr is not None:
        first = tl.load(step_ptr) * words
    dz_stride = tl.cast(T, tl.int64) * words
    weight_stride = tl.cast(V, tl.int64) * D
    dz_desc = describe(dz_ptr, GROUPS, T, words, dz_stride, TMA, BLOCK_M, BLOCK_K)
    weight_desc = describe(weight_ptr, W_GROUPS, V, D, weight_stride, TMA, BLOCK_K, BLOCK_N)
    i = row + tl.arange(0, BLOCK_M)
    j = column + tl.arange(0, BLOCK_N)
    at = (tl.cast(group, tl.int64) * T + i)[:, None] * D + j[None, :]
    inside = (i < T)[:, None] & (j < D)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dx_ptr_init is not None:
        acc = tl.load(dx_ptr_init + at, mask=inside, other=0.0)
    acc = grow(
        acc,
        dz_ptr,
        dz_desc,
        group,
        dz_stride,
        T,
        words,
        weight_ptr,
        weight_desc,
        in_w,
        weight_stride,
        V,
        D,
        row,
        column,
        first,
        tl.minimum(words, V - first),
        False,
        False,
        PRECISION,
        TMA,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    tl.store(dx_ptr + at, acc.to(dx_ptr.dtype.element_ty), mask=inside)


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
    words,
    W_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUPER_M: tl.constexpr,
):
    """Grid (tiles of `[words, D]`, W_GROUPS): the rows of part `step` of the words are dz^T @ x; SUMMED groups are added to one. Other rows stay as they are."""
    group = tl.program_id(1)
    num_m = tl.cdiv(words, BLOCK_M)
    row, column = place(tl.program_id(0), num_m, tl.cdiv(D, BLOCK_N), SUPER_M)
    row *= BLOCK_M
    column *= BLOCK_N
    first = group * 0
    if step_ptr is not None:
        first = tl.load(step_ptr) * words
    dz_stride = tl.cast(T, tl.int64) * words
    x_stride = tl.cast(T, tl.int64) * D
    dz_desc = describe(dz_ptr, GROUPS, T, words, dz_stride, TMA, BLOCK_K, BLOCK_M)
    x_desc = describe(x_ptr, GROUPS, T, D, x_stride, TMA, BLOCK_K, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for member in tl.range(0, SUMMED):
        one = member if SUMMED > 1 else group
        acc = grow(
            acc,
            dz_ptr,
            dz_desc,
            one,
            dz_stride,
            T,
            words,
            x_ptr,
            x_desc,
            one,
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
    at = (tl.cast(group, tl.int64) * V + first + i)[:, None] * D + j[None, :]
    inside = ((i < words) & (first + i < V))[:, None] & (j < D)[None, :]
    tl.store(dweight_ptr + at, acc.to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_bias(
    partial_ptr,
    step_ptr,
    dbias_ptr_init,
    dbias_ptr,
    V,
    words,
    count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (cdiv(words, COLUMNS), groups): `[groups, count, words]` summed over its second axis, always in the same order, to part `step` of the words."""
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        keep = (row < count)[:, None] & (columns < words)[None, :]
        total += tl.load(partial_ptr + (group * count + row)[:, None] * words + columns[None, :], mask=keep, other=0.0)
    word = columns
    if step_ptr is not None:
        word += tl.load(step_ptr) * words
    tl.store(dbias_ptr + group * V + word, tl.sum(total, 0), mask=(columns < words) & (word < V))


@triton.jit
def rounded(wide_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Grid (cdiv(count, BLOCK),): the same numbers in another dtype."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(wide_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, wide.to(out_ptr.dtype.element_ty), mask=at < count)
