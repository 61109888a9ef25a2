"""The types of the arguments of torch's public functions, checked by their annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vishwamai.core import arguments
from vishwamai.core.errors import ShapeError

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F, exempt: Sequence[str] = ()) -> F:
    """`core.arguments.checked`, except while `torch.compile` traces: there numbers may be symbols.

    >>> import torch
    >>> from torch import Tensor
    >>> @checked
    ... def doubled(x: Tensor, times: int = 1):
    ...     return x * 2**times
    >>> doubled(torch.ones(2))
    tensor([2., 2.])
    """
    return arguments.checked(function, exempt, torch.compiler.is_compiling)


def checks_its_own(*names: str) -> Callable[[F], F]:
    """`checked`, but for the arguments of these names, as a decorator."""
    return lambda function: checked(function, names)


def check_tensors(function: str, name: str, pair: object) -> None:
    """Checks that a pair, an argument that `function` calls `name`, holds tensors; what is not a pair is not looked at.

    Raises:
      ShapeError: an entry is something else.
    """
    wrong = [x for x in pair if not isinstance(x, torch.Tensor)] if isinstance(pair, (tuple, list)) else []
    if wrong:
        raise ShapeError(f"{function}: an entry of `{name}` is a {type(wrong[0]).__name__}; pass a pair of tensors.")
