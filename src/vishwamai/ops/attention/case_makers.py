"""How a case of attention is made: of one call, and of packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.types import PyTree
from vishwamai.ops.attention.api import block_sparse_attention, flash_attention
from vishwamai.ops.attention.varlen import flash_attention_varlen


def attention_case(
    name: str,
    *,
    batch: int = 1,
    heads: int | tuple[int, int] = 2,
    length: int | tuple[int, int] = 100,
    dim: int | tuple[int, int] = 64,
    dtype: str = "float32",
    bias: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    segments: tuple[Any, Any] | None = None,
    sinks: bool = False,
    dropout: float = 0.0,
    tags: tuple[str, ...] = ("contract",),
    **options: PyTree,
) -> Case:
    """One call; pairs are (query heads, kv heads), (q_len, kv_len), (d_qk, d_v); `bias` and `mask` are shapes,
    `segments` lengths of segments.
    """
    (hq, hkv), (tq, tk), (d, dv) = (x if isinstance(x, tuple) else (x, x) for x in (heads, length, dim))

    def array(*shape: int) -> ArrayInit:
        if options.get("layout") == "bshd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        return ArrayInit(shape, dtype)

    arrays = {"query": array(batch, hq, tq, d), "key": array(batch, hkv, tk, d), "value": array(batch, hkv, tk, dv)}
    if bias is not None:
        arrays["bias"] = ArrayInit(bias, dtype)
    if mask is not None:
        arrays["mask"] = ArrayInit(mask, "bool", "mask")
    if sinks:
        arrays["sinks"] = ArrayInit((hq,), dtype)
    if dropout:
        arrays["dropout_key"] = ArrayInit((2,), "uint32", "key")
        options["dropout_rate"] = dropout
    if segments is not None:
        options["segment_ids"] = tuple(map(_ids, segments))
    call = block_sparse_attention if "block_mask" in options else flash_attention
    return Case(name, "attention", call, arrays, options, frozenset(tags))


def varlen_case(
    name: str,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 2),
    dim: int = 32,
    spare: int = 0,
    dtype: str = "float32",
    sinks: bool = False,
    **options: PyTree,
) -> Case:
    """One call of packed sequences of these lengths, with `spare` rows and keys after the last."""
    rows, keys = sum(q_lens) + spare, sum(kv_lens) + spare
    shapes = {"query": (rows, heads[0], dim), "key": (keys, heads[1], dim), "value": (keys, heads[1], dim)}
    arrays = {n: ArrayInit(shape, dtype) for n, shape in shapes.items()}
    if sinks:
        arrays["sinks"] = ArrayInit((heads[0],), dtype)
    starts = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lens, kv_lens))
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    options |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(kv_lens)}
    return Case(name, "attention", flash_attention_varlen, arrays, options)


def _ids(lengths: list[tuple[int, ...]]) -> np.ndarray:
    """Segment ids of consecutive segments: `[(30, 70)] -> [[0] * 30 + [1] * 70]`, one row a batch element; negative
    lengths count down from 99.
    """
    rows = []
    for row in lengths:
        ids = [99 - i if n < 0 else i for i, n in enumerate(row)]
        rows.append(np.repeat(ids, np.abs(row)))
    return np.array(rows, np.int32)
