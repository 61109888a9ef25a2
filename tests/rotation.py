"""Which of many like tests run by default: they rotate by a seed, which pytest's header names; the others are
`long`.
"""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

from vishwamai.core.cases import Case

VARIABLE = "VISHWAMAI_TEST_SEED"
# The date, unless it is set: all runs of a day choose alike, and so do the processes of one run, which inherit the
# variable.
SEED = int(os.environ.setdefault(VARIABLE, f"{datetime.date.today():%Y%m%d}"))


def header() -> str:
    """What pytest prints before a run."""
    return f"rotating tests: seed {SEED}; {VARIABLE}={SEED} chooses the same again, `make test-long` runs all of them"


def marks(chosen: bool) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that rotates."""
    return (pytest.mark.rotating,) if chosen else (pytest.mark.rotating, pytest.mark.long)


def is_due(n: int, index: int) -> bool:
    """Whether the index-th of many runs under this seed: one in n, and every one under some of n seeds in a row."""
    return (index - SEED) % n == 0


RARITY = 2
"""Factor of every n of `one_in`, `turns`, `in_turn` and `drawn`: with it the default suite takes ten minutes on two
cores, and the long run has the time that is left.
"""


def one_in(n: int, index: int) -> Any:
    """The marks of the index-th of many like tests, of which one in n * `RARITY` runs by default."""
    return marks(is_due(RARITY * n, index)) if n > 1 else ()


def turns(item: pytest.Item) -> None:
    """Marks a test that has `pytest.mark.turns(n)`: each of its cases runs by default under one of n * `RARITY` seeds
    in a row.
    """
    mark = item.get_closest_marker("turns")
    if mark is not None and item.get_closest_marker("rotating") is None:
        for rotating in one_in(mark.args[0], zlib.crc32(item.nodeid.encode())):
            item.add_marker(rotating)


def in_turn(n: int, given: Iterable[Any]) -> list[Any]:
    """The parameters of like tests (tuples where a test has several), of which one in n * `RARITY` runs by default."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=one_in(n, i)) for i, one in enumerate(given)
    ]


def spans(few: int, many: int, size: int = 25) -> list[Any]:
    """Ranges of seeds: that of the first few, which runs by default, and those of all many, `size` at a time, which are
    long: one test of a thousand programs would outlast the limit of a test.
    """
    longs = (range(start, min(start + size, many)) for start in range(0, many, size))
    return [
        pytest.param(range(few), id="few"),
        *(pytest.param(one, id=f"from {one.start}", marks=pytest.mark.long) for one in longs),
    ]


def drawn(grid: Sequence[tuple[Any, ...]], n: int, count: int | None = None) -> list[Any]:
    """Combinations of another project's grid, all or `count` (the same in every run), of which one in
    n * `RARITY` runs by default.
    """
    chosen = grid if count is None else random.Random(0).sample(grid, count)
    return [pytest.param(*one, marks=one_in(n, i), id=str(i)) for i, one in enumerate(chosen)]


def share(cases: Sequence[Case], declined: Container[str], n: int) -> frozenset[str]:
    """The names of one in n of the cases that are not declined; at least of one with gradients, if there is any.

    What is chosen for implementations with a small share is chosen for those with a multiple of it, too, so that they
    share the oracle.
    """
    served = [(i, case) for i, case in enumerate(cases) if case.name not in declined]
    chosen = [case for i, case in served if is_due(n, i)]
    if not any(case.differentiable for case in chosen):
        first = SEED % len(served)
        chosen += [case for _, case in served[first:] + served[:first] if case.differentiable][:1]
    if not chosen:
        chosen = [served[SEED % len(served)][1]]
    return frozenset(case.name for case in chosen)
