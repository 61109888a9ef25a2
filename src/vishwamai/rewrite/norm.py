"""Normalizations as people write them, found in a program: `rms_norm` and `layer_norm`.

The search starts at a reciprocal square root, or at a square root that is divided by. Backward, it must be of a mean of
squares or of a variance over the last axis; forward, it multiplies what that is of, then a scale and an offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.precision import FLOATS
from vishwamai.core.types import AnyArray
from vishwamai.ops.norm.api import layer_norm, rms_norm
from vishwamai.rewrite.graph import LAYOUT, Fresh, Graph, Labels, labels_after, lossless, operand_labels, same
from vishwamai.rewrite.match import Match, Near, NoMatch
from vishwamai.rewrite.names import Atom, JaxprEqn, Var

_FEATURES = "features"
Operand = tuple[Atom, Labels]


def find(graph: Graph) -> list[Match | Near]:
    """Every reciprocal root of a mean of squares, as a match, or with the reason why it is none."""
    matches = []
    for eqn in graph.eqns:
        if eqn.primitive.name in ("rsqrt", "sqrt"):
            match = _match_at(graph, eqn)
            if match is not None:
                matches.append(match)
    return matches


@dataclasses.dataclass(frozen=True)
class _Statistic:
    """A mean of squares ("rms_norm") or a variance ("layer_norm") of `x`; `centred` is x less its mean, if a variance
    was computed from it.
    """

    operation: str
    x: AnyArray
    labels: Labels
    centred: Any = None


def _match_at(graph: Graph, root: JaxprEqn) -> Match | Near | None:
    argument, labels = root.invars[0], tuple(object() for _ in root.outvars[0].aval.shape)
    eps = 0.0
    inner, inner_labels = graph.peel(argument, labels, casts=True)
    if graph.name(inner) == "add":
        add = graph.producer[inner]
        numbers = [graph.number(a) for a in add.invars]
        place = next((i for i, n in enumerate(numbers) if n is not None), None)
        if place is not None:
            eps = numbers[place] or 0.0
            main = add.invars[1 - place]
            inner, inner_labels = main, operand_labels(main, inner.aval.shape, inner_labels)
    try:
        statistic = _statistic(graph, inner, inner_labels)
        if statistic is None:
            return None
    except NoMatch as no:
        return Near("rms_norm or layer_norm", root, str(no))
    try:
        if eps < 0:
            raise NoMatch(f"eps is {eps:g}")
        return _match(graph, root, statistic, eps, labels)
    except NoMatch as no:
        return Near(statistic.operation, root, str(no))


def _clean(graph: Graph, atom: Atom, labels: Labels) -> Operand:
    """The value without casts, without a choice that a constant decides, and without a maximum with 0."""
    while True:
        atom, labels = graph.peel(atom, labels, casts=True)
        name = graph.name(atom)
        if name not in ("select_n", "max"):
            return atom, labels
        eqn = graph.producer[atom]
        if name == "max":
            left = [a for a in eqn.invars if graph.number(a) != 0.0]
        else:
            choice = graph.constant(eqn.invars[0])
            left = [] if choice is None or choice.size != 1 else [eqn.invars[1 + int(choice.reshape(()))]]
        if len(left) != 1 or left[0].aval.size != atom.aval.size:
            return atom, labels
        labels = operand_labels(left[0], atom.aval.shape, labels)
        atom = left[0]


def _statistic(graph: Graph, atom: Atom, labels: Labels) -> _Statistic | None:
    atom, labels = _clean(graph, atom, labels)
    mean = _mean(graph, atom, labels, squares=True)
    if mean is not None:
        return _of_squares(graph, *mean)
    if graph.name(atom) == "sub":  # E[x^2] - E[x]^2
        a, b = graph.producer[atom].invars
        shape = atom.aval.shape
        first = _mean(graph, *_clean(graph, a, operand_labels(a, shape, labels)), squares=True)
        root, root_labels = _square(graph, b, operand_labels(b, shape, labels)) or (None, ())
        second = None if root is None else _mean(graph, *graph.peel(root, root_labels, casts=True))
        if first is not None and second is not None:
            x, x_labels = first
            second_source, other_labels = _source(graph, *second)
            x, x_labels = _source(graph, x, x_labels)
            if second_source is x and same(x.aval.shape, x_labels, other_labels):
                return _Statistic("layer_norm", x, x_labels)
    return None


def _of_squares(graph: Graph, x: AnyArray, labels: Labels) -> _Statistic:
    """The statistic that the mean of the squares of `x` is."""
    x, labels = _source(graph, x, labels)
    if graph.name(x) == "sub":
        base_atom, part = graph.producer[x].invars
        part_labels = operand_labels(part, x.aval.shape, labels)
        mean = _mean(graph, *graph.peel(part, part_labels, casts=True))
        if mean is not None:
            of, of_labels = _source(graph, *mean)
            base, base_labels = _source(graph, base_atom, labels)
            if of is base and same(base.aval.shape, of_labels, base_labels):
                return _Statistic("layer_norm", base, base_labels, x)
    return _Statistic("rms_norm", x, labels)


def _source(graph: Graph, atom: Atom, labels: Labels) -> Operand:
    """The array before casts that lose nothing and before 0 was subtracted."""
    while True:
        atom = graph.widened(atom)
        if graph.name(atom) != "sub":
            return atom, labels
        main, part = graph.producer[atom].invars
        if graph.number(part) != 0.0 or main.aval.shape != atom.aval.shape:
            return atom, labels
        atom = main


def _mean(graph: Graph, atom: Atom, labels: Labels, squares: bool = False) -> Operand | None:
    """What a mean over the last axis is of; with `squares`, what a mean of squares is of."""
    eqn = graph.producer.get(atom) if isinstance(atom, Var) else None
    if eqn is None or eqn.primitive.name not in ("div", "mul"):
        return None
    numbers = [graph.number(a) for a in eqn.invars]
    place = 1 if numbers[1] is not None else 0
    number = numbers[place]
    if number is None or not number or (eqn.primitive.name == "div" and place == 0):
        return None
    main = eqn.invars[1 - place]
    total, total_labels = graph.peel(main, operand_labels(main, atom.aval.shape, labels), casts=True)
    if graph.name(total) != "reduce_sum":
        return None
    reduction = graph.producer[total]
    axes = {int(a) for a in reduction.params["axes"]}
    shape = reduction.invars[0].aval.shape
    left = iter(total_labels)
    marks = tuple(_FEATURES if i in axes else next(left) for i in range(len(shape)))
    inner, marks = graph.peel(reduction.invars[0], marks, casts=True)
    if squares:
        root = _square(graph, inner, marks)
        if root is None:
            return None
        inner, marks = root
    if [i for i, mark in enumerate(marks) if mark == _FEATURES] != [len(marks) - 1]:
        if squares:
            raise NoMatch("it normalises over other axes than the last one")
        return None
    count = number if eqn.primitive.name == "div" else 1 / number
    if abs(count / inner.aval.shape[-1] - 1) > 1e-5:
        if squares:
            raise NoMatch(f"the sum of {inner.aval.shape[-1]} squares is divided by {count:g}")
        return None
    return inner, marks


def _square(graph: Graph, atom: Atom, labels: Labels) -> Operand | None:
    atom, labels = graph.peel(atom, labels, casts=True)
    eqn = graph.producer.get(atom) if isinstance(atom, Var) else None
    if eqn is None:
        return None
    name = eqn.primitive.name
    twice = name == "mul" and graph.widened(eqn.invars[0]) is graph.widened(eqn.invars[1])
    if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2) or twice:
        return eqn.invars[0], labels
    return None


class _Product:
    """What the root goes through, read forward."""

    def __init__(self, graph: Graph, statistic: _Statistic):
        self.graph, self.statistic = graph, statistic
        self.region: set[JaxprEqn] = set()
        self.numerator = False
        self.scales: list[Operand] = []
        self.offset: Operand | None = None
        self.last: JaxprEqn | None = None  # of a result that is the normalised array

    def is_numerator(self, atom: Atom) -> bool:
        """Whether this is x ("rms_norm") or x less its mean."""
        graph, s = self.graph, self.statistic
        source, _ = _source(graph, atom, s.labels)
        if s.operation == "rms_norm":
            return source is s.x
        if s.centred is not None and source is s.centred:
            return True
        if graph.name(source) != "sub":
            return False
        main, part = graph.producer[source].invars
        part_labels = operand_labels(part, source.aval.shape, s.labels)
        mean = _mean(graph, *graph.peel(part, part_labels, casts=True))
        if mean is None:
            return False
        of, of_labels = _source(graph, *mean)
        return of is s.x and _source(graph, main, s.labels)[0] is s.x and same(of.aval.shape, of_labels, s.labels)

    def parameter(self, atom: Atom) -> Operand | None:
        """A scale or offset: an array with a value for each feature."""
        labels = operand_labels(atom, self.statistic.x.aval.shape, self.statistic.labels)
        atom, labels = self.graph.peel(atom, labels)
        if not isinstance(atom, Var) or atom.aval.dtype not in FLOATS:
            return None
        proper_labels = [label for n, label in zip(atom.aval.shape, labels) if n != 1]
        return (atom, labels) if proper_labels == [_FEATURES] else None

    def take(self, eqn: JaxprEqn, cur: Var) -> bool:
        """Goes through an equation that reads the value so far; False where the normalization ends before it."""
        name = eqn.primitive.name
        if name == "convert_element_type":
            return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating))
        if name not in ("mul", "div", "add") or len(eqn.invars) != 2 or eqn.invars[0] is eqn.invars[1]:
            return False
        place = 0 if eqn.invars[0] is cur else 1
        factor = eqn.invars[1 - place]
        if name == "div":
            return False
        same_shape = eqn.outvars[0].aval.shape == self.statistic.x.aval.shape
        if name == "mul" and not self.numerator and same_shape and self.is_numerator(factor):
            self.numerator = True
            return True
        if self.offset is not None or (name == "add" and not self.numerator):
            return False
        operand = self.parameter(factor) if same_shape else None
        if operand is None or (name == "mul" and self.scales):
            return False
        if name == "mul":
            self.scales.append(operand)
        else:
            self.offset = operand
        return True


def _match(graph: Graph, root: JaxprEqn, statistic: _Statistic, eps: float, labels: Labels) -> Match:
    x, shape = statistic.x, statistic.x.aval.shape
    if x.aval.dtype not in FLOATS or not isinstance(x, Var) or 0 in shape:
        raise NoMatch(f"it is of {x.aval.dtype}{list(shape)}")
    walk = _Product(graph, statistic)
    cur, current_labels = root.outvars[0], labels
    walk.region.add(root)
    if root.primitive.name == "sqrt":
        cur, current_labels, division = _divided(graph, cur, current_labels, walk)
        walk.region.add(division)
        walk.last = division if walk.numerator else None
    while True:
        reader = graph.only_reader(cur)
        if reader is None:
            break
        if reader.primitive.name in LAYOUT and not walk.numerator:
            after = labels_after(reader, current_labels)
            if after is None:
                after = _repeated(reader, current_labels)
            if after is None:
                break
            current_labels = after
        else:
            aligned = len(current_labels) == len(shape) and all(
                n == 1 or a is b or a == b for n, a, b in zip(cur.aval.shape, current_labels, statistic.labels)
            )
            if not aligned or not walk.take(reader, cur):
                break
            result = reader.outvars[0].aval.shape
            if result == shape:
                current_labels = statistic.labels
            if walk.numerator:
                walk.last = reader
        walk.region.add(reader)
        cur = reader.outvars[0]
    if walk.last is None:
        raise NoMatch("what it multiplies is not the array whose squares were averaged")
    last = walk.last
    while last.primitive.name == "convert_element_type" and not _narrows(last):
        walk.region.discard(last)  # the next reader widens again what was rounded
        last = graph.producer[last.invars[0]]
    walk.last = last
    return _call(walk, eps)


def _narrows(eqn: JaxprEqn) -> bool:
    return lossless(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)


def _repeated(eqn: JaxprEqn, labels: Labels) -> Labels | None:
    """The labels after a broadcast that repeats axes of size 1."""
    if eqn.primitive.name != "broadcast_in_dim":
        return None
    after: list[Hashable] = [Fresh() for _ in eqn.outvars[0].aval.shape]
    for i, place in enumerate(eqn.params["broadcast_dimensions"]):
        if eqn.invars[0].aval.shape[i] != 1:
            after[place] = labels[i]
    after[-1] = _FEATURES if isinstance(after[-1], Fresh) else after[-1]
    return tuple(after)


def _divided(graph: Graph, cur: Var, current_labels: Labels, walk: _Product) -> tuple[Var, Labels, JaxprEqn]:
    """The division by a root."""
    statistic = walk.statistic
    while True:
        reader = graph.only_reader(cur)
        if reader is None:
            raise NoMatch("the root is used elsewhere, too")
        name = reader.primitive.name
        if name in LAYOUT:
            after = labels_after(reader, current_labels) or _repeated(reader, current_labels)
            if after is None:
                raise NoMatch(f"`{name}` splits or joins axes of the root")
            current_labels = after
        elif name == "convert_element_type":
            pass
        elif name == "div" and reader.invars[1] is cur and reader.invars[0] is not cur:
            aligned = len(current_labels) == len(statistic.labels) and all(
                n == 1 or a == b for n, a, b in zip(cur.aval.shape, current_labels, statistic.labels)
            )
            if graph.number(reader.invars[0]) == 1.0:
                return reader.outvars[0], current_labels, reader
            same_shape = reader.outvars[0].aval.shape == statistic.x.aval.shape
            if not aligned or not same_shape or not walk.is_numerator(reader.invars[0]):
                raise NoMatch("what it divides is not the array whose squares were averaged")
            walk.numerator = True
            return reader.outvars[0], statistic.labels, reader
        elif name == "add":
            raise NoMatch("eps is added after the square root")
        else:
            raise NoMatch(f"the square root goes through `{name}`")
        walk.region.add(reader)
        cur = reader.outvars[0]


def _call(walk: _Product, eps: float) -> Match:
    statistic, last = walk.statistic, walk.last
    assert last is not None
    out = last.outvars[0].aval
    x = statistic.x
    wide = x.aval.dtype if lossless(out.dtype, x.aval.dtype) else jnp.promote_types(out.dtype, x.aval.dtype)
    used = [p for p in (*walk.scales, walk.offset) if p is not None]
    has_scale, has_offset = bool(walk.scales), walk.offset is not None
    function = layer_norm if statistic.operation == "layer_norm" else rms_norm

    def call(array: jax.Array, *parameters: jax.Array) -> jax.Array:
        flat = [p.reshape(-1) for p in parameters]
        scale = flat.pop(0) if has_scale else None
        offset = flat.pop(0) if has_offset else None
        return function(array.astype(wide), scale, offset, eps=eps).astype(out.dtype)

    call.__name__ = statistic.operation
    names = [n for n, present in (("scale", has_scale), ("offset", has_offset)) if present]
    words = f"{wide}{list(x.aval.shape)}, eps {eps:.3g}" + "".join(f", {n}" for n in names)
    region = frozenset(walk.region)
    return Match(statistic.operation, last, region, call, (x, *(a for a, _ in used)), words)
