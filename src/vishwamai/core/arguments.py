"""The types of a public function's arguments, checked as its annotations state them, before anything reads them.

An annotation is read as text, so it costs no import. `Float[Array, "..."]` is an array or what can become one; `int`,
`float`, `bool` and `str` take NumPy's scalars, too, which arrive as Python's; any other name is a class that the value
is an instance of, such as torch's, which the function's module has imported. `Any`, `object`, `PyTree` and `DTypeLike`
are not checked. Values (a positive size, a legal name) are the function's own to check. The function runs under JAX's
default promotion (`promotion.py`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np

from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.promotion import by_default
from vishwamai.core.spec import as_array
from vishwamai.core.types import PyTree

F = TypeVar("F", bound=Callable[..., Any])
Reader = Callable[[object], object]
"""`(value) -> the value to pass on`; raises `_Wrong` where the type is another."""


class _Wrong(Exception):
    """The value is not of the type."""


def checked(function: F, exempt: Sequence[str] = (), unless: Callable[[], bool] | None = None) -> F:
    """The function, which raises ShapeError for an argument of another type than its annotation states.

    For a class, its constructor is checked. Arguments of the names `exempt` pass: the function checks them itself, and
    its errors say more. Nothing is checked where `unless()`.

    >>> @checked
    ... def scaled(x: Float[Array, "n"], factor: float = 1.0, name: str | None = None):
    ...     return x * factor
    >>> scaled([1, 2], np.float32(2.0)).tolist()
    [2.0, 4.0]
    >>> scaled([1, 2], "much")
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: scaled: `factor` is 'much', of type str; pass a number.
    """
    if isinstance(function, type):
        function.__init__ = _checked(function.__init__, function.__name__, exempt, unless)  # type: ignore[misc]
        return function  # type: ignore[return-value]
    return _checked(function, function.__name__, exempt, unless)  # type: ignore[return-value]


def checks_its_own(*names: str) -> Callable[[F], F]:
    """`checked`, but for the arguments of these names, as a decorator."""
    return functools.partial(checked, exempt=names)


def _checked(function: Any, name: str, exempt: Sequence[str], unless: Callable[[], bool] | None) -> Any:
    parameters = inspect.signature(function).parameters.values()
    unknown = set(exempt) - {p.name for p in parameters}
    assert not unknown, f"{name} has no {unknown}"
    readers = {
        p.name: r
        for p in parameters
        if p.name not in exempt and (r := _reader(name, p.name, p.annotation, function.__globals__)) is not None
    }
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = tuple(readers.get(p.name) for p in parameters if p.kind in positional)
    rest = next((readers.get(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    run = by_default(function)

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if unless is not None and unless():
            return function(*args, **kwargs)
        read = [value if reader is None else reader(value) for value, reader in zip(args, by_place)]
        if len(args) > len(read):
            read += args[len(read) :] if rest is None else map(rest, args[len(read) :])
        for key, value in kwargs.items():
            reader = readers.get(key)
            if reader is not None and value is not defaults.get(key, readers):
                kwargs[key] = reader(value)
        return run(*read, **kwargs)

    # In the function's own module, as far as doctest and the warnings' line of the caller go by it.
    wrapper = types.FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return functools.wraps(function)(wrapper)


def check_callable(function: str, name: str, value: object) -> None:
    """Raises KernelError where `value` cannot be called; `function` and `name` are the public function and argument."""
    if not callable(value):
        raise KernelError(f"{function}: `{name}` is {described(value)}; pass a function.")


def check_instances(function: str, kinds: Mapping[str, type], values: Mapping[str, object]) -> None:
    """Raises ShapeError where one of `values` is neither None nor of the class that `kinds` has for its name: of
    optional arguments, whose annotations `checked` leaves to the function.
    """
    for name, kind in kinds.items():
        if values[name] is not None and not isinstance(values[name], kind):
            raise ShapeError(f"{function}: `{name}` is {described(values[name])}; pass a {kind.__name__} or None.")


def described(value: object) -> str:
    """A value in an error: its text, cut short, and its type.

    >>> described("much")
    "'much', of type str"
    """
    if value is None:
        return "None"
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"


def _reader(function: str, name: str, annotation: object, scope: Mapping[str, object]) -> Reader | None:
    """What reads an argument; None where anything is legal."""
    if not isinstance(annotation, str):
        return None
    members = _members(ast.parse(annotation, mode="eval").body)
    if (classes := _classes_of_torch(members, scope)) is not None:
        return _one_of(function, name, classes)
    if len(members) > 1 and any(_is_class(member) for member in members):
        return None  # one of several forms, which the function tells apart, and whose names its errors list
    forms = [_of(function, name, member, scope) for member in members]
    if any(form is None for form in forms):
        return None
    pairs = [form for form in forms if form is not None]
    # An array takes whatever can become one, so it comes last.
    pairs.sort(key=lambda pair: pair[1] == _ARRAY)
    readers = [reader for reader, _ in pairs]
    words = " or ".join(dict.fromkeys(text for _, text in pairs))
    arrays = [reader for reader, text in pairs if text == _ARRAY]

    def read(value: object) -> object:
        # An array stays where it is, even if it is one number.
        for reader in arrays if arrays and isinstance(value, (jax.Array, np.ndarray)) else readers:
            try:
                return reader(value)
            except _Wrong:
                pass
        if arrays and len(pairs) <= 2:
            as_array(function, name, value)  # its words for what cannot be an array
        raise ShapeError(f"{function}: `{name}` is {described(value)}; pass {words}.")

    return read


_UNCHECKED = ("Any", "object", "DTypeLike", "PyTree")
"""Annotations of what is not checked here: a dtype's spellings are read by `spec.as_jax_dtype`, whose error lists
them.
"""

_ARRAY = "an array of JAX or NumPy"
_TENSOR, _TENSOR_WORDS = "Tensor", "a tensor of torch"
_ARRAYS = frozenset(("Float", "Num", "Int", "Integer", "Bool", "Shaped", "Inexact", "Real"))


def _classes_of_torch(members: Sequence[ast.expr], scope: Mapping[str, object]) -> dict[type, str] | None:
    """The classes, one of them of torch, that a value may be an instance of, with the words for each; None where the
    annotation is another.
    """
    classes: dict[type, str] = {}
    for member in members:
        text = ast.unparse(member)
        module, _, name = text.rpartition(".")
        kind = type(None) if text == "None" else getattr(scope.get(module), name, None) if module else scope.get(name)
        if not isinstance(kind, type):
            return None
        classes[kind] = "None" if text == "None" else _TENSOR_WORDS if text == _TENSOR else f"a {text}"
    return classes if any(kind.__module__.partition(".")[0] == "torch" for kind in classes) else None


def _one_of(function: str, name: str, classes: Mapping[type, str]) -> Reader:
    kinds = tuple(classes)

    def read(value: object) -> object:
        if isinstance(value, kinds):
            return value
        raise ShapeError(f"{function}: `{name}` is {described(value)}; pass {' or '.join(classes.values())}.")

    return read


def _members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_members(node.left), *_members(node.right)]
    return [node]


def _is_class(node: ast.expr) -> bool:
    return _name(node) not in (None, *_SCALARS, *_UNCHECKED, "Path", _TENSOR)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _of(function: str, name: str, node: ast.expr, scope: Mapping[str, object]) -> tuple[Reader, str] | None:
    """What reads one member of a union, and the words for it; None for `Any`."""
    text = _name(node.value if isinstance(node, ast.Subscript) else node)
    if _is_none(node):
        return _exactly_none, "None"
    if text in _UNCHECKED:
        return None
    if text in _ARRAYS:
        return functools.partial(_array, function, name), _ARRAY
    if text == "Key":
        return _key, "one key of jax.random"
    if text in _SCALARS:
        return _SCALARS[text]
    if text == "Literal":
        assert isinstance(node, ast.Subscript)
        legal = ast.literal_eval(node.slice)
        return _text, " or ".join(map(repr, legal if isinstance(legal, tuple) else (legal,)))
    if text == "Callable":
        return functools.partial(_instance, Callable), "a function"
    if text == "Mapping":
        return functools.partial(_instance, Mapping), "a dict"
    if text in ("tuple", "Sequence"):
        return _sequence(function, name, node, text, scope)
    assert text is not None, f"{function}: the annotation of {name} is not understood"
    kind = scope.get(text)
    check = functools.partial(_instance, kind) if isinstance(kind, type) else functools.partial(_named, text)
    return check, _TENSOR_WORDS if text == _TENSOR else f"a {text}"


def _sequence(function: str, name: str, node: ast.expr, kind: str, scope: Mapping[str, object]) -> tuple[Reader, str]:
    inner = node.slice if isinstance(node, ast.Subscript) else None
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner] if inner is not None else []
    any_length = kind == "Sequence" or any(isinstance(p, ast.Constant) and p.value is ... for p in parts)
    parts = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is ...)]
    readers = [_reader(function, name, ast.unparse(p), scope) for p in parts]

    def read(value: object) -> object:
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
            raise _Wrong
        if isinstance(value, np.ndarray) and value.ndim == 0:
            raise _Wrong
        items = value.tolist() if isinstance(value, np.ndarray) else list(value)
        item_readers = readers * len(items) if any_length and readers else readers
        if readers and len(items) != len(item_readers):
            raise _Wrong
        try:
            items = (
                [item if reader is None else reader(item) for item, reader in zip(items, item_readers)]
                if item_readers
                else items
            )
        except ShapeError as error:
            raise _Wrong from error
        keeps_tuple = type(value) is tuple or (kind == "tuple" and type(value) is not list)
        return tuple(items) if keeps_tuple else items

    words = "a sequence" if not readers or any_length else f"a pair ({ast.unparse(inner)})" if inner else "a tuple"
    return read, words


def _exactly_none(value: object) -> None:
    if value is not None:
        raise _Wrong


def _scalar(value: Any) -> object:
    """A scalar of NumPy, or an array of JAX or NumPy that is one and whose value is known, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    concrete = isinstance(value, np.ndarray) or (
        isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    )
    if concrete and value.ndim == 0 and isinstance(value.dtype, np.dtype):
        return np.asarray(value).item()
    return value


def _integer(value: object) -> int:
    value = value if type(value) is int else _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise _Wrong
    return value


def _number(value: object) -> float:
    value = value if type(value) in (float, int) else _scalar(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise _Wrong
    if not isinstance(value, int) or abs(value) < 2**31:
        return value
    try:
        return float(value)  # what an array of integers would not hold
    except OverflowError:
        raise _Wrong from None


def _flag(value: object) -> bool:
    value = value if type(value) is bool else _scalar(value)
    if not isinstance(value, bool):
        raise _Wrong
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong
    return str(value)


_SCALARS: dict[str | None, tuple[Reader, str]] = {
    "int": (_integer, "an integer"),
    "float": (_number, "a number"),
    "bool": (_flag, "True or False"),
    "str": (_text, "a string"),
}


def _key(value: Any) -> object:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise _Wrong
    new = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not (new and value.shape == ()) and not (value.dtype == np.uint32 and len(value.shape) == 1):
        raise _Wrong
    return value


def _array(function: str, name: str, value: object) -> object:
    if isinstance(value, jax.Array):
        if not isinstance(value.dtype, np.dtype):
            raise _Wrong  # a key
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV":
        return value
    if value is None or isinstance(value, jax.ShapeDtypeStruct):
        raise _Wrong
    return as_array(function, name, value)


def _instance(kind: Any, value: object) -> object:
    if not isinstance(value, kind):
        raise _Wrong
    return value


def _named(name: str, value: PyTree) -> PyTree:
    if not any(kind.__name__ == name for kind in type(value).__mro__):
        raise _Wrong
    return value
