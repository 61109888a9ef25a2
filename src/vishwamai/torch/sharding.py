"""How the custom operators split over a mesh of devices (`torch.distributed.tensor`): a rule for each, as factors of
its tensors' dimensions.

`register_sharding()` tells DTensor the rules. Each names the factor of every dimension and the factors that may be
split, as `core.sharding` does for JAX: over an axis of the mesh that splits a factor, the tensors that have it are
`Shard`ed along it, the others are `Replicate`d, and a result that is a sum over it is `Partial`. A tensor that is split
otherwise is redistributed first, by DTensor itself, so a placement may cost time but never changes the answer. An
operator that has no rule here is an error of DTensor's that names it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.types import AnyArray
from vishwamai.torch import dtensor_private, torch_private

Dims = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of one call of an operator.

    Attributes:
      inputs: the factor of every dimension of each tensor argument, by its name; None for a dimension that must stay
        whole. A dimension of size 1 beside a larger one of the same factor is shared and stays whole too; arguments
        that a call leaves out are ignored.
      outputs: factors of every result; the name of an input (its gradient: the same factors); or None for one that
        is empty.
      splittable: the factors that may be split. Where a factor's dimensions have different sizes (heads of queries and
        of keys) it is split only if every one of them divides evenly.
      independent: pairs (result, factor) of a result that neither has the factor nor sums over it: it is whole, and the
        same everywhere.
    """

    inputs: Mapping[str, Dims]
    outputs: tuple[str | Dims | None, ...]
    splittable: frozenset[str]
    independent: frozenset[tuple[int, str]] = frozenset()


RULES: dict[str, Callable[[Any], Rule]] = {}
"""By the operator's name in `torch.ops.vishwamai`: `call` has its arguments by name, for tensors something with
`.shape`.
"""


def placements(rule: Rule, tensors: Mapping[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    """What each axis of the mesh may do: pairs (placements of the results, placements of `tensors`), the first of them
    "nothing is split".
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    sizes = {factor: max(strategies) for factor, strategies in _sizes(rule, tensors).items()}

    def dims(name: str) -> Dims:
        """Without the factors of dimensions that are shared."""
        pairs = zip(rule.inputs[name], tensors[name].shape, strict=True)
        return tuple(None if f is None or (size == 1 and sizes[f] > 1) else f for f, size in pairs)

    def along(dims: Dims, factor: str) -> Any:
        return Shard(dims.index(factor)) if factor in dims else None

    def of_result(i: int, factor: str) -> Any:
        out = rule.outputs[i]
        if out is None or (i, factor) in rule.independent or (isinstance(out, str) and out not in tensors):
            return Replicate()
        return along(dims(out) if isinstance(out, str) else out, factor) or Partial()

    strategies: list[tuple[list[Any], list[Any]]] = [([Replicate()] * len(rule.outputs), [Replicate()] * len(tensors))]
    for factor in sorted(rule.splittable & set(sizes)):
        inputs = [along(dims(name), factor) or Replicate() for name in tensors]
        strategies.append(([of_result(i, factor) for i in range(len(rule.outputs))], inputs))
    return strategies


def _sizes(rule: Rule, tensors: Mapping[str, Any]) -> dict[str, set[int]]:
    """The sizes of the dimensions of each factor."""
    sizes: dict[str, set[int]] = {}
    for name, x in tensors.items():
        for factor, size in zip(rule.inputs[name], x.shape, strict=True):
            if factor is not None:
                sizes.setdefault(factor, set()).add(size)
    return sizes


def _parts(size: int, counts: list[int]) -> set[int]:
    """The sizes that a dimension's parts have, split into so many one after the other as DTensor does: 5 over 4 devices
    are 2, 2, 1 and none.

    >>> sorted(_parts(5, [4])), sorted(_parts(6, [2, 2]))
    ([0, 1, 2], [1, 2])
    """
    sizes = {size}
    for count in counts:
        sizes = {len(part) for extent in sizes for part in _chunks(extent, count)}
    return sizes


def _chunks(size: int, count: int) -> list[range]:
    length = -(-size // count)
    return [range(min(i * length, size), min((i + 1) * length, size)) for i in range(count)]


def _strategy(make_rule: Callable[[Any], Rule], call: dtensor_private.ShardedCall) -> Any:
    """DTensor's question for one call, answered."""
    tensors = call.tensors
    rule = make_rule(SimpleNamespace(**call.arguments))
    aligned = {factor for factor, sizes in _sizes(rule, tensors).items() if len(sizes - {1}) > 1}

    def whole_problems(inputs: Sequence[Any], outputs: Any) -> bool:
        """No device is left without a part; and groups of query heads stay with their key head, which they do where
        both are split into equal parts.
        """
        del outputs
        for spec, (name, x) in zip(inputs, tensors.items(), strict=True):
            for axis, (factor, size) in enumerate(zip(rule.inputs[name], x.shape, strict=True)):
                parts = [spec.mesh.size(i) for i, p in enumerate(spec.placements) if p.is_shard() and p.dim == axis]
                if parts and (0 in _parts(size, parts) or (factor in aligned and size % math.prod(parts))):
                    return False
        return True

    choices = [(results, dict(zip(tensors, inputs, strict=True))) for results, inputs in placements(rule, tensors)]
    return dtensor_private.answer(call, choices, len(rule.outputs), whole_problems)


@functools.cache
def register_sharding() -> None:
    """Tells `torch.distributed.tensor` how the operations of `vishwamai.torch` split, forward and backward; call it
    once, before the first DTensor.

    It is a call and nothing that importing does, because it imports `torch.distributed.tensor` (about a second).

    Split without communication: batch and heads of attention, packed sequences' heads, rows of normalizations, every
    axis of activations, every axis of a softmax but its own, batch, heads and positions of rotary embeddings, rows,
    columns and batch of `gemm` (its contraction, where there is neither bias nor activation, gives a `Partial` sum),
    rows and hidden features of gated units, tokens of the loss, columns and contraction of grouped products, rows
    beside a block-sparse matrix. Gradients of what is shared between devices come out `Partial`, as torch's own do.

    Raises:
      DeviceError: this torch was built without `torch.distributed`.

    >>> register_sharding()
    """
    from vishwamai.core.errors import DeviceError

    if not torch.distributed.is_available():
        raise DeviceError("register_sharding: this torch has no torch.distributed; install a build that has it.")
    torch_private.register_operators()  # a rule is stated in its operation's file, imported when it is used
    for name, rule in RULES.items():
        operator = getattr(torch.ops.vishwamai, name).default
        dtensor_private.register_strategy(operator, functools.partial(_strategy, rule))


def is_dtensor(x: AnyArray) -> bool:
    """Whether a tensor is spread over a mesh; it imports nothing."""
    return hasattr(x, "device_mesh")


def placed_like(x: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, which every process has whole and alike, as an operand beside `x`: on its mesh if that is a DTensor."""
    if not is_dtensor(x) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = x.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
