"""Where Triton kernels find a head's keys and values in the pools of pages, and a token's sequence."""

from __future__ import annotations

import math
from typing import Any

from vishwamai.core import gpu
from vishwamai.core.qtensor import INT4
from vishwamai.core.spec import array_spec

_CHUNK = 1024
"""Sequences that a block is looked up among at once."""


def strides(x: Any) -> tuple[int, ...]:
    """A tensor's own strides; JAX arrays have those of contiguous ones. 0 along a leading axis that is shared."""
    if gpu.framework(x) == "torch":
        strides = [int(n) for n in x.stride()]
    else:
        strides = [math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape))]
    return (0 if x.shape[0] == 1 else strides[0], *strides[1:])


def places_of(k_pages: Any, v_pages: Any, form: str) -> dict[str, int]:
    """Where a head's keys and values lie in the pools, in elements; of int4 in bytes."""
    k, step = strides(k_pages), 2 if form == "combined" else 1
    row = 0 if form == "latent" else k[3]
    v = k if v_pages is None else strides(v_pages)
    places = dict(k_batch=k[0], k_page=k[1], k_token=k[2], k_head=step * row)
    places |= dict(v_batch=v[0], v_page=v[1], v_token=v[2], v_head=step * row if v_pages is None else v[3])
    places |= dict(v_start=row if form == "combined" else 0)
    per_byte = 2 if array_spec(k_pages).dtype == INT4 else 1
    return {name: n // per_byte for name, n in places.items()}


def chunk_of(sequences: int) -> int:
    return max(64, min(_CHUNK, gpu.next_power_of_2(sequences)))
