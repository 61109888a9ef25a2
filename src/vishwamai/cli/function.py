"""The user's function and its arguments, as they are written on a command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vishwamai.core.errors import VishwamaiError


class CommandError(VishwamaiError):
    """What was written on the command line cannot be served; the text says what to write instead."""


_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "i8": "int8",
    "s32": "int32",
    "i32": "int32",
    "u8": "uint8",
    "u32": "uint32",
    "pred": "bool",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9_]*)\s*\[(?P<shape>[\d\s,]*)\]")
_NAMED = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.+)", re.S)


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A function with its arguments: `function(*args, **kwargs)`, arrays as `jax.ShapeDtypeStruct`s, other values bound
    already.
    """

    name: str
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a function and its arguments."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="the function, jitted or not: `package.module:name` or `path/to/file.py:name`",
    )
    parser.add_argument(
        "--args",
        metavar="ARGS",
        help="its arguments, arrays by dtype and shape, anything else as a Python literal: 'bf16[8,4096], "
        "scale=bf16[4096], eps=1e-5'. "
        "Without it the module's own `FUNCTION_example_args()` or `example_args()` is called; it returns a tuple, or "
        "a dict of keywords.",
    )


def load_call(reference: str, text: str | None) -> BoundCall:
    """The function that `reference` names, with the arguments that `text` (or its module) gives.

    Raises:
      CommandError: there is no such module or function, or its arguments are unknown.
    """
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name:
        raise CommandError(f"{reference!r} names no function; write MODULE:FUNCTION, such as `vishwamai:rms_norm`.")
    module = _module(module_name)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        offered = [n for n in public if callable(getattr(module, n, None))]
        near = difflib.get_close_matches(name, offered) or offered[:20]
        raise CommandError(f"{module_name} has no function {name!r}; it has {', '.join(near) or 'none'}.")
    args, kwargs = parse_arguments(text) if text is not None else _example_arguments(module, name)
    return _bind(name, function, args, kwargs)


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CommandError(f"there is no file {name!r}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a console script's path lacks it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise CommandError(
            f"there is no module {name!r} here; run from its folder, or name the file: path/to/file.py:FUNCTION."
        ) from None


def _example_arguments(module: ModuleType, name: str) -> tuple[tuple[object, ...], dict[str, object]]:
    for candidate in (f"{name}_example_args", "example_args"):
        maker = getattr(module, candidate, None)
        if callable(maker):
            example: Any = maker()
            return ((), example) if isinstance(example, dict) else (tuple(example), {})
    raise CommandError(
        f"the arguments of {name!r} are unknown: pass --args 'bf16[8,4096], ...', or define `{name}_example_args()` "
        "beside it."
    )


def parse_arguments(text: str) -> tuple[tuple[object, ...], dict[str, object]]:
    """Reads arguments: arrays as dtype[shape], other values as Python literals, keywords as name=value.

    >>> parse_arguments("bf16[8,256], scale=f32[256], eps=1e-5")
    ((ShapeDtypeStruct(shape=(8, 256), dtype=bfloat16),),
     {'scale': ShapeDtypeStruct(shape=(256,), dtype=float32), 'eps': 1e-05})

    Raises:
      CommandError: an argument is neither.
    """
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for part in _split(text):
        named = _NAMED.fullmatch(part)
        if named is not None:
            kwargs[named["name"]] = _value(named["value"].strip())
        elif kwargs:
            raise CommandError(f"--args: {part!r} stands after a keyword argument; put it before, or name it.")
        else:
            args.append(_value(part))
    return tuple(args), kwargs


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside every bracket and quote."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _value(text: str) -> object:
    array = _ARRAY.fullmatch(text)
    if array is not None:
        import jax  # here, so that --help does not load it
        import jax.numpy as jnp

        name = _SHORT.get(array["dtype"], array["dtype"])
        try:
            dtype = jnp.dtype(name)
        except TypeError:
            raise CommandError(
                f"--args: {text!r}: there is no dtype {name!r}; write {', '.join(sorted(_SHORT))} or a NumPy name."
            ) from None
        return jax.ShapeDtypeStruct(tuple(int(n) for n in array["shape"].split(",") if n.strip()), dtype)
    if text.startswith("(") and "[" in text:  # a tuple of arrays, such as segment_ids
        return tuple(_value(part) for part in _split(text[1:-1]))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise CommandError(
            f"--args: {text!r} is neither an array such as bf16[8,4096] nor a Python literal such as 0.5, True, 'gelu' "
            "or (128, 0)."
        ) from None


def _is_dynamic(value: object) -> bool:
    import jax

    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))


def _bind(name: str, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> BoundCall:
    """Binds what is not an array into the function, unless it is jitted: then its own `static_argnames` decide."""
    if hasattr(function, "lower"):
        return BoundCall(name, function, args, kwargs)
    static = {key: value for key, value in kwargs.items() if not _is_dynamic(value)}
    dynamic = {key: value for key, value in kwargs.items() if key not in static}
    positions = [i for i, value in enumerate(args) if _is_dynamic(value)]

    @functools.wraps(function)
    def call(*arrays: object, **more: object) -> object:
        full = list(args)
        for i, value in zip(positions, arrays, strict=True):
            full[i] = value
        return function(*full, **static, **more)

    call.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # the wrapped one's no longer holds
    return BoundCall(name, call, tuple(args[i] for i in positions), dynamic)
