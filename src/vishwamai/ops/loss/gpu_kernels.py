"""Triton bodies of the linear cross entropy, forward, and what both passes share; `gpu.py` launches them.

Logits `z = x @ weight^T` live in registers, a tile `[BLOCK_T, BLOCK_V]` at a time; forward, a program walks over the
vocabulary entries of its split and keeps a running maximum and sum for each token. Matrices are
`[groups, rows, columns]`, and a group axis of 1 is shared.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E, describe, grow

LOWEST = tl.constexpr(-1e30)  # finite, so that a logit of -inf gives exp(-inf) = 0 and never exp(-inf + inf)


@triton.jit
def products(
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
    W_GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x @ weight^T `[BLOCK_T, BLOCK_V]` of the tokens from `row` and the entries from `entry` on; 0 past the last
    entry.
    """
    return grow(
        tl.zeros([BLOCK_T, BLOCK_V], tl.float32),
        x_ptr,
        x_desc,
        group,
        tl.cast(T, tl.int64) * D,
        T,
        D,
        weight_ptr,
        weight_desc,
        group if W_GROUPS > 1 else group * 0,
        tl.cast(V, tl.int64) * D,
        V,
        D,
        row,
        entry,
        0,
        D,
        False,
        True,
        PRECISION,
        TMA,
        BLOCK_T,
        BLOCK_V,
        BLOCK_D,
    )


@triton.jit
def logits(z, bias_ptr, j, vocab, SOFTCAP: tl.constexpr):
    """The logits of products: with the bias of their columns `j`, of which `vocab` are in the vocabulary, and
    capped.
    """
    if bias_ptr is not None:
        z += tl.load(bias_ptr + j, mask=j < vocab, other=0.0)[None, :]
    if SOFTCAP is not None:
        # cap * tanh(z / cap), whose exponential overflows to the limit
        z = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(z * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0)
    return z


@triton.jit
def forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    labels_ptr,
    logsumexp_ptr,
    label_logit_ptr,
    logit_sum_ptr,
    GROUPS,
    T,
    V,
    D,
    row_blocks,
    split_vocab,
    bias_stride,
    W_GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (row_blocks * splits, GROUPS): logsumexp, label's logit and sum of the logits of each split of `split_vocab`
    entries, `[splits, GROUPS, T]`.
    """
    # Blocks of rows are innermost: programs at work share a split's rows of the weight, the larger operand.
    group = tl.program_id(1)
    row = (tl.program_id(0) % row_blocks) * BLOCK_T
    split = tl.program_id(0) // row_blocks
    x_desc = describe(x_ptr, GROUPS, T, D, tl.cast(T, tl.int64) * D, TMA, BLOCK_T, BLOCK_D)
    weight_desc = describe(weight_ptr, W_GROUPS, V, D, tl.cast(V, tl.int64) * D, TMA, BLOCK_V, BLOCK_D)
    i = row + tl.arange(0, BLOCK_T)
    offsets = tl.cast(group, tl.int64) * T + i
    label = tl.load(labels_ptr + offsets, mask=i < T, other=-1)
    m = tl.full([BLOCK_T], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_T], tl.float32)
    at_label = tl.zeros([BLOCK_T], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    first = split * split_vocab
    bias = bias_ptr
    if bias_ptr is not None:
        bias += tl.cast(group, tl.int64) * bias_stride
    for entry in tl.range(first, tl.minimum(first + split_vocab, V), BLOCK_V):
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
        j = entry + tl.arange(0, BLOCK_V)
        z = logits(z, bias, j, V, SOFTCAP)
        # exactly one tile holds the label: a select, not a gather
        at_label += tl.sum(tl.where(j[None, :] == label[:, None], z, 0.0), 1)
        if logit_sum_ptr is not None:
            total += tl.sum(tl.where((j < V)[None, :], z, 0.0) if RAGGED else z, 1)
        if RAGGED:  # after the label and the sum: padding counts in neither, and must not enter the maximum
            z = tl.where((j < V)[None, :], z, float("-inf"))
        m_new = tl.maximum(m, tl.max(z, 1))
        p = tl.exp2((z - m_new[:, None]) * LOG2E)
        l = l * tl.exp2((m - m_new) * LOG2E) + tl.sum(p, 1)  # m starts finite, so that the first factor is 0, never NaN
        m = m_new
    offsets += tl.cast(split, tl.int64) * GROUPS * T
    tl.store(logsumexp_ptr + offsets, m + tl.log2(l) * LN2, mask=i < T)
    # A label outside the vocabulary has no logit; one beyond its last entry meets the padding of the last tile, whose
    # logits are 0 or the bias's, 0 too.
    tl.store(label_logit_ptr + offsets, at_label, mask=i < T)
    if logit_sum_ptr is not None:
        tl.store(logit_sum_ptr + offsets, total, mask=i < T)


@triton.jit
def combine(
    logsumexps_ptr,
    label_logits_ptr,
    logit_sums_ptr,
    logsumexp_ptr,
    label_logit_ptr,
    logit_sum_ptr,
    rows,
    SPLITS,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(rows, BLOCK),): the outputs `[rows]` of all entries from those of the splits, `[SPLITS, rows]`, added
    in order.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    at_label = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, SPLITS):
        offsets = tl.cast(split, tl.int64) * rows + i
        # a logsumexp is a maximum and a sum of 1: merged like tiles
        part = tl.load(logsumexps_ptr + offsets, mask=i < rows, other=0.0)
        m_new = tl.maximum(m, part)
        l = l * tl.exp2((m - m_new) * LOG2E) + tl.exp2((part - m_new) * LOG2E)
        m = m_new
        at_label += tl.load(label_logits_ptr + offsets, mask=i < rows, other=0.0)
        if logit_sum_ptr is not None:
            total += tl.load(logit_sums_ptr + offsets, mask=i < rows, other=0.0)
    tl.store(logsumexp_ptr + i, m + tl.log2(l) * LN2, mask=i < rows)
    tl.store(label_logit_ptr + i, at_label, mask=i < rows)
    if logit_sum_ptr is not None:
        tl.store(logit_sum_ptr + i, total, mask=i < rows)
