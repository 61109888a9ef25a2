"""Values of a JSON file, checked against the types that their keys stand for."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ShapeError

LARGEST = 2.0**53
"""What no size, count or factor of a model exceeds; NaN and infinity do."""
_LONGEST_FILE = 2**26
"""Bytes of a JSON file of a model's directory; published ones have 3 MB at most."""
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
      key: name of the key in the file.
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
        good = good and abs(value) <= LARGEST and (value > 0 if at_least is None else value >= at_least)
    if kind is list:
        good = good and all(isinstance(entry, str) for entry in value)
    if not good:
        raise ShapeError(f"{source}: `{key}` is {value!r}; expected {words}.")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ShapeError: the file is missing or is not a JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ShapeError(f"{path}: it is not a regular file; a model's directory has a JSON file of that name.")
        if path.stat().st_size > _LONGEST_FILE:
            raise ShapeError(f"{path}: the file has {path.stat().st_size} bytes; expected {_LONGEST_FILE} at most.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeError(f"{path}: the file cannot be read ({error.strerror}); a model's directory has it.") from error
    except RecursionError as error:
        raise ShapeError(f"{path}: its lists and objects are nested too deeply; download it again.") from error
    except ValueError as error:
        raise ShapeError(f"{path}: the file is not JSON ({error}); download it again.") from error
    if not isinstance(values, dict):
        raise ShapeError(f"{path}: expected a JSON object, found {type(values).__name__}; download it again.")
    return values
