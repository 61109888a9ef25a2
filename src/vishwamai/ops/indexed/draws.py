"""Random calls of attention over chosen tokens: groups of heads, entries that name no key, values within keys."""

from __future__ import annotations

from vishwamai.core.cases import Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.indexed.cases import indexed_case


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    kv_heads = d.choose((1, 1, 2, 3))
    shape = d.choose((1, 1, 2, 3)), kv_heads * d.choose((1, 2, 3)), d.choose((1, 2, 7, 33))
    dim = d.size(80)
    latent = d.flag()
    dims = dim, d.choose((dim, max(1, dim // 2))) if latent else d.size(80)
    options = {"scale": d.choose((None, 0.3))}
    return indexed_case(
        "",
        shape,
        (d.choose((1, 5, 9, 40)), d.choose((1, 2, 8, 17))),
        dims,
        d.dtype(),
        kv_heads=kv_heads,
        latent=latent,
        shared=d.flag(),
        **options,
    )
