"""Values of a JSON file, checked against the types that their keys stand for."""

from __future__ import annotations

import math
from typing import Any

from vishwamai.core.errors import ShapeError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list of texts",
}


def check_value(key: str, value: Any, kind: type, source: str, least: float | None = None) -> None:
    """Checks a value, which is not null.

    Args:
      key: as the file writes it.
      kind: bool, int, float (any finite number), str, dict, or list for a list of texts.
      source: the file's name.
      least: the smallest legal number; None: numbers are above 0.

    Raises:
      ShapeError: it is another value; the text names the file, the key, what was found and what was expected.

    >>> check_value("rope_theta", "x", float, "config.json")
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: config.json: `rope_theta` is 'x'; expected a number above 0.
    """
    good = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    words = _WORDS[kind]
    if kind in (int, float):
        at_least = 1 if kind is int and least is None else least
        words += " above 0" if at_least is None else f" of at least {at_least:g}"
        good = good and math.isfinite(value) and (value > 0 if at_least is None else value >= at_least)
    if kind is list:
        good = good and all(isinstance(entry, str) for entry in value)
    if not good:
        raise ShapeError(f"{source}: `{key}` is {value!r}; expected {words}.")
