"""Paged attention on GPUs: one Triton kernel for prefill and decoding, torch tensors and JAX arrays, and one that adds
the splits of long sequences.

A program holds a block of a sequence's queries with the query heads of one kv head, and walks the sequence's pages, of
which it reads those that the block sees and no other. A batch with long runs of queries takes two launches, for large
tiles and for those of decoding. Where sequences and heads are fewer than a GPU has room for, the keys of short runs are
split among several programs; their number comes from the Config, so the bits do not change with the machine. Forward
only.
"""

from __future__ import annotations

import math
from typing import Any

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.qtensor import INT4
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention.checks import no_gradient
from vishwamai.ops.paged_attention.gpu_arguments import Extents, Items, Scores, Tiles, Widths
from vishwamai.ops.paged_attention.gpu_pools import chunk_of, pools_of, sequences_of, strides, terms_of
from vishwamai.ops.paged_attention.gpu_tiles import (
    WIDEST,
    PagedGpuConfig,
    heads_of,
    heuristic,
    longest_short,
    slots_of,
    tile_of,
)
from vishwamai.ops.paged_attention.spec import TOKENS_DECLINED, Operands, Outputs, PagedSpec

ATTEND = gpu.TritonKernel("vishwamai.ops.paged_attention.gpu_kernels", "attend")
COMBINE = gpu.TritonKernel("vishwamai.ops.paged_attention.gpu_kernels_combine", "combine")

_DTYPES = ("bfloat16", "float16", "float32")
_NARROW = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
_WIDEST_LATENT, _WIDEST_REST = 512, 128
"""Columns of a latent page's value, and of what it has beside it."""


def why_not(spec: PagedSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    query, pages = spec.operands.query.dtype, spec.operands.k_pages.dtype
    if query.name not in _DTYPES:
        return f"`query` is {query.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if pages.name not in (*_DTYPES, *_NARROW):
        return f"the pages are {pages.name}; the Triton kernels take {', '.join((*_DTYPES, *_NARROW))}."
    if pages == INT4 and (spec.head_dim % 2 or spec.value_dim % 2):
        columns = spec.head_dim if spec.head_dim % 2 else spec.value_dim
        return f"rows of {columns} numbers of 4 bits do not end with a byte; the Triton kernels load whole bytes."
    if pages != query and pages.name in _DTYPES and query.name != "float32":
        return f"the pages are {pages.name}, which {query.name} queries would round."
    if spec.batch * spec.tokens * spec.sequences * spec.pages_per_sequence == 0:
        return "the batch is empty."
    if spec.token_scales:
        return TOKENS_DECLINED
    tree = spec.operands.tree_mask
    if tree is not None and tree.shape[1] * tree.shape[2] >= 2**31:
        return f"`tree_mask` has {tree.shape[1]} x {tree.shape[2]} entries; the Triton kernels count them in 32 bits."
    if spec.form == "latent":
        rest = spec.head_dim - spec.value_dim
        if spec.value_dim > _WIDEST_LATENT or rest > _WIDEST_REST:
            return (
                f"latent pages of {spec.value_dim} + {rest} columns do not fit a program's registers; "
                f"it takes up to {_WIDEST_LATENT} + {_WIDEST_REST}."
            )
        if spec.value_dim > WIDEST and query.itemsize == 4:
            return (
                f"float32 latent pages of {spec.value_dim} columns do not fit a program's shared memory; it takes up "
                f"to {WIDEST}."
            )
    elif max(spec.head_dim, spec.value_dim) > WIDEST:
        widest = max(spec.head_dim, spec.value_dim)
        return f"heads of {widest} columns do not fit a program's registers; it takes up to {WIDEST}."
    return gpu.why_not(target)


def notes(spec: PagedSpec, target: Target) -> list[str]:
    """What a caller may want to know about a call that is served."""
    if spec.page_size < 16:
        return [
            f"with pages of {spec.page_size}, numbers of pages are read for single rows; from 16 on a step may read one"
        ]
    return []


def forward(spec: PagedSpec, config: PagedGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    short, splits = longest_short(spec, config), config.splits
    result = gpu.result((spec.batch, spec.tokens, spec.heads, spec.value_dim), spec.operands.query.dtype)
    logsumexp = gpu.result((spec.batch, spec.tokens, spec.heads), "float32") if spec.return_lse else None
    targets = Outputs(result, logsumexp)
    tiles = config.rows, config.block_kv, config.warps, config.stages
    slots = 0
    if (
        spec.max_q_len > short
    ):  # long runs, and zeros for what belongs to no sequence; the short ones are written beside them
        long = config.long_rows, config.long_kv, config.long_warps, config.long_stages
        queries = config.long_rows // heads_of(spec, config.long_rows)[0]
        # Every sequence may leave one block unfilled; and one more may hold what is behind the last.
        items = spec.sequences + 1 + spec.tokens // queries
        out, logsumexp, _ = _attend(
            spec, operands, long, items, Items(queries, DIRECT=False, LEAST=short + 1, SLOTS=0, SPLITS=1), targets
        )
        targets = Outputs(gpu.onto(out), None if logsumexp is None else gpu.onto(logsumexp))
        slots = short
    how = Items(short, DIRECT=True, LEAST=1, SLOTS=slots, SPLITS=splits)
    items = spec.sequences + (0 if slots else 1)
    if splits == 1:
        return Outputs(*_attend(spec, operands, tiles, items, how, targets)[:2]), None
    rows = (splits, spec.batch, slots_of(spec, config), spec.heads)
    partial, lse = (gpu.result(shape, "float32") for shape in ((*rows, spec.value_dim), rows))
    partial, _, lse = _attend(spec, operands, tiles, items, how, Outputs(partial), lse)
    return _combine(spec, operands, splits, slots, partial, lse, targets), None


def _attend(
    spec: PagedSpec,
    o: Operands,
    tiles: tuple[int, int, int, int],
    items: int,
    how: Items,
    targets: Outputs,
    lse: gpu.Result | None = None,
) -> list[AnyArray]:
    """One launch of the walk over pages: [out, logsumexp or None, the splits' lse or None]."""
    rows, keys, warps, stages = tiles
    heads, head_tiles = heads_of(spec, rows)
    latent = spec.form == "latent"
    rest = spec.head_dim - spec.value_dim if latent else 0
    k_pool, v_pool, v_start = pools_of(o.k_pages, o.v_pages, spec.form, o.k_scale, o.v_scale)
    return gpu.launch(
        ATTEND,
        (spec.batch * items * how.SPLITS * spec.kv_heads * head_tiles,),
        dict(
            query_ptr=o.query,
            k_pool=k_pool,
            v_pool=v_pool,
            sequences=sequences_of(
                o.kv_lens, o.page_indices, o.cu_q_lens, o.num_seqs, spec.sequences, spec.pages_per_sequence
            ),
            terms=terms_of(spec, o, with_sinks=how.SPLITS == 1),
        ),
        dict(out_ptr=targets.out, logsumexp_ptr=targets.logsumexp, lse_ptr=lse),
        warps=warps,
        stages=stages,
        sizes=Extents(spec.batch, spec.tokens, spec.heads, spec.kv_heads, head_tiles, items),
        v_start=v_start,
        SCORES=Scores(
            spec.scale,
            spec.softcap,
            spec.window is not None,
            "tf32x3" if spec.operands.query.dtype.itemsize == 4 else None,
        ),
        ITEMS=how,
        TILES=Tiles(rows, keys, heads, spec.group, spec.page_size, chunk_of(spec.sequences)),
        WIDTHS=Widths(
            spec.head_dim,
            spec.value_dim,
            tile_of(spec.value_dim if latent else spec.head_dim),
            tile_of(spec.value_dim),
            tile_of(rest),
            latent,
            spec.operands.k_pages.dtype == INT4,
        ),
    )


def _combine(
    spec: PagedSpec, o: Operands, splits: int, slots: int, partial: object, lse: Any, targets: Outputs
) -> Outputs:
    """The outputs of the splits added up."""
    tile, splits_tile = gpu.next_power_of_2(spec.value_dim), gpu.next_power_of_2(splits)
    results = gpu.launch(
        COMBINE,
        (math.prod(lse.shape[1:]),),
        dict(
            partial_ptr=partial,
            lse_ptr=lse,
            sequences=sequences_of(None, None, o.cu_q_lens, o.num_seqs, spec.sequences, spec.pages_per_sequence),
            sinks_ptr=o.sinks,
        ),
        dict(out_ptr=targets.out, logsumexp_ptr=targets.logsumexp),
        warps=1 if splits_tile * tile <= 1024 else 4,
        batch=spec.batch,
        tokens=spec.tokens,
        heads=spec.heads,
        sinks_batch=0 if o.sinks is None else strides(o.sinks)[0],
        SLOTS=slots,
        SPLITS=splits,
        SPLITS_TILE=splits_tile,
        DV=spec.value_dim,
        DV_TILE=tile,
        ROWS=max(1, min(splits_tile, 4096 // tile)),
    )
    return Outputs(*results)


TRITON = Implementation("triton", "cuda", forward, no_gradient, why_not, heuristic, PagedGpuConfig, notes)
