"""`torch.vmap` of the custom operators: the mapped axis is folded into leading axes that the operator has anyway, so a
mapped call is one call.

Where it cannot be folded (a parameter that is mapped, gradients of a parameter that is shared), the elements are
computed one after the other. `functional.py` uses the same rules under the other transforms of `torch.func`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vishwamai.core import dims


@dataclasses.dataclass(frozen=True)
class Roles:
    """The dims of an operator's tensors in one call.

    Attributes:
      call: its operands and options.
      tensors: dims of the tensor arguments, which come first.
      results: dims of the results; None for an empty one.
      like: number, for each result of a backward pass, of the argument whose gradient it is.
    """

    call: Any
    tensors: Sequence[str]
    results: Sequence[str | None]
    like: Sequence[int | None] = ()


def register(op: Any, roles: Callable[[Sequence[Any]], Roles] | None, count: int) -> None:
    """Gives an operator of `count` tensors its rule; without `roles` the elements are computed one after the other."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        return mapped(op, roles, count, info, in_dims, args)

    torch.library.register_vmap(op, rule)


def mapped(
    op: Callable[..., Any],
    roles: Callable[[Sequence[Any]], Roles] | None,
    count: int,
    info: Any,
    in_dims: Sequence[Any],
    args: Sequence[Any],
) -> tuple[Any, Any]:
    """(results, their mapped axes) of a mapped call of `op`; the arguments are those of a rule of `torch.vmap`."""
    element = [x.select(d, 0) if isinstance(d, int) else x for x, d in zip(args, in_dims, strict=True)]
    folded = roles and _fold(roles(element), element[:count], info.batch_size, in_dims, args)
    if folded is None:
        return _one_by_one(op, info.batch_size, in_dims, args)
    arguments, unfold = folded
    results = op(*arguments)
    if isinstance(results, Tensor):
        return unfold(0, results)
    unfolded, flags = zip(*(unfold(n, y) for n, y in enumerate(results)), strict=True)
    return unfolded, flags


def _fold(roles: Roles, element: Sequence[Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """(arguments of the one call, `(n, result) -> (unfolded, its mapped axis)`); None where there is no such call."""
    present = [i for i, x in enumerate(element) if x is not None]
    words = [dims.parse(text) for text in roles.tensors]
    lead = words[present[0]][0]  # the axis, or the axes, that the mapped one is folded into
    folded = {i for i in present if words[i] and words[i][0].name == lead.name}
    results = {i for i in roles.like if i is not None}
    mapped = {i for i in present if in_dims[i] is not None}
    # Each element has a gradient of its own, of an operand that they share too.
    narrow = results if lead.variadic else {i for i in results if words[i][0].shareable}
    if lead.name is None or (mapped | results) - folded or (not lead.variadic and narrow):
        return None
    ranks = {i: element[i].dim() - len(words[i]) + 1 for i in folded}  # of the leading axes
    depth = max(ranks.values())
    extent = None if lead.variadic else max(element[i].shape[0] for i in folded if ranks[i] == 1)
    # Vectors (gemm's bias and scales) have no axes that the results lack: the first matrix brings theirs.
    vectors_alone = all(len(words[i]) < len(words[present[0]]) for i in mapped)
    arguments = list(args)
    for i in folded:
        if i not in mapped and i not in results and words[i][0].shareable and not (vectors_alone and i == present[0]):
            if lead.variadic or ranks[i] < 1 or element[i].shape[0] == 1:
                continue
        x = args[i].movedim(in_dims[i], 0) if i in mapped else args[i].expand(size, *args[i].shape)
        x = x.reshape(size, *(1,) * (depth - ranks[i]), *x.shape[1:])
        arguments[i] = x if extent is None else x.expand(size, extent, *x.shape[2:]).flatten(0, 1)

    def unfold(n: int, y: Tensor) -> tuple[Tensor, int | None]:
        if roles.results[n] is None:
            return y, None
        if extent is not None:
            return y.unflatten(0, (size, extent)), 0
        like = roles.like[n] if roles.like else None
        return y if like is None else y.reshape(size, *element[like].shape), 0

    return arguments, unfold


def _one_by_one(op: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    results = [
        op(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
