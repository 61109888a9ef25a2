"""Triton body that adds the splits of paged attention's keys, always in the same order.

Dao et al., "Flash-Decoding" (2023). Logits are in units of log2, for `exp2`.
"""

import triton
import triton.language as tl

from vishwamai.core.gpu_kernels import LN2, LOG2E
from vishwamai.ops.paged_attention.gpu_arguments import Sequences
from vishwamai.ops.paged_attention.gpu_kernels import load_rows


@triton.jit
def combine(
    partial_ptr,
    lse_ptr,
    sequences: Sequences,
    sinks_ptr,
    out_ptr_init,
    logsumexp_ptr_init,
    out_ptr,
    logsumexp_ptr,
    batch,
    tokens,
    heads,
    sinks_batch,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (batch * tokens * heads,): the splits of one token and head, ROWS at a time, weighted by their sums. Tokens
    of no sequence become 0, and their logsumexp, which may be asked for too, -inf.

    With SLOTS the grid is (batch * sequences * SLOTS * heads,), and rows of no sequence that counts are left as they
    are.
    """
    index = tl.program_id(0).to(tl.int64)
    head = index % heads
    token = index // heads % tokens
    stride = (index * 0 + batch) * tokens * heads  # int64 by `index`: splits times tokens times heads passes 2^31
    b = index // heads // tokens
    if SLOTS:
        stride = (index * 0 + batch) * sequences.total * SLOTS * heads
        b = index // heads // SLOTS // sequences.total
    n = head * 0 + sequences.total
    if sequences.num_seqs_ptr is not None:
        n = tl.minimum(n, tl.load(sequences.num_seqs_ptr + b * sequences.num_seqs_batch))
    if SLOTS:
        s = index // heads // SLOTS % sequences.total
        query = index // heads % SLOTS
        if s >= n:
            return
        start = tl.load(sequences.cu_q_lens_ptr + b * sequences.cu_q_lens_batch + s)
        length = tl.load(sequences.cu_q_lens_ptr + b * sequences.cu_q_lens_batch + s + 1) - start
        if (query >= length) | (length > SLOTS):
            return
        token = start + query
        inside = token < tokens
    else:
        inside = token < tl.load(sequences.cu_q_lens_ptr + b * sequences.cu_q_lens_batch + n)
    column = tl.arange(0, DV_TILE)
    i = tl.arange(0, SPLITS_TILE)
    # [SPLITS_TILE]; -inf for splits without a key
    lse = tl.load(lse_ptr + i * stride + index, mask=inside & (i < SPLITS), other=float("-inf"))
    m = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + b * sinks_batch + head).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    m = tl.where(m == float("-inf"), 0.0, m)  # no key at all: -inf - -inf would be NaN
    l = tl.sum(tl.exp2(lse - m), 0)
    if sinks_ptr is not None:
        l += tl.exp2(sink - m)
    acc = tl.zeros([DV_TILE], tl.float32)
    for first in tl.range(0, SPLITS, ROWS):
        some = first + tl.arange(0, ROWS)
        weight = tl.load(lse_ptr + some * stride + index, mask=inside & (some < SPLITS), other=float("-inf"))
        # a split without a key has weight 0: its rows are not read
        part = load_rows(partial_ptr, (some * stride + index) * DV, weight != float("-inf"), DV, DV_TILE)
        acc += tl.sum(part * tl.exp2(weight - m)[:, None], 0)  # in the order of the keys: equal runs give equal bits
    acc *= 1.0 / tl.where(l == 0.0, 1.0, l)  # a token without keys gives 0
    row = (b * tokens + token) * heads + head
    mask = column < DV
    if SLOTS:
        mask = mask & inside
    if logsumexp_ptr is not None:
        total = tl.where(inside & (l != 0.0), (m + tl.log2(l)) * LN2, float("-inf"))
        tl.store(logsumexp_ptr + row, total, mask=token < tokens)
    tl.store(out_ptr + row * DV + column, acc.to(out_ptr.dtype.element_ty), mask=mask)
