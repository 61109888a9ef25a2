"""Processors of logits by name: functions of an answer's tokens that say which tokens must not follow.

A request names them (`logits_processors`). The operator adds further ones; no request brings code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from vishwamai.core.errors import ShapeError

Processor = Callable[[Sequence[int]], Collection[int]]
"""From the tokens of an answer so far to those that must not follow."""

Factory = Callable[..., Processor]
"""Makes a processor from the options of a request."""


def no_repeat_ngram(size: int = 3) -> Processor:
    """Keeps an answer from having the same `size` tokens in a row twice.

    >>> no_repeat_ngram(2)([5, 6, 7, 5])
    {6}

    Raises:
      ShapeError: `size` is not a whole number above 0.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ShapeError(f"no_repeat_ngram: `size` is {size!r:.100}; pass a whole number above 0.")

    def following(tokens: Sequence[int]) -> set[int]:
        before = tuple(tokens[len(tokens) - size + 1 :]) if len(tokens) >= size - 1 else None
        places = range(len(tokens) - size + 1)
        return {tokens[i + size - 1] for i in places if tuple(tokens[i : i + size - 1]) == before}

    return following


PROCESSORS: Mapping[str, Factory] = {"no_repeat_ngram": no_repeat_ngram}
"""Those of every server, by name."""


def imported(text: str) -> tuple[str, Factory]:
    """The name and the function of "NAME=MODULE:FUNCTION", a choice of the operator's.

    Raises:
      ShapeError: it is not written so, or there is no such function.

    >>> imported("short=vishwamai.inference.processors:no_repeat_ngram")[0]
    'short'
    """
    name, separator, place = text.partition("=")
    module, colon, function = place.partition(":")
    if not (name and separator and module and colon and function):
        raise ShapeError(f"{text!r} is not NAME=MODULE:FUNCTION.")
    try:
        factory: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ShapeError(f"{text!r}: {error}; pass a function of a module that Python finds.") from error
    if not callable(factory):
        raise ShapeError(f"{text!r} is a {type(factory).__name__}; pass a function that makes a processor.")
    return name, cast(Factory, factory)
