"""`torch.autocast` as torch's own functions have it: what multiplies matrices takes its factors in the narrow dtype,
and on a GPU what torch keeps in float32 there (softmax, normalizations) takes float32. Everything else computes in the
dtype that it gets.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.types import PyTree


def factors(*operands: PyTree) -> tuple[PyTree, ...]:
    """Operands of a matrix product, the floating tensors among them in autocast's dtype; others, float64 too, as they
    are.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in factors(torch.ones(2), torch.ones(2, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    return tuple(_cast(x, None) for x in operands)


def in_float32(x: Tensor) -> Tensor:
    """The operand of a function that autocast computes in float32 on a GPU."""
    return _cast(x, torch.float32) if x.device.type == "cuda" else x


def off(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A block in which autocast is off, on the tensor's device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _enabled(kind) else contextlib.nullcontext()


def _enabled(kind: str) -> bool:
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def _cast(x: PyTree, dtype: torch.dtype | None) -> PyTree:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.element_size() == 1:
        return x
    kind = x.device.type
    return x.to(dtype or torch.get_autocast_dtype(kind)) if _enabled(kind) else x
