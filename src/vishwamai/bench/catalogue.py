"""Every operation of the library with its cases, found by looking into `vishwamai.ops`; a new operation needs no entry anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax

import vishwamai.ops
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning, UnsupportedError
from vishwamai.core.op import Op, record_plans


@dataclasses.dataclass(frozen=True)
class Operation:
    """An op and the cases that call it."""

    op: Op
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return self.op.name


@functools.cache
def operations() -> dict[str, Operation]:
    """Every op by name, in the order of their packages: a package of `vishwamai.ops` offers its `Op`, and its cases in `.cases.CASES`."""
    found: dict[str, Operation] = {}
    for info in pkgutil.iter_modules(vishwamai.ops.__path__):
        name = f"vishwamai.ops.{info.name}"
        if not info.ispkg or importlib.util.find_spec(f"{name}.cases") is None:
            continue
        cases = importlib.import_module(f"{name}.cases").CASES
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Op):
                found[value.name] = Operation(value, tuple(case for case in cases if case.op == value.name))
    return found


def chosen(names: Iterable[str] | None) -> list[Operation]:
    """The operations called `names`, all of them for None.

    Raises:
      UnsupportedError: there is no operation of a name.
    """
    known = operations()
    if names is None:
        return list(known.values())
    for name in names:
        if name not in known:
            raise UnsupportedError(f"there is no operation {name!r}; choose from {', '.join(known)}.")
    return [known[name] for name in names]


@contextlib.contextmanager
def precision_of(case: Case) -> Iterator[None]:
    """Lets JAX keep float64 for the block, if the case has any."""
    wide = any(init.dtype in ("float64", "int64") for init in case.arrays.values())
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        yield


def specs_of(operation: Operation, case: Case) -> list[Any]:
    """The specs that a case hands to its op; one, unless the public function calls the op several times."""
    with precision_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        plans = record_plans(lambda arrays: case.run(arrays), case.shapes())
    return [plan.spec for plan in plans if plan.op is operation.op]
