"""What a search in a program finds: a place where an operation can stand, or the reason why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vishwamai.rewrite.names import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Match:
    """Equations that one call of an operation can replace.

    Attributes:
      operation: the operation's public name.
      last: the equation whose result the call computes.
      region: the equations that are no longer needed then.
      call: computes the result from `operands`.
      words: description of the recognised operation.
    """

    operation: str
    last: JaxprEqn
    region: frozenset[JaxprEqn]
    call: Callable[..., Any]
    operands: tuple[Var, ...]
    words: str


@dataclasses.dataclass(frozen=True)
class Near:
    """Equations that look like an operation and are not it; `reason` says why."""

    operation: str
    eqn: JaxprEqn
    reason: str


class NoMatch(Exception):
    """These equations are an operation only at first sight; the text says why."""
