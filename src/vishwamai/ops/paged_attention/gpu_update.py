"""`update_pages` on GPUs: of torch tensors, one Triton kernel writes new keys and values into the pools in place; of
JAX's pools of 4 bits, one writes rows that are made already.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.qtensor import INT4
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention.gpu_arguments import Turn, Widths
from vishwamai.ops.paged_attention.gpu_pools import chunk_of, pools_of, sequences_of
from vishwamai.ops.paged_attention.gpu_tiles import tile_of

UPDATE = gpu.TritonKernel("vishwamai.ops.paged_attention.gpu_kernels_update", "update")
PUT = gpu.TritonKernel("vishwamai.ops.paged_attention.gpu_kernels_update", "put")


def why_not_put(pool: AnyArray, rows: AnyArray) -> str | None:
    """What keeps `put` from these arrays, or None."""
    if pool.dtype != INT4:
        return f"rows of {pool.dtype.name} are whole bytes, which XLA's scatter moves in place"
    if math.prod(pool.shape[2:]) % 2 or not rows.size:
        return f"a token's rows of {pool.shape[2:]} are no whole bytes"
    return gpu.why_not()


def put(pool: AnyArray, rows: AnyArray, page: object, slot: AnyArray) -> AnyArray:
    """See `rows.put`; of numbers of 4 bits, which a scatter would write one by one, into bytes that two of them
    share.
    """
    size = math.prod(pool.shape[2:]) // 2
    tile = min(1024, gpu.next_power_of_2(size))
    (updated,) = gpu.launch(
        PUT,
        (rows.shape[0], gpu.cdiv(size, tile)),
        dict(rows_ptr=rows, page_ptr=page, slot_ptr=slot),
        dict(pool_ptr=gpu.onto(pool)),
        pages=pool.shape[0],
        SLOTS=pool.shape[1],
        SIZE=size,
        TILE=tile,
    )
    return updated


def update(
    k_pages: AnyArray,
    v_pages: AnyArray,
    key: Any,
    value: Any,
    kv_lens: AnyArray,
    page_indices: AnyArray,
    cu_q_lens: AnyArray,
    num_seqs: AnyArray,
    k_scale: object,
    v_scale: object,
    cos: Any = None,
    sin: object = None,
    interleaved: bool = False,
) -> None:
    """`update_pages` of torch tensors: the pools `[1, P, page, ...]` are changed in place, the other operands are
    contiguous and have no batch axis.

    JAX needs no kernel but `put`: XLA's scatter moves the new rows only, and writes in place where the pages are
    donated.
    """
    form = "latent" if value is None else "combined" if v_pages is None else "separate"
    page = array_spec(k_pages)
    kv_heads = 1 if value is None else key.shape[1]
    columns, value_columns = page.shape[-1], 0 if value is None else value.shape[-1]
    tile, value_tile = tile_of(columns), tile_of(max(1, value_columns))
    heads = max(1, min(gpu.next_power_of_2(kv_heads), 4096 // max(tile, value_tile)))
    k_pool, v_pool, v_start = pools_of(k_pages, v_pages, form, k_scale, v_scale)
    pairs = 0 if cos is None else cos.shape[1]
    largest = None
    if page.dtype.itemsize == 1:
        largest = 127.0 if page.dtype.name == "int8" else float(jnp.finfo(page.dtype).max)
    gpu.launch(
        UPDATE,
        (key.shape[0], gpu.cdiv(kv_heads, heads)),
        dict(
            k_pool=k_pool,
            v_pool=v_pool,
            key_ptr=key,
            value_ptr=value,
            sequences=sequences_of(kv_lens, page_indices, cu_q_lens, num_seqs, *page_indices.shape),
            cos_ptr=cos,
            sin_ptr=sin,
        ),
        {},
        pages=page.shape[1],
        kv_heads=kv_heads,
        positions=0 if cos is None else cos.shape[0],
        v_start=v_start,
        PAGE=page.shape[2],
        K=key.shape[-1],
        WIDTHS=Widths(columns, value_columns, tile, value_tile),
        HEADS=heads,
        MOST=largest,
        TURN=Turn(pairs, key.shape[-1] - 2 * pairs if form == "latent" else 0, interleaved),
        CHUNK=chunk_of(page_indices.shape[0]),
    )
