"""Every operation with its cases, found by looking into the packages of operations; a new operation needs no entry
anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from vishwamai.core.cases import Case, Facts
from vishwamai.core.draws import Sizes
from vishwamai.core.errors import FallbackWarning, UnsupportedError
from vishwamai.core.observe import record_plans
from vishwamai.core.op import Implementation, Op


@dataclasses.dataclass(frozen=True)
class Operation:
    """An op with the cases that call it and what the shared suites must know of it.

    Attributes:
      draw: draws a random legal case; None where it has no `draws.py`.
    """

    op: Op
    cases: tuple[Case, ...]
    facts: Facts
    draw: Callable[[Sizes], Case] | None = None

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def reference(self) -> Implementation:
        """The implementation that serves every legal spec on every platform."""
        return self.op.implementations[-1]

    def has_kernel(self, platform: str) -> bool:
        """Whether an implementation is for one platform: "tpu", "cuda" or "cpu"."""
        return any(implementation.platform == platform for implementation in self.op.implementations)

    def tagged(self, tag: str) -> tuple[Case, ...]:
        """The cases that have a tag: "contract", "model"."""
        return tuple(case for case in self.cases if tag in case.tags)


PACKAGES = ["vishwamai.ops"]
"""The packages whose folders are operations. Who has operations of his own adds theirs before the first look."""


@functools.cache
def operations() -> dict[str, Operation]:
    """Every op by name, in the order of their folders: a folder exports its `Op`, and its `cases.py` has `CASES` and
    `FACTS`.

    Raises:
      UnsupportedError: a folder exports an `Op` and has no cases, so no suite would run it.
    """
    by_name: dict[str, Operation] = {}
    for package in PACKAGES:
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if info.ispkg:
                by_name |= _operations_of(f"{package}.{info.name}")
    return by_name


def _operations_of(name: str) -> dict[str, Operation]:
    """The operations of one folder, which may have none."""
    ops = {value.name: value for value in vars(importlib.import_module(name)).values() if isinstance(value, Op)}
    if not ops:
        return {}
    if importlib.util.find_spec(f"{name}.cases") is None:
        raise UnsupportedError(
            f"{name} exports {', '.join(ops)} and has no cases.py; write one with CASES and FACTS, by which the tests, "
            "bench and tune know the operation."
        )
    cases = importlib.import_module(f"{name}.cases")
    draws = importlib.util.find_spec(f"{name}.draws") and importlib.import_module(f"{name}.draws")
    return {
        op.name: Operation(
            op, tuple(case for case in cases.CASES if case.op == op.name), cases.FACTS, draws.draw if draws else None
        )
        for op in ops.values()
    }


def chosen(names: Iterable[str] | None) -> list[Operation]:
    """The operations called `names`, all of them for None.

    Raises:
      UnsupportedError: there is no operation of a name.
    """
    available = operations()
    if names is None:
        return list(available.values())
    for name in names:
        if name not in available:
            raise UnsupportedError(f"there is no operation {name!r}; choose from {', '.join(available)}.")
    return [available[name] for name in names]


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
