"""Where Triton kernels find a head's keys and values in the pools of pages, and a token's sequence."""

from __future__ import annotations

import math

from vishwamai.core import gpu
from vishwamai.core.qtensor import INT4
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention.gpu_arguments import Pool, Sequences, Terms
from vishwamai.ops.paged_attention.spec import Operands, PagedSpec

_CHUNK = 1024
"""Sequences that a block is looked up among at once."""


def strides(x: AnyArray) -> tuple[int, ...]:
    """A tensor's own strides; JAX arrays have those of contiguous ones. 0 along a leading axis that is shared."""
    if gpu.framework(x) == "torch":
        strides = [int(n) for n in x.stride()]
    else:
        strides = [math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape))]
    return (0 if x.shape[0] == 1 else strides[0], *strides[1:])


def _batch(x: AnyArray) -> int:
    """Stride of the batch axis; 0 without an array, or where it is shared."""
    return 0 if x is None else strides(x)[0]


def pools_of(
    k_pages: AnyArray, v_pages: AnyArray, form: str, k_scale: object, v_scale: object
) -> tuple[Pool, Pool, int]:
    """The pools of keys and values, and where a head's values begin after its keys, for pages that have both."""
    k, step = strides(k_pages), 2 if form == "combined" else 1
    row = 0 if form == "latent" else k[3]
    v = k if v_pages is None else strides(v_pages)
    v_head = step * row if v_pages is None else v[3]
    per_byte = 2 if array_spec(k_pages).dtype == INT4 else 1
    k_places = (n // per_byte for n in (*k[:3], step * row))
    v_places = (n // per_byte for n in (*v[:3], v_head))
    k_pool = Pool._make((k_pages, k_scale, *k_places, _batch(k_scale)))
    v_pool = Pool._make((v_pages, v_scale, *v_places, _batch(v_scale)))
    return k_pool, v_pool, row // per_byte if form == "combined" else 0


def sequences_of(
    kv_lens: AnyArray, page_indices: AnyArray, cu_q_lens: AnyArray, num_seqs: AnyArray, total: int, entries: int
) -> Sequences:
    """Lengths and pages of each sequence; None for what a kernel does not read."""
    arrays = kv_lens, page_indices, cu_q_lens, num_seqs
    return Sequences._make((*arrays, *map(_batch, arrays), total, entries))


def terms_of(spec: PagedSpec, operands: Operands, with_sinks: bool) -> Terms:
    """What changes the logits of a call; the sinks count once where its keys are split."""
    arrays = operands.sinks if with_sinks else None, operands.slopes, operands.tree_mask
    columns = 0 if operands.tree_mask is None else operands.tree_mask.shape[2]
    return Terms._make((*arrays, *map(_batch, arrays), columns, spec.window or 0))


def chunk_of(sequences: int) -> int:
    return max(64, min(_CHUNK, gpu.next_power_of_2(sequences)))
