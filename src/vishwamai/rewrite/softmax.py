"""A softmax in a program: exp(x - max(x)) / sum(exp(x - max(x))), or without the maximum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

from vishwamai.rewrite.graph import Graph, Labels, operand_labels
from vishwamai.rewrite.names import Atom, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax.

    Attributes:
      region: its equations. labels: of the axes of its result. over: the labels that it sums over.
      argument: its operand, with the labels of its axes.
    """

    region: frozenset[JaxprEqn]
    labels: Labels
    over: frozenset[Hashable]
    argument: Atom
    argument_labels: Labels


@dataclasses.dataclass(frozen=True)
class _Reduced:
    """The label of an axis that is reduced, by its place."""

    place: int


def softmax_at(graph: Graph, division: JaxprEqn) -> Softmax | None:
    """The softmax whose last equation is this division, if it is one."""
    shape = division.outvars[0].aval.shape
    labels: Labels = tuple(object() for _ in shape)
    top, top_labels = graph.peel(division.invars[0], labels, casts=True)
    if not isinstance(top, Var) or graph.name(top) != "exp" or top.aval.size != math.prod(shape):
        return None
    below = operand_labels(division.invars[1], shape, labels)
    total, total_labels = graph.peel(division.invars[1], below, casts=True)
    if graph.name(total) != "reduce_sum":
        return None
    over = _reduced(graph, total, total_labels, top, top_labels)
    if over is None:
        return None
    exp = graph.producer[top]
    region = {division, exp, graph.producer[total], *_between(graph, division.invars[0], top)}
    argument, argument_labels = exp.invars[0], top_labels
    inner, inner_labels = graph.peel(argument, top_labels, casts=True)
    if graph.name(inner) == "sub":
        sub = graph.producer[inner]
        base, base_labels = graph.peel(sub.invars[0], inner_labels, casts=True)
        shift, shift_labels = _maximum(graph, sub, operand_labels(sub.invars[1], inner.aval.shape, inner_labels))
        same_size = sub.invars[0].aval.size == inner.aval.size
        if shift is not None and same_size and _reduced(graph, shift, shift_labels, base, base_labels) == over:
            region |= {sub, graph.producer[shift], *_between(graph, argument, inner)}
            argument, argument_labels = sub.invars[0], inner_labels
    return Softmax(frozenset(region), labels, over, argument, argument_labels)


def _between(graph: Graph, atom: Atom, stop: object) -> set[JaxprEqn]:
    """The equations that were peeled off `atom` to get to `stop`."""
    equations = set()
    while atom is not stop:
        equations.add(graph.producer[atom])
        atom = graph.producer[atom].invars[0]
    return equations


def _maximum(graph: Graph, sub: JaxprEqn, labels: Labels) -> tuple[Var | None, Labels]:
    """The maximum that is subtracted, as the result of its reduction."""
    shift, shift_labels = graph.peel(sub.invars[1], labels, casts=True, also=("stop_gradient",))
    if graph.name(shift) == "max":
        eqn = graph.producer[shift]
        sides = [a for a in eqn.invars if graph.number(a) != -math.inf]
        if len(sides) == 1:
            shift, shift_labels = graph.peel(sides[0], shift_labels, casts=True)
    return (shift, shift_labels) if graph.name(shift) == "reduce_max" else (None, ())


def _reduced(
    graph: Graph, result: object, result_labels: Labels, base: Atom, base_labels: Labels
) -> frozenset[Hashable] | None:
    """The labels of `base` that a reduction runs over, if it reduces `base` and every other axis keeps its place."""
    eqn = graph.producer[result]
    axes = {int(a) for a in eqn.params["axes"]}
    left = iter(result_labels)
    marks: Labels = tuple(_Reduced(i) if i in axes else next(left) for i in range(len(eqn.invars[0].aval.shape)))
    source, labels = graph.peel(eqn.invars[0], marks, casts=True)
    base_source, other_labels = graph.peel(base, base_labels, casts=True)
    if source is not base_source or len(labels) != len(other_labels):
        return None
    over = set()
    for n, mark, label in zip(source.aval.shape, labels, other_labels):
        if isinstance(mark, _Reduced):
            over.add(label)
        elif n != 1 and mark is not label:
            return None
    return frozenset(over)
