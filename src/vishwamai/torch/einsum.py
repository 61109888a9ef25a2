"""`einsum` of torch tensors: the contractions that `vishwamai.einsum` plans, over this package's `gemm`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.matmul.einsum import best_layout, contract, plan_steps
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.matmul import gemm
from vishwamai.torch.torch_private import constant_result

constant_result(best_layout)  # torch.compile would trace how it searches


@constant_result
def _steps(equation: str, shapes: tuple[tuple[int, ...], ...], optimize: object) -> list[tuple[tuple[int, ...], str]]:
    return plan_steps(equation, [SimpleNamespace(shape=shape) for shape in shapes], optimize)


def _plain(subscripts: str, *factors: Tensor) -> Tensor:
    common = functools.reduce(torch.promote_types, (x.dtype for x in factors))
    return torch.einsum(subscripts, *(x.to(common) for x in factors))


@checked
def einsum(
    equation: str,
    *operands: Tensor,
    optimize: str | bool | Sequence[tuple[int, ...]] = "optimal",
    precision: str | None = None,
) -> Tensor:
    """The sum of products that `equation` names, with every contraction of two operands over `gemm`; see
    `vishwamai.einsum`, whose plan this is. What is not a product goes to `torch.einsum`.

    >>> import torch
    >>> q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 4, 5, 8)
    >>> einsum("bhqd,bhkd->bhqk", q, k).shape
    torch.Size([2, 4, 3, 5])
    """
    operands = autocast.factors(*operands)
    steps = _steps(equation, tuple(tuple(map(bridge.constant, x.shape)) for x in operands), optimize)
    product: Any = functools.partial(gemm, precision=precision)
    return contract(steps, list(operands), _plain, product, torch.permute)
