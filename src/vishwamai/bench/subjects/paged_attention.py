"""Paged attention's peers: a framework's attention on keys and values that it gathers from their pages, for a step of
decoding. The sample is the first sequence of such a step, which reads only the pages of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, halvings, resized, to_torch
from vishwamai.core.cases import Case
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention.cases import Table

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("query", "kv_pages", "kv_lens", "page_indices")


def _decodes(case: Case) -> bool:
    """Whether a case is a step of decoding that the peers compute: one query a sequence, over all its keys as they are
    stored.
    """
    arrays = case.arrays
    starts = getattr(arrays["cu_q_lens"], "values", None)
    plain = set(arrays) == {*_NAMES, "cu_q_lens"} and set(case.options) <= {"max_q_len", "scale"}
    if not plain or len(arrays["kv_pages"].shape) != 4 or arrays["kv_pages"].dtype != arrays["query"].dtype:
        return False
    return starts == tuple(range(arrays["query"].shape[0] + 1))


def _gathered(pages: AnyArray, table: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Keys and values `[sequences, length, kv_heads, head_dim]`."""
    rows = pages[table]  # [sequences, entries, page_size, 2 * kv_heads, head_dim]
    sequences, dim = rows.shape[0], rows.shape[-1]
    rows = rows.reshape(sequences, -1, rows.shape[3] // 2, 2, dim)
    return rows[:, :, :, 0], rows[:, :, :, 1]


def _jax(scale: float | None) -> Callable[..., jax.Array]:
    def attend(query: jax.Array, pages: jax.Array, lens: jax.Array, table: jax.Array) -> jax.Array:
        k, v = _gathered(pages, table)
        return jax.nn.dot_product_attention(query[:, None], k, v, scale=scale, key_value_seq_lengths=lens)[:, 0]

    return attend


def _torch(scale: float | None) -> Callable[..., Tensor]:
    import torch

    def attend(query: Tensor, pages: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        k, v = (x.transpose(1, 2) for x in _gathered(pages, table))
        mask = (torch.arange(k.shape[2], device=lens.device) < lens[:, None])[:, None, None]
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query[:, :, None], k, v, mask, scale=scale, enable_gqa=True)[:, :, 0]

    return attend


class _Paged(Subject):
    def peers(self, case: Case) -> list[Peer]:
        if not _decodes(case):
            return []
        scale = case.options.get("scale")

        def arguments(arrays: Arrays) -> tuple[np.ndarray, ...]:
            return tuple(arrays[name] for name in _NAMES)

        def tensors(arrays: Arrays) -> tuple[object, ...]:
            return tuple(map(to_torch, arguments(arrays)))

        return [
            Peer("jax.nn, gathered", "jax", arguments, _jax(scale), arguments=_NAMES),
            Peer("torch SDPA, gathered", "torch", tensors, lambda *args: _torch(scale)(*args), arguments=_NAMES),
        ]

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        sequences = len(arrays["kv_lens"])
        if "kv_pages" not in arrays or case.arrays["query"].shape[0] != sequences or sequences == 1:
            return super().sample(case, arrays)
        entries = arrays["page_indices"].shape[1]
        chosen = {
            **arrays,
            "query": arrays["query"][:1],
            "kv_pages": arrays["kv_pages"][arrays["page_indices"][0]],
            "kv_lens": arrays["kv_lens"][:1],
            "page_indices": np.arange(entries, dtype=np.int32)[None],
            "cu_q_lens": np.array([0, 1], np.int32),
        }
        inits = {name: dataclasses.replace(case.arrays[name], shape=x.shape) for name, x in chosen.items()}
        for name in ("kv_lens", "page_indices", "cu_q_lens"):
            inits[name] = Table(chosen[name].shape, "int32", values=tuple(chosen[name].flat))
        return Sample(
            dataclasses.replace(case, arrays=inits),
            chosen,
            lambda outputs: tuple(x[:1] for x in outputs),
            f"the first of {sequences} sequences",
        )

    def smaller(self, case: Case, share: float) -> Case | None:
        """A step of decoding for fewer sequences."""
        sequences, entries = case.arrays["page_indices"].shape
        new = halvings(sequences, share, floor=4)
        lens, starts = (getattr(case.arrays[name], "values", None) for name in ("kv_lens", "cu_q_lens"))
        if new == sequences or lens is None or starts is None or starts != tuple(range(sequences + 1)):
            return None
        pages = new * entries + 2
        pools = [name for name in ("kv_pages", "k_pages", "v_pages") if name in case.arrays]
        cut_case = resized(
            case, {"query": {0: new}, **{name: {0: pages} for name in pools}}, f"cut to {new} of {sequences} sequences"
        )
        tables = {
            "kv_lens": Table((new,), "int32", values=lens[:new]),
            "page_indices": Table((new, entries), "int32", pages=pages),
            "cu_q_lens": Table((new + 1,), "int32", values=starts[: new + 1]),
        }
        return dataclasses.replace(cut_case, arrays={**cut_case.arrays, **tables})


SUBJECT = _Paged()
