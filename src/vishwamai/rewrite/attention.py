"""Attention as people write it, found in a program: softmax(scale * q k^T + bias, masked) v.

The search starts at a division by a sum of exponentials. From there it reads backward to the product of queries and
keys, and forward to the product with the values. Only labels of axes count, so any order of axes is found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
from jax import lax

from vishwamai.rewrite.attention_call import FoundAttention, as_match
from vishwamai.rewrite.graph import LAYOUT, Graph, Labels, labels_after, labels_before, lossless, operand_labels
from vishwamai.rewrite.masks import HIDES, mask_of, mask_of_bias
from vishwamai.rewrite.match import Match, Near, NoMatch
from vishwamai.rewrite.names import Atom, JaxprEqn, Var
from vishwamai.rewrite.softmax import Softmax, softmax_at


def find(graph: Graph) -> list[Match | Near]:
    """Every softmax between two products, as a match, or with the reason why it is none."""
    matches = (_match_at(graph, eqn) for eqn in graph.eqns if eqn.primitive.name == "div")
    return [match for match in matches if match is not None]


def _match_at(graph: Graph, division: JaxprEqn) -> Match | Near | None:
    softmax = softmax_at(graph, division)
    if softmax is None:
        return None
    after = _after(graph, division)
    try:
        steps, product, labels, region = _before(graph, softmax)
    except NoMatch as no:
        return Near("flash_attention", division, str(no)) if after.product or after.near else None
    if after.product is None:
        return Near("flash_attention", division, after.why) if after.near else None
    try:
        attention = _attention(graph, softmax, product, labels, after)
        _numbers(graph, steps, attention)
        attention.region |= region
        return as_match(graph, attention)
    except NoMatch as no:
        return Near("flash_attention", division, str(no))


@dataclasses.dataclass
class _After:
    """What follows a softmax: the product with the values and what moves the weights there; or `why` there is none,
    and whether there is nearly one.
    """

    product: JaxprEqn | None
    moves: list[JaxprEqn]
    weights: Var
    why: str = ""
    near: bool = False


def _after(graph: Graph, division: JaxprEqn) -> _After:
    var, moves = division.outvars[0], []
    while True:
        reader = graph.only_reader(var)
        if reader is None:
            near = any(r.primitive.name == "dot_general" for r in graph.readers.get(var, []))
            return _After(None, moves, var, "the weights are used elsewhere, too, and the operation keeps none", near)
        name = reader.primitive.name
        if name == "dot_general":
            if reader.invars[0] is reader.invars[1]:
                return _After(None, moves, var, "the weights are multiplied by themselves", True)
            return _After(reader, moves, var)
        if name not in LAYOUT and name != "convert_element_type":
            why = f"`{name}` is between the softmax and the product with the values"
            return _After(None, moves, var, why, any(_reaches_product(graph, v) for v in reader.outvars))
        moves.append(reader)
        var = reader.outvars[0]


def _reaches_product(graph: Graph, var: Var) -> bool:
    """Whether a product follows within a few steps."""
    for _ in range(6):
        readers = graph.readers.get(var, [])
        if any(r.primitive.name == "dot_general" for r in readers):
            return True
        if not readers or not readers[0].outvars:
            return False
        var = readers[0].outvars[0]
    return False


def _before(graph: Graph, softmax: Softmax) -> tuple[list[tuple[Any, ...]], JaxprEqn, Labels, set[JaxprEqn]]:
    """The steps from the product of queries and keys to the softmax, in the order of the program; the product, the
    labels of its result, and the equations on the way.
    """
    atom, labels = softmax.argument, softmax.argument_labels
    steps: list[tuple[Any, ...]] = []
    region: set[JaxprEqn] = set()
    while True:
        if not isinstance(atom, Var) or atom not in graph.producer:
            raise NoMatch("its logits are an argument of this program, and no product of queries and keys")
        eqn, size = graph.producer[atom], atom.aval.size
        name = eqn.primitive.name
        region.add(eqn)
        if name == "dot_general":
            return steps[::-1], eqn, labels, region
        main = 0
        sides = [(a, operand_labels(a, atom.aval.shape, labels)) for a in eqn.invars]
        if name in LAYOUT:
            before = labels_before(eqn, labels)
            if before is None:
                raise NoMatch(f"`{name}` joins or splits axes of the logits")
            labels = before
        elif name == "convert_element_type":
            if not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
                raise NoMatch(f"its logits are {eqn.invars[0].aval.dtype}")
        elif name == "tanh":
            steps.append(("tanh",))
        elif name in ("mul", "div", "add", "sub"):
            main = _main(graph, eqn)
            if main == 1 and name in ("div", "sub"):
                raise NoMatch(f"the logits are the second operand of `{name}`")
            operand = sides[1 - main]
            number = graph.number(operand[0])
            if name in ("add", "sub"):
                steps.append(("bias", *operand, 1.0 if name == "add" else -1.0))
            elif not number or not math.isfinite(number):
                raise NoMatch("the logits are scaled by a value that is not a constant of the program, or by 0")
            else:
                steps.append(("scale", number if name == "mul" else 1 / number))
        elif name == "select_n" and len(eqn.invars) == 3:
            main = 1 if graph.number(eqn.invars[2]) is not None else 2
            fill = graph.number(eqn.invars[3 - main])
            if fill is None:
                raise NoMatch("a mask puts values that are not constant in place of the logits")
            steps.append(("mask", *sides[0], main == 2, fill))
        else:
            raise NoMatch(f"`{name}` is between the product of queries and keys and the softmax")
        atom = eqn.invars[main]
        if atom.aval.size != size:
            raise NoMatch(f"`{name}` repeats the logits along an axis")


def _main(graph: Graph, eqn: JaxprEqn) -> int:
    """Which operand of a binary equation has the product of queries and keys in it."""
    candidates = [i for i, a in enumerate(eqn.invars) if isinstance(a, Var) and a.aval.size == eqn.outvars[0].aval.size]
    return next((i for i in candidates if _is_product(graph, eqn.invars[i])), candidates[0] if candidates else 0)


def _is_product(graph: Graph, atom: Atom) -> bool:
    atoms = [atom]
    for _ in range(32):
        if not atoms:
            return False
        atom = atoms.pop()
        name = graph.name(atom)
        if name == "dot_general":
            return True
        if name in (*LAYOUT, "convert_element_type", "tanh", "mul", "div", "add", "sub", "select_n"):
            atoms += [a for a in graph.producer[atom].invars if isinstance(a, Var)]
    return False


def _attention(graph: Graph, softmax: Softmax, product: JaxprEqn, labels: Labels, after: _After) -> FoundAttention:
    """The operands of the two products, by their labels."""
    assert after.product is not None
    sizes = {label: n for label, n in zip(labels, product.outvars[0].aval.shape) if n != 1}
    over = [label for label in softmax.over if label in sizes]
    if len(over) != 1:
        raise NoMatch(f"the softmax runs over {len(over)} axes of more than one element")
    weights: Labels = softmax.labels
    for move in after.moves:
        if move.primitive.name in LAYOUT:
            after_move = labels_after(move, weights)
            if after_move is None:
                raise NoMatch(f"`{move.primitive.name}` joins, splits or repeats axes of the weights")
            weights = after_move
        elif not jnp.issubdtype(move.outvars[0].aval.dtype, jnp.floating):
            raise NoMatch(f"the weights are cast to {move.outvars[0].aval.dtype}")
    left, right, shared, contracted = _sides(product, labels)
    if over[0] in shared:
        raise NoMatch("the softmax runs over an axis that queries and keys share, and not over the keys")
    query, key = (left, right) if over[0] in right.values() else (right, left)
    swapped = over[0] not in right.values()
    if [label for label in key.values() if label in sizes and label is not over[0]]:
        raise NoMatch("the keys have more than one axis of their own")
    place = list(after.product.invars).index(after.weights)
    value, out, summed = _values(after.product, place, weights)
    if [label for label in summed if label in sizes] != over:
        raise NoMatch("the product with the values sums over another axis than the softmax")
    atoms = product.invars[::-1] if swapped else product.invars
    q_labels, k_labels = _operands(product, labels, contracted)
    if swapped:
        q_labels, k_labels = k_labels, q_labels
    region = {*softmax.region, *after.moves, after.product}
    last, out = _cast(graph, after.product, out)
    return FoundAttention(
        (atoms[0], q_labels),
        (atoms[1], k_labels),
        (after.product.invars[1 - place], value),
        keys=over[0],
        contracted=contracted,
        shared=tuple(label for label in labels if label in shared),
        rows=tuple(query.values()),
        out=out,
        last=last[-1] if last else after.product,
        region=region | set(last),
        precise=_asks_precision(product) or _asks_precision(after.product),
    )


def _sides(product: JaxprEqn, labels: Labels) -> tuple[dict[int, Hashable], dict[int, Hashable], set[Hashable], Labels]:
    """The labels of the free axes of both operands by place, those of the shared axes, and new ones of the summed."""
    (sum_l, sum_r), (batch_l, batch_r) = product.params["dimension_numbers"]
    ranks = [len(a.aval.shape) for a in product.invars]
    free_l = [i for i in range(ranks[0]) if i not in sum_l and i not in batch_l]
    free_r = [i for i in range(ranks[1]) if i not in sum_r and i not in batch_r]
    count = len(batch_l)
    left = dict(zip(free_l, labels[count : count + len(free_l)]))
    right = dict(zip(free_r, labels[count + len(free_l) :]))
    return left, right, set(labels[:count]), tuple(object() for _ in sum_l)


def _operands(product: JaxprEqn, labels: Labels, contracted: Labels) -> tuple[Labels, Labels]:
    """The labels of both operands of the product, in their own order."""
    sums, batches = product.params["dimension_numbers"]
    left, right, _, _ = _sides(product, labels)
    results = []
    for free, summed, batch in zip((left, right), sums, batches):
        places = {**free, **dict(zip(summed, contracted)), **dict(zip(batch, labels))}
        results.append(tuple(places[i] for i in range(len(places))))
    return results[0], results[1]


def _values(product: JaxprEqn, place: int, weights: Labels) -> tuple[Labels, Labels, list[Hashable]]:
    """The labels of the values and of the result, and the labels that the product with the values sums over."""
    sums, batches = product.params["dimension_numbers"]
    rank = len(product.invars[1 - place].aval.shape)
    labels: list[Hashable] = [object() for _ in range(rank)]
    for mine, theirs in ((sums[place], sums[1 - place]), (batches[place], batches[1 - place])):
        for a, b in zip(mine, theirs):
            labels[b] = weights[a]
    free = [
        [x for i, x in enumerate(side_labels) if i not in sums[side] and i not in batches[side]]
        for side, side_labels in ((place, weights), (1 - place, labels))
    ]
    first, second = free if place == 0 else free[::-1]
    out = (*(weights[i] for i in batches[place]), *first, *second)
    return tuple(labels), out, [weights[i] for i in sums[place]]


def _cast(graph: Graph, product: JaxprEqn, out: Labels) -> tuple[list[JaxprEqn], Labels]:
    """What casts the result to a narrower type, with the layouts before it; nothing if it is not cast."""
    moves, labels, var = [], out, product.outvars[0]
    while True:
        reader = graph.only_reader(var)
        if reader is None:
            return [], out
        name, result = reader.primitive.name, reader.outvars[0]
        moves.append(reader)
        if name == "convert_element_type":
            floats = jnp.issubdtype(result.aval.dtype, jnp.floating)
            narrow = floats and lossless(result.aval.dtype, var.aval.dtype)
            return (moves, labels) if narrow else ([], out)
        after = labels_after(reader, labels) if name in LAYOUT else None
        if after is None:
            return [], out
        labels, var = after, result


def _asks_precision(product: JaxprEqn) -> bool:
    precision = product.params.get("precision")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(p is not None and not isinstance(p, lax.Precision) for p in precisions):
        raise NoMatch(f"a product asks for the algorithm {precision}")
    return any(p in (lax.Precision.HIGH, lax.Precision.HIGHEST) for p in precisions)


def _numbers(graph: Graph, steps: list[tuple[Any, ...]], attention: FoundAttention) -> None:
    """What the steps between the product and the softmax compute: scale, bias, bound and masks, in this order."""
    for step in steps:
        if step[0] == "scale":
            _scaled(attention, step[1])
        elif step[0] == "tanh":
            if attention.softcap is not None:
                raise NoMatch("the logits go through two hyperbolic tangents")
            if attention.masks:
                raise NoMatch("the logits are masked before they are bounded")
            attention.softcap = 1.0
        elif step[0] == "mask":
            if not step[4] <= HIDES:
                raise NoMatch(f"masked logits become {step[4]:g}, which need not hide them; {HIDES:g} does")
            attention.masks.append(mask_of(graph, *step[1:]))
        else:
            mask = mask_of_bias(graph, *step[1:])
            if mask is not None:
                attention.masks.append(mask)
            elif any(m.value is None for m in attention.masks):
                raise NoMatch("a bias is added after the logits are masked")
            else:
                after = attention.softcap is not None
                if attention.biases and attention.bias_after_softcap != after:
                    raise NoMatch("one bias is added before the logits are bounded, and another one after")
                attention.bias_after_softcap = after
                attention.biases.append(step[1:])
    if attention.softcap is not None and attention.softcap <= 0:
        raise NoMatch("the bound of the logits is negative")


def _scaled(attention: FoundAttention, by: float) -> None:
    if attention.softcap is not None:
        attention.softcap *= by
    else:
        attention.scale *= by
    if attention.softcap is None or attention.bias_after_softcap:
        attention.biases = [(atom, labels, factor * by) for atom, labels, factor in attention.biases]
    attention.masks = [dataclasses.replace(mask, fill=mask.fill * by) for mask in attention.masks]
    if any(not mask.fill <= HIDES for mask in attention.masks):
        raise NoMatch("masked logits are scaled so that they need not hide their positions")
