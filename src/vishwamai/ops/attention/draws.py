"""Random calls of attention: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.attention.api import block_sparse_attention, flash_attention


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    dtype = d.dtype()
    batch, kv_heads, group = d.choose((1, 1, 2, 3)), d.choose((1, 1, 2, 3)), d.choose((1, 1, 2, 4, 5))
    heads = kv_heads * group
    tq, tk = d.size(), d.size()
    tk = d.choose((tk, tq))
    dim = d.size(300)
    dv = d.choose((dim, dim, d.size(300)))
    arrays = {
        "query": ArrayInit((batch, heads, tq, dim), dtype),
        "key": ArrayInit((batch, kv_heads, tk, dim), dtype),
        "value": ArrayInit((batch, kv_heads, tk, dv), dtype),
    }

    def broadcast() -> tuple[int, ...]:
        return tuple(e if d.flag() else 1 for e in (batch, heads, tq, tk))[d.choose((0, 0, 0, 1, 2)) :]

    if d.flag(3):
        arrays["bias"] = ArrayInit(broadcast(), dtype)
    if d.flag(3):
        arrays["mask"] = ArrayInit(broadcast(), "bool", "mask")
    if d.flag(4):
        arrays["sinks"] = ArrayInit((heads,), dtype)
    options: dict[str, Any] = {"return_lse": d.flag(), "causal": d.flag(), "layout": "bhsd"}
    options["causal_align"] = d.choose(("top_left", "bottom_right"))
    if d.flag(3):
        options["window"] = (d.choose((None, 0, 3, 40, 150)), d.choose((None, 0, 1, 7, 130)))
    if d.flag(3):
        rng = d.rng()
        options["segment_ids"] = tuple(np.sort(rng.integers(0, 3, (batch, t)), -1).astype(np.int32) for t in (tq, tk))
    if d.flag(5):
        options["alibi_slopes"] = np.linspace(0.5, 0.01, heads).astype(np.float32)
    if d.flag(4):
        options["softcap"] = 3.0
        options["bias_after_softcap"] = d.flag()
    if d.flag(4):
        options["scale"] = 0.2
    if d.flag(4):
        options["dropout_rate"] = 0.2
        arrays["dropout_key"] = ArrayInit((2,), "uint32", "key")
    call: Any = flash_attention
    if d.flag(5):
        call = block_sparse_attention
        block = d.choose((16, 32, 100, 128, (64, 40)))
        bq, bk = block if isinstance(block, tuple) else (block, block)
        shape = -(-tq // bq), -(-tk // bk)
        options |= {"block_mask": d.rng().random(d.choose((shape, (heads, *shape)))) < 0.6, "block_size": block}
    return Case("", "attention", call, arrays, options)
