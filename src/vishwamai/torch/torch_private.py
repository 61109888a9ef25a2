"""torch's names that are not part of its documented interface, beside DTensor's (`dtensor_private.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# By `is_grads_batched`.
_is_mapped = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def only_computes(tensors: Iterable[Any]) -> bool:
    """Whether an operator on these tensors would reach its kernel unseen: torch neither compiles nor traces nor maps,
    no dispatch mode is in force, and no tensor is of a class of its own.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return all(x is None or (type(x) in _PLAIN and not _is_mapped(x)) for x in tensors)
