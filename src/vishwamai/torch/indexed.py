"""`indexed_attention` and `lightning_index` of torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from vishwamai.ops.indexed.api import INDEXED
from vishwamai.ops.indexed.indexer import check_index, choose, pair
from vishwamai.ops.indexed.spec import SIGNATURE, Outputs, describe
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator

_indexed = TorchOperator(INDEXED, Outputs, SIGNATURE, describe, gradients=("query", "key", "value"))


@checked
def indexed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    indices: Tensor,
    *,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attention over chosen keys; see `vishwamai.indexed_attention`, whose arguments and results these are. Tensors on
    the CPU; it has no kernel for GPUs.

    >>> import torch
    >>> value = torch.tensor([1.0, 5.0, 9.0]).reshape(1, 1, 3, 1)
    >>> indexed_attention(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 3, 1), value, torch.tensor([[[0, 2]]])).ravel()
    tensor([5.])
    """
    return _indexed(query, key, indices.int(), value, scale, value_dim)[0]


@checked
@torch.no_grad()
def lightning_index(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    positions: Tensor | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The keys with the highest scores of each query; see `vishwamai.lightning_index`, whose arguments and results
    these are. Tensors on any device.

    >>> import torch
    >>> key = torch.tensor([[[1.0], [3.0], [2.0]]])
    >>> lightning_index(torch.ones(1, 1, 3, 1), key, torch.ones(1, 3, 1), top_k=2)[0].tolist()
    [[0, -1], [1, 0], [1, 2]]
    """
    ids = pair(segment_ids)
    check_index(query, key, weights, top_k, positions, *ids)
    if positions is None:
        length = query.shape[2]
        positions = torch.arange(length, device=query.device).expand(len(query), -1) + (key.shape[1] - length)
    return choose(query, key, weights, top_k, positions, *ids)
