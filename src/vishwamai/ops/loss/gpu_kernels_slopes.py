"""Triton bodies of the linear cross entropy, backward: the gradient of a part of the vocabulary's logits."""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LOG2E, describe, place
from vishwamai.ops.loss.gpu_arguments import Tokens
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
    vocab,
    stride,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Stores the gradient of the columns from `first` on of a tile of logits, from their products `z`, and its sum over
    tokens.

    The pointers, labels and `vocab` entries are those of the tile's first column, and its rows are `stride` apart; rows
    that are not kept have vectors of 0, and so a gradient of 0.
    """
    j = first + tl.arange(0, z.shape[1])
    z = logits(z, bias_ptr, j, vocab, SOFTCAP)
    # softmax from the saved logsumexp; dsum is label smoothing's share
    dz = tl.exp2((z - logsumexp[:, None]) * LOG2E) * dlogsumexp[:, None] + dsum[:, None]
    dz += tl.where(j[None, :] == label[:, None], dlabel[:, None], 0.0)
    if SOFTCAP is not None:
        dz *= 1.0 - z * z * (1.0 / (SOFTCAP * SOFTCAP))  # z is capped: tanh is z / SOFTCAP
    if RAGGED:  # a product of 0 past the end is a logit of 0, whose softmax is not 0
        dz = tl.where((j < vocab)[None, :], dz, 0.0)
    if partial_ptr is not None:
        tl.store(partial_ptr + j, tl.sum(dz, 0))
    offsets = tl.arange(0, z.shape[0])[:, None] * stride + j[None, :]
    tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=keep[:, None])


@triton.jit
def slopes(
    x_ptr,
    weight_ptr,
    bias_ptr,
    of_tokens: Tokens,
    step_ptr,
    dz_ptr,
    partial_ptr,
    GROUPS,
    T,
    V,
    D,
    row_blocks,
    entries,
    bias_stride,
    W_GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (row_blocks * entries / BLOCK_V, GROUPS): the gradient `[GROUPS, T, entries]` of the logits of part `step`
    of the vocabulary, before the cap.

    RAGGED: the vocabulary ends within a tile, whose entries past the end have a gradient of 0; of whole tiles past the
    end nobody reads it. With a bias, `partial` `[GROUPS, row_blocks, entries]` takes the sums over each block of
    tokens.
    """
    group = tl.program_id(1)
    block, column = place(tl.program_id(0), row_blocks, entries // BLOCK_V, GROUP_M)
    row = block * BLOCK_T
    column *= BLOCK_V  # in the part; `entry` is the same in the vocabulary
    entry = column
    if step_ptr is not None:
        entry += tl.load(step_ptr) * entries  # a step from memory: one compiled kernel serves every part
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
        entry,
        W_GROUPS,
        PRECISION,
        TMA,
        BLOCK_T,
        BLOCK_V,
        BLOCK_D,
    )
    i = tl.arange(0, BLOCK_T)
    keep = row + i < T
    offsets = tl.cast(group, tl.int64) * T + row + i
    logsumexp = tl.load(of_tokens.logsumexp_ptr + offsets, mask=keep, other=0.0)
    # All logits of such a token are -inf: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    logsumexp = tl.where(logsumexp == float("-inf"), 0.0, logsumexp)
    dlogsumexp = tl.load(of_tokens.dlogsumexp_ptr + offsets, mask=keep, other=0.0)
    dlabel = tl.load(of_tokens.dlabel_ptr + offsets, mask=keep, other=0.0)
    label = tl.load(of_tokens.labels_ptr + offsets, mask=keep, other=-1)  # -1 matches no entry
    dsum = tl.zeros([BLOCK_T], tl.float32)
    if of_tokens.dsum_ptr is not None:
        dsum = tl.load(of_tokens.dsum_ptr + offsets, mask=keep, other=0.0)
    # From the tile's own corner on, 32 bits hold every offset, and half the registers.
    corner = dz_ptr + (tl.cast(group, tl.int64) * T + row) * entries + column
    sums = partial_ptr
    if partial_ptr is not None:
        # partial sums by block of tokens, added in order
        sums += (tl.cast(group, tl.int64) * row_blocks + block) * entries + column
    bias = bias_ptr
    if bias_ptr is not None:
        bias += tl.cast(group, tl.int64) * bias_stride + entry
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
                    offsets = half * H + quarter * Q
                    _slope(
                        first if quarter == 0 else second,
                        offsets,
                        corner,
                        sums,
                        keep,
                        label - entry,
                        logsumexp,
                        dlogsumexp,
                        dlabel,
                        dsum,
                        bias,
                        V - entry,
                        entries,
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
                    label - entry,
                    logsumexp,
                    dlogsumexp,
                    dlabel,
                    dsum,
                    bias,
                    V - entry,
                    entries,
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
            label - entry,
            logsumexp,
            dlogsumexp,
            dlabel,
            dsum,
            bias,
            V - entry,
            entries,
            SOFTCAP,
            RAGGED,
        )
