"""torch's names that are not part of its documented interface, beside DTensor's (`dtensor_private.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from vishwamai.core.types import AnyArray, PyTree

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# By `is_grads_batched`.
_is_mapped = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def only_computes(tensors: Iterable[AnyArray]) -> bool:
    """Whether an operator on these tensors would reach its kernel unseen: torch neither compiles nor traces nor maps,
    no dispatch mode is in force, and no tensor is of a class of its own.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return all(x is None or (type(x) in _PLAIN and not _is_mapped(x) and not x.is_meta) for x in tensors)


def is_transformed(tensors: Iterable[PyTree]) -> bool:
    """Whether a transform of `torch.func` is in force, or a tensor has a tangent."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or has_tangent(tensors)  # pyright: ignore[reportAttributeAccessIssue]


def has_tangent(tensors: Iterable[PyTree]) -> bool:
    """Whether forward mode differentiates one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def constant_result(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import the whole compiler (2 s) to set this mark."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


class _Operators(torch._ops._OpNamespace):
    """`torch.ops.vishwamai` until its operators are registered."""

    __module__ = torch._ops.__name__  # a part of the operators' names in exported programs

    def __getattr__(self, op_name: str) -> Any:
        try:
            return super().__getattr__(op_name)
        except AttributeError:
            # While a file of the package is imported, torch asks whether its operator is new.
            ours = [module for name, module in sys.modules.items() if name.startswith("vishwamai.torch.")]
            if op_name.startswith("__") or any(getattr(module.__spec__, "_initializing", False) for module in ours):
                raise
            register_operators()
            return getattr(self, op_name)


def load_operators_by(register: Callable[[], None]) -> None:
    """Calls `register` when the first operator is looked up that is not registered yet."""
    operators: Any = torch.ops.vishwamai
    operators.__class__ = _Operators
    operators.__dict__["register"] = register


def register_operators() -> None:
    """Registers every operator, for what needs all of them at once; a second call does nothing."""
    operators: Any = torch.ops.vishwamai
    register = operators.__dict__.pop("register", None)
    if register is not None:
        object.__setattr__(operators, "__class__", torch._ops._OpNamespace)
        register()
