"""`torch.vmap` of the custom operators: the mapped axis is folded into axes that the operator has anyway, so a mapped call is one call.

Where it cannot be folded (a parameter that is mapped, gradients of a parameter that is shared), the elements are computed one after the other.
torch's own limit: `torch.func.grad` refuses every custom operator with a gradient; gradients of mapped functions come from `tensor.backward()` and
`torch.autograd.grad`, batched ones (`is_grads_batched=True`) among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Dims = Sequence[int | None]


def _first(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """With the mapped axis first; one that is not mapped is the same for all."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _one_by_one(op: Any, size: int, in_dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    results = [
        op(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _mapped(outputs: Any) -> tuple[Any, Any]:
    """The results of a folded call; those that are empty, because the call has none such, stay as they are."""
    if isinstance(outputs, Tensor):
        return outputs, 0
    return outputs, tuple(None if y.shape == (0,) else 0 for y in outputs)


def _rows(op: Any, folded: Sequence[int], parameters: Sequence[int], gradients: bool = False) -> Callable[..., Any]:
    """An operator whose arguments `folded` may have any leading axes.

    Args:
      parameters: arguments that are shared by all rows; a mapped one cannot be folded, nor, in a backward pass (`gradients`), can any.
    """

    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        given = [i for i in parameters if args[i] is not None]
        if any(in_dims[i] is not None for i in given) or (gradients and given):
            return _one_by_one(op, info.batch_size, in_dims, args)
        new = [_first(x, in_dims[i], info.batch_size) if i in folded else x for i, x in enumerate(args)]
        return _mapped(op(*new))

    return rule


def _softmax(op: Any, tensors: int) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        moved = [_first(x, d, info.batch_size) for x, d in zip(args[:tensors], in_dims, strict=False)]
        axis = args[tensors]
        return op(*moved, axis if axis < 0 else axis + 1, *args[tensors + 1 :]), 0

    return rule


def _activation(op: Any, tensors: int) -> Callable[..., Any]:
    """`tensors` counts those of x's shape; the numbers of rows, columns and the seed follow."""

    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        arrays, (rows, columns, seed), rest = args[:tensors], args[tensors : tensors + 3], args[tensors + 3 :]
        if any(
            d is not None for d in in_dims[tensors : tensors + 3]
        ):  # other numbers for each element: they have no batch axis
            return _one_by_one(op, info.batch_size, in_dims, args)
        moved = [_first(x, d, info.batch_size) for x, d in zip(arrays, in_dims, strict=False)]
        scalar = moved[0] is not None and moved[0].dim() == 1
        if scalar:  # one element is a row of one feature
            moved = [x[:, None] for x in moved if x is not None]
        result = op(*moved, None if rows is None else rows.expand(info.batch_size, *rows.shape), columns, seed, *rest)
        return result[:, 0] if scalar else result, 0

    return rule


def _rope(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        size, (query, key, cos, sin, *rest) = info.batch_size, args
        batch = query.shape[0 if in_dims[0] is None else 1 if in_dims[0] == 0 else 0]

        def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None or (dim is None and x.shape[0] == 1 and x.dim() == 3):
                return x  # a table that all share
            moved = _first(x, dim, size)
            assert moved is not None
            if moved.shape[1] != batch:
                moved = moved.expand(size, batch, *moved.shape[2:])
            return moved.reshape(size * batch, *moved.shape[2:])

        turned = op(*(fold(x, d) for x, d in zip((query, key, cos, sin), in_dims, strict=False)), *rest)
        return _mapped(tuple(y if y.shape == (0,) else y.unflatten(0, (size, batch)) for y in turned))

    return rule


_CORES = {"a": 2, "b": 2, "bias": 1, "scale_a": 1, "scale_b": 1}
"""Axes of a product's operands behind the batch axes."""


def _gemm_operands(
    size: int, in_dims: Dims, args: Sequence[Any], everything: bool
) -> tuple[list[Any], list[tuple[int, ...] | None]]:
    """The five operands with the mapped axis before all batch axes, and the shapes that each has behind it; `everything`: of those that are not mapped too."""
    moved: list[Any] = [
        _first(x, d, size) if everything or d is not None else x for x, d in zip(args[:5], in_dims[:5], strict=True)
    ]
    shapes = [tuple(x.shape[1:]) if x is not None and everything else None for x in moved]
    mapped = [x is not None and (everything or d is not None) for x, d in zip(moved, in_dims, strict=False)]
    ranks = [0 if x is None else x.dim() - m for x, m in zip(moved, mapped, strict=True)]
    batch = max(max(0, rank - core) for rank, core in zip(ranks, _CORES.values(), strict=True))
    for i, core in enumerate(_CORES.values()):
        if mapped[i]:
            missing = batch + core - ranks[i]
            moved[i] = moved[i].reshape(size, *(1,) * missing, *moved[i].shape[1:])
    return moved, shapes


def _gemm(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        if in_dims[0] is None and in_dims[1] is None:  # the result's batch axes are those of the matrices
            args, in_dims = (args[0].expand(info.batch_size, *args[0].shape), *args[1:]), (0, *in_dims[1:])
        moved, _ = _gemm_operands(info.batch_size, in_dims, args, everything=False)
        return _mapped(op(*moved, *args[5:]))

    return rule


def _gemm_backward(op: Any) -> Callable[..., Any]:
    """Every operand is repeated, since each element has gradients of its own."""

    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        size, (dout, saved, *rest) = info.batch_size, args
        moved, shapes = _gemm_operands(size, in_dims[2:], rest, everything=True)
        if saved.shape != (0,):
            saved = _first(saved, in_dims[1], size)
        gradients = op(_first(dout, in_dims[0], size), saved, *moved, *rest[5:])
        results = tuple(
            g if g.shape == (0,) or shape is None else g.reshape(size, *shape)
            for g, shape in zip(gradients, shapes, strict=True)
        )
        return results, tuple(None if g.shape == (0,) else 0 for g in gradients)

    return rule


def _attention(op: Any, backward: bool) -> Callable[..., Any]:
    """The mapped axis joins the batch."""
    # Axes of each tensor with its batch axis, and whether it may lack that, or have 1 there.
    own = (
        ((4, False), (3, False), (4, False), (3, False)) if backward else ()
    )  # dout, dlogsumexp, out, logsumexp, then `of_bias`
    operands = (*((4, False),) * 3, (4, True), (4, True), (2, True), (2, True))  # ... bias, mask and both segment ids
    sinks, seed = (12, 13) if backward else (7, 8)

    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        # Mapped sinks have no batch axis; and of a bias or sinks that the elements share, each element has a gradient of its own.
        if in_dims[sinks] is not None or (backward and (args[sinks] is not None or args[4])):
            return _one_by_one(op, size, in_dims, args)
        start = len(own) + backward
        query = _first(args[start], in_dims[start], size)
        assert query is not None
        batch = query.shape[1]

        def fold(x: Tensor | None, dim: int | None, axes: int, shareable: bool) -> Tensor | None:
            if x is None or (shareable and dim is None and (x.dim() < axes or x.shape[0] == 1)):
                return x
            moved = _first(x, dim, size)
            assert moved is not None
            moved = moved.reshape(size, *(1,) * (axes + 1 - moved.dim()), *moved.shape[1:])
            return moved.expand(size, batch, *moved.shape[2:]).flatten(0, 1)

        new = list(args)
        kinds = {**dict(enumerate(own)), **dict(enumerate(operands, start)), seed: (3, False)}
        for i, (axes, shareable) in kinds.items():
            new[i] = fold(args[i], in_dims[i], axes, shareable)
        results = op(*new)
        return _mapped(tuple(y if y.shape == (0,) else y.unflatten(0, (size, batch)) for y in results))

    return rule


def register() -> None:
    """Gives every operator its rule; importing `vishwamai.torch` does."""
    ops = torch.ops.vishwamai
    rules = {
        ops.norm: _rows(ops.norm, folded=(0, 3), parameters=(1, 2)),
        ops.norm_backward: _rows(ops.norm_backward, folded=(0, 1, 2), parameters=(3, 4), gradients=True),
        ops.softmax: _softmax(ops.softmax, 1),
        ops.softmax_backward: _softmax(ops.softmax_backward, 2),
        ops.activation: _activation(ops.activation, 1),
        ops.activation_backward: _activation(ops.activation_backward, 2),
        ops.rope: _rope(ops.rope),
        ops.rope_backward: _rope(ops.rope_backward),
        ops.gated: _rows(ops.gated, folded=(0,), parameters=(1, 2)),
        ops.gated_backward: _rows(ops.gated_backward, folded=(0, 1, 2, 3), parameters=(4, 5), gradients=True),
        ops.cross_entropy: _rows(ops.cross_entropy, folded=(0, 3), parameters=(1, 2)),
        ops.cross_entropy_backward: _rows(
            ops.cross_entropy_backward, folded=(0, 1, 2, 3, 4, 5, 6, 9), parameters=(7, 8), gradients=True
        ),
        ops.grouped_gemm: _rows(ops.grouped_gemm, folded=(), parameters=(0, 1, 2)),
        ops.grouped_gemm_backward: _rows(ops.grouped_gemm_backward, folded=(), parameters=(0, 1, 2, 3)),
        ops.block_sparse_matmul: _rows(ops.block_sparse_matmul, folded=(0,), parameters=(1, 2)),
        ops.block_sparse_matmul_backward: _rows(
            ops.block_sparse_matmul_backward, folded=(0, 1), parameters=(2, 3), gradients=True
        ),
        ops.attention: _attention(ops.attention, backward=False),
        ops.attention_backward: _attention(ops.attention_backward, backward=True),
        ops.gemm: _gemm(ops.gemm),
        ops.gemm_backward: _gemm_backward(ops.gemm_backward),
    }
    for op, rule in rules.items():
        torch.library.register_vmap(op.default, rule)
