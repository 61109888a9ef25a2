"""The rotary embedding's peer: the usual lines of torch, with tables made beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Subject, ours_in_torch, to_torch
from vishwamai.core.cases import Case
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = {"theta", "cache", "cached"}


class _Rope(Subject):
    def in_torch(self, case: Case) -> Peer | None:
        from vishwamai.torch import apply_rope

        if {"cache", "cached"} & set(case.options):
            return None

        def rope(query: Tensor, key: Tensor | None = None, positions: Tensor | None = None, **options: Any) -> PyTree:
            return apply_rope(query if key is None else (query, key), positions, **options)

        return ours_in_torch(case, rope)

    def peers(self, case: Case) -> list[Peer]:
        """For queries, or queries and keys, `[batch, heads, length, head_dim]` whose positions count from 0 and which
        are rotated whole.
        """
        if set(case.options) - _PLAIN or "positions" in case.arrays:
            return []
        names = tuple(case.arrays)
        length, dim = case.arrays["query"].shape[-2:]
        theta = getattr(case.options.get("cache"), "theta", case.options.get("theta", 10000.0))

        def prepare(arrays: Arrays) -> tuple[object, ...]:
            tensors = [to_torch(arrays[name]) for name in names]
            dtype = tensors[0].dtype
            angle = np.arange(length)[:, None] * theta ** (-np.arange(dim // 2) / (dim / 2))
            tables = (to_torch(np.asarray(f(angle), np.float32)).to(dtype) for f in (np.cos, np.sin))
            return (*tensors, *tables)

        def call(*arguments: Tensor) -> PyTree:
            import torch

            *tensors, cos, sin = arguments

            def rotated(x: Tensor) -> Tensor:
                a, b = x.chunk(2, -1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

            results = [rotated(x) for x in tensors]
            return tuple(results) if len(results) > 1 else results[0]

        return [Peer("torch rotation", "torch", prepare, call, arguments=names)]


SUBJECT = _Rope()
