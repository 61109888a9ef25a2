"""The dims of arrays, in words. An operation states them once, and its axes, checks, vmap and sharding rules are
derived from that.

The fields of an operation's `Operands` (`Outputs`, `Residuals`) are annotated with their dims, one word for each axis::

    class Operands(NamedTuple):
        x: Annotated[Any, "groups rows features"]
        scale: Annotated[Any, "groups? features", "optional"]

`name` is an axis, and axes of one name split over devices together; `name?` may be 1 where it is shared; `name/` has a
size that divides that of `name` (grouped heads), and `2*name` twice its size; `name+1` is one longer and an axis of its
own. `*name` stands for any number of axes; axes of `*#name` broadcast, and axes of a `*name?` next to one broadcast
to them. `_` is an axis that belongs to no other, and a number one that has this size. An "optional" array may be None.
An array with fewer axes than words has the last ones.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Factors = tuple[str | None, ...]
"""The factor of each axis of an array; None for an axis of its own."""


class Dim(NamedTuple):
    """One word."""

    name: str | None
    shareable: bool
    variadic: bool
    size: int | None = None
    divides: bool = False
    broadcasts: bool = False
    times: int = 1
    more: int = 0


_WORD = re.compile(r"(\*?)(#?)(?:(\d+)\*)?(\w+)([?/]?)(?:\+(\d+))?")


@functools.cache
def parse(text: str) -> tuple[Dim, ...]:
    """The dims that a text states.

    >>> [(dim.name, dim.variadic, dim.times, dim.size) for dim in parse("*rows 2*heads/ 4")]
    [('rows', True, 1, None), ('heads', False, 2, None), (None, False, 1, 4)]
    """
    parsed = tuple(map(_parsed, text.split()))
    assert sum(dim.variadic for dim in parsed) <= 1, f"{text!r} has two words for any number of axes"
    return parsed


def _parsed(word: str) -> Dim:
    match = _WORD.fullmatch(word)
    assert match is not None, f"{word!r} states no dim"
    star, sharp, times, name, mark, more = match.groups()
    if name.isdecimal():
        return Dim(None, False, False, int(name))
    return Dim(
        None if name == "_" else name,
        mark == "?" or bool(sharp),
        bool(star),
        divides=mark == "/",
        broadcasts=bool(sharp),
        times=int(times or 1),
        more=int(more or 0),
    )


@functools.cache
def factors(text: str, rank: int) -> Factors:
    """The factor of every axis of an array with `rank` axes; axes of `*name` are numbered from the last one.

    >>> factors("*rows features", 3), factors("heads? q_len kv_len", 2)
    (('rows__1', 'rows__0', 'features'), ('q_len', 'kv_len'))
    """
    names: list[str | None] = []
    dims = parse(text)
    for dim in dims:
        count = rank - len(dims) + 1
        if not dim.variadic:
            names.append(None if dim.more else dim.name)
        elif count > 0:
            names += [f"{dim.name}__{i}" for i in reversed(range(count))]
    return tuple(names[max(0, len(names) - rank) :])


def variadic_ranks(arrays: Iterable[tuple[str, int]]) -> dict[str | None, int]:
    """How many axes each `*name` stands for, from the texts and ranks of arrays: the most that any of them has.

    >>> variadic_ranks([("*batch? m k", 3), ("*batch? n", 1)])
    {'batch': 1}
    """
    ranks: dict[str | None, int] = {}
    for text, rank in arrays:
        dims = parse(text)
        for dim in dims:
            if dim.variadic:
                ranks[dim.name] = max(rank - len(dims) + 1, ranks.get(dim.name, 0))
    return ranks


def result_factors(text: str, ranks: Mapping[str | None, int]) -> Factors:
    """The factors of a result, where each `*name` stands for as many axes as `variadic_ranks` says."""
    return factors(text, sum(ranks[dim.name] if dim.variadic else 1 for dim in parse(text)))


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to which all broadcast; None where there is none.

    >>> broadcast((2, 1), (3,)), broadcast((2,), (3,))
    ((2, 3), None)
    """
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes)):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def word(factor: str) -> str:
    """The word that a factor comes from: "rows" of "rows__1"."""
    return factor.partition("__")[0]


def splittable(split: str, factors: Iterable[Factors]) -> frozenset[str]:
    """The factors whose words are in `split`."""
    words = split.split()
    return frozenset(factor for group in factors for factor in group if factor is not None and word(factor) in words)


@functools.cache
def declared(kind: type) -> Any:
    """The dims of every field of a named-tuple type, from its annotations: a `kind` of texts."""
    return kind(*(text for text, _ in _annotations(kind)))


@functools.cache
def optional(kind: type) -> tuple[bool, ...]:
    """Which fields of a named-tuple type may be absent (None)."""
    return tuple(absent for _, absent in _annotations(kind))


def _annotations(kind: type) -> list[tuple[str, bool]]:
    texts = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is not typing.Annotated:
            raise TypeError(
                f"{kind.__module__}.{kind.__name__}.{name} states no dims; annotate it as Annotated[Any, '...']."
            )
        _, text, *more = typing.get_args(hint)
        texts.append((text, "optional" in more))
    return texts
