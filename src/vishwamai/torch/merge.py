"""`merge_attention` of torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from vishwamai.ops.attention.merge import check_parts, merged
from vishwamai.torch.arguments import checked


@checked
def merge_attention(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: Literal["bhsd", "bshd"] = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attentions over parts of them, by their logsumexps; see `vishwamai.merge_attention`.

    Arguments, results and errors are those of JAX's; torch's own operations compute it and its gradient.

    >>> import torch
    >>> parts = [torch.full((1, 2), 3.0), torch.full((1, 2), 5.0)]
    >>> merge_attention(parts, [torch.zeros(1), torch.zeros(1)])[0]
    tensor([[4., 4.]])
    """
    check_parts(outputs, lses)
    return merged(outputs, lses, layout)
