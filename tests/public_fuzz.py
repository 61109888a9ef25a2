"""Wrong calls of every public entry: who they are, what a right call of each is, and how it is made wrong.

The entries are what the public modules export. A right call of an entry is one that its own docstring makes, or that of
a method of its class: the examples run with the entry replaced by one that records its arguments. A wrong call replaces
one argument of a right one, or adds an optional one, by a value from `ODD`.
"""

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import random
import sys
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

MODULES = (
    "vishwamai",
    "vishwamai.kernels",
    "vishwamai.kernels.tpu",
    "vishwamai.kernels.gpu",
    "vishwamai.kernels.cpu",
    "vishwamai.kernels.tpu.tpu_custom_call",
    "vishwamai.torch",
    "vishwamai.aot",
    "vishwamai.nnx",
    "vishwamai.parallel",
    "vishwamai.models",
    "vishwamai.inference",
    "vishwamai.planning",
    "vishwamai.patch",
    "vishwamai.performance",
    "capibara.core.kernels",
)


class Opaque:
    """A value that is nothing that a function could want."""

    def __repr__(self) -> str:
        return "an opaque value"


ODD: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "-1": -1,
    "3": 3,
    "2**31": 2**31,
    "2**70": 2**70,
    "1.5": 1.5,
    "-0.5": -0.5,
    "inf": float("inf"),
    "nan": float("nan"),
    "1j": 1j,
    "empty text": "",
    "text": "bogus",
    "bytes": b"x",
    "float64": "float64",
    "...": ...,
    "[]": [],
    "()": (),
    "{}": {},
    "[None]": [None],
    "(0, 2**31)": (0, 2**31),
    "(1.5, 'a')": (1.5, "a"),
    "(1, 2, 3, 4)": (1, 2, 3, 4),
    "a dict": {"a": 1},
    "opaque": Opaque(),
    "a function": lambda *args, **kwargs: 0,
    "an array of text": np.array("x"),
    "an array of objects": np.array([Opaque()]),
    "a date": np.datetime64("2020-01-01"),
    "a scalar array": jnp.ones(()),
    "f32[3]": jnp.ones(3),
    "f32[0,4]": jnp.ones((0, 4)),
    "f32[1,2,3,4,5]": jnp.ones((1, 2, 3, 4, 5)),
    "s32[3]": jnp.arange(3),
    "u8[2,2]": np.ones((2, 2), np.uint8),
    "pred[2]": np.ones(2, bool),
    "c64[3]": jnp.ones(3, jnp.complex64),
    "a key": jax.random.key(0),
    "a shape": jax.ShapeDtypeStruct((3,), jnp.float32),
}


GIVEN: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("from_pretrained", "plan_load", "read_config", "read_generation_config", "read_tokenizer"), ("no such directory",)
) | {"save_pretrained": ("no decoder", "no such directory"), "tune": (len, ()), "Compiler": (), "Limits": ()}
"""Arguments of entries that have no example: theirs would need files, or a GPU."""


class Entry(NamedTuple):
    """A public entry: its module, its name, and the object itself."""

    module: str
    name: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call(NamedTuple):
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every callable of the public modules except errors; an object that two modules export is in the list once."""
    found: dict[int, Entry] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not error:
                found.setdefault(id(value), Entry(module.__name__, name, value))
    return tuple(found.values())


@functools.cache
def calls(entry: Entry) -> tuple[Call, ...]:
    """The calls that the examples of an entry make of it, and one without arguments where it needs none."""
    recorded: list[Call] = []

    class Recorder:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            recorded.append(Call(tuple(map(_known, args)), {name: _known(x) for name, x in kwargs.items()}))
            if skipped:
                return unittest.mock.MagicMock()
            return entry.function(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(entry.function, name)

    skipped = "doctest: +SKIP" in (entry.function.__doc__ or "")  # needs libtpu, or minutes
    source = inspect.getmodule(entry.function)
    names = dict(vars(source)) if source else {}
    recorder = Recorder()
    package = importlib.import_module(entry.module)
    with _replaced(package, entry.name, recorder):
        names[entry.name] = recorder
        for test in doctest.DocTestFinder(recurse=isinstance(entry.function, type)).find(
            entry.function, entry.name, module=False, globs=names
        ):
            for example in test.examples:
                example.options.pop(doctest.SKIP, None)
            with contextlib.redirect_stdout(io.StringIO()):
                # The functions among the arguments still need the names of the example.
                doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=lambda text: None, clear_globs=False)
    if entry.name in GIVEN:
        recorded.append(Call(GIVEN[entry.name], {}))
    parameters = inspect.signature(entry.function).parameters.values()
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        recorded.append(Call((), {}))
    return tuple(recorded)


def _known(x: Any) -> Any:
    """An argument as a later call can have it: a tracer, of an example that takes a gradient, ends with the example."""
    return jnp.ones(x.shape, x.dtype) if isinstance(x, Tracer) else x


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def wrong_calls(entry: Entry) -> Iterator[tuple[str, Call]]:
    """Every call with one argument replaced or added, with its name."""
    seen = set()
    for call in calls(entry):
        by_place, names = _by_place(entry.function), _parameters(entry.function)
        places: list[int | str] = [*range(min(len(call.args), _own(entry.function))), *call.kwargs]
        given = {*by_place[: len(call.args)], *call.kwargs}
        places += [name for name, optional in names.items() if optional and name not in given]
        # What `args` and `kwargs` hold are the arguments of the caller's own function, whose errors pass through.
        places = [place for place in places if _label(by_place, place) not in ("args", "kwargs")]
        for place in places:
            for text, value in ODD.items():
                args, kwargs = list(call.args), dict(call.kwargs)
                if isinstance(place, int):
                    args[place] = value
                else:
                    kwargs[place] = value
                label = _label(by_place, place)
                if (label, text, len(args)) not in seen:
                    seen.add((label, text, len(args)))
                    yield f"{label} = {text}", Call(tuple(args), kwargs)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """The names of the parameters, and whether each is optional."""
    return {
        name: p.default is not p.empty
        for name, p in inspect.signature(function).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _by_place(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that an argument without a name can go to; those after `*args` are by name only."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _label(by_place: list[str], place: int | str) -> str:
    """The name of the parameter, or the number of the argument where `*args` takes it."""
    if isinstance(place, str):
        return place
    return by_place[place] if place < len(by_place) else str(place)


def _own(function: Callable[..., Any]) -> int:
    """How many positional arguments are the function's own: those of a function that it only calls are that one's."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL and p.annotation in ("Any", "AnyArray", "PyTree", "object") for p in parameters):
        return len(_by_place(function))
    return sys.maxsize


def sample(entry: Entry, count: int | None, seed: int) -> list[tuple[str, Call]]:
    """`count` wrong calls of an entry, chosen by `seed`; all for None."""
    found = list(wrong_calls(entry))
    if count is None or len(found) <= count:
        return found
    return random.Random(f"{seed} {entry}").sample(found, count)


def outcome(function: Callable[..., Any], call: Call, traced: bool) -> BaseException | None:
    """What a call raises. `traced`: only traced, which computes nothing, where JAX can trace what it does."""
    runs = getattr(function, "__module__", "").startswith(("vishwamai.torch", "vishwamai.models"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if traced and not runs:
                jax.make_jaxpr(lambda: (_used(function(*call.args, **call.kwargs)), ())[1])()
            else:
                _used(function(*call.args, **call.kwargs))
        except Exception as error:
            return None if _of_the_caller(error) else error
    return None


def _of_the_caller(error: BaseException) -> bool:
    """Whether a function of an example raised it, which passes through."""
    return any(frame.filename.startswith("<doctest") for frame in traceback.extract_tb(error.__traceback__))


def _used(result: Any) -> None:
    """Enters a context, so that what it checks is checked."""
    if hasattr(result, "__enter__"):
        with result:
            pass
