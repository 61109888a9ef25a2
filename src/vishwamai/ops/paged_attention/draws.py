"""Random calls of paged attention: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.paged_attention.api import ragged_paged_attention
from vishwamai.ops.paged_attention.cases import ForwardCase, separate_pages, tables, token_scales


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    group, kv_heads = d.choose((1, 2, 3, 4, 8)), d.choose((1, 2, 3, 4))
    page, form = d.choose((1, 2, 4, 8, 16, 17, 64, 128)), d.choose(("combined", "combined", "separate", "latent"))
    dim = d.choose((1, 8, 32, 63, 64, 80, 128, 128, 192, 256))
    if form == "latent":
        kv_heads = 1
    heads = group * kv_heads
    runs = []
    decode = d.flag()
    for _ in range(d.choose((1, 2, 3, 5))):
        new = d.choose((0, 1, 1)) if decode else d.choose((0, 1, 2, 7, 33, 100))
        runs.append((new, new + d.choose((0, 1, 5, 30, 129, 300))))
    arrays, number = tables(tuple(runs), page)
    dtype = d.dtype()
    stored = d.choose((dtype, dtype, "int8", "int4", "float8_e4m3fn", "float8_e5m2"))
    kind = "integers" if stored != dtype else "normal"
    options: dict[str, Any] = {"max_q_len": 1} if decode and d.flag() else {}

    def pool(*shape: int) -> ArrayInit:
        return ArrayInit((number, page, *shape), stored, kind)

    inits: dict[str, ArrayInit] = {
        "query": ArrayInit((max(1, sum(q for q, _ in runs)) + d.choose((0, 0, 3)), heads, dim), dtype)
    }
    if form == "combined":
        inits["kv_pages"] = pool(2 * kv_heads, dim)
    elif form == "separate":
        inits |= {"k_pages": pool(kv_heads, dim), "v_pages": pool(kv_heads, d.choose((dim, dim, 64)))}
    else:
        inits["kv_pages"] = pool(dim)
        options |= {"latent_dim": max(1, dim - d.choose((0, 16, 64))), "scale": 0.2}
    inits |= arrays
    if d.flag(4):
        inits["sinks"] = ArrayInit((heads,), "float32")
    if d.flag(5):
        options["alibi_slopes"] = np.linspace(0.5, 0.01, heads).astype(np.float32)
    if d.flag(5):
        inits["tree_mask"] = ArrayInit((inits["query"].shape[0], d.choose((1, 3, 40))), "bool", "mask")
    if d.flag(4):
        options["softcap"] = 3.0
    if d.flag(4):
        options["window"] = d.choose((0, 3, 40))
    if stored != dtype and d.flag(3):
        inits |= token_scales(inits, kv_heads)
    elif stored != dtype:
        options["k_scale"] = 0.02 if stored == "int8" else 0.2
        options["v_scale"] = tuple(0.01 * (1 + h) for h in range(kv_heads))
    if d.flag(5):
        options["q_scale"] = tuple(0.5 * (1 + h) for h in range(kv_heads))
    call: Any = separate_pages if form == "separate" else ragged_paged_attention
    return ForwardCase("", "paged_attention", call, inits, options)
