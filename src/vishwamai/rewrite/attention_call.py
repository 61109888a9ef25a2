"""The call of `flash_attention` that takes the place of an attention that was found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from vishwamai.core.config import kernel_config
from vishwamai.core.precision import FLOATS
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.api import flash_attention
from vishwamai.rewrite.graph import Graph, Labels, lossless
from vishwamai.rewrite.masks import Mask, band, every_row_sees, narrower, options, ordered
from vishwamai.rewrite.match import Match, NoMatch
from vishwamai.rewrite.names import Atom, JaxprEqn, Var

if TYPE_CHECKING:
    import jax


Operand = tuple[Atom, Labels]


@dataclasses.dataclass
class FoundAttention:
    """An attention in a program, by the labels of its axes.

    Attributes:
      query, key, value: the operands of the products.
      keys: the label of the axis of keys. contracted: those that queries and keys are summed over.
      shared: labels that queries and keys share, batch and heads. rows: labels of the queries only.
      out: labels of the result's axes. last: the equation that computes it. region: all equations.
      precise: a product asks for more than the default precision.
      scale, softcap, biases, masks: operations between the products; a bias has its factor.
      bias_after_softcap: the biases are added to the bounded logits.
    """

    query: Operand
    key: Operand
    value: Operand
    keys: Any
    contracted: Labels
    shared: Labels
    rows: Labels
    out: Labels
    last: JaxprEqn
    region: set[JaxprEqn]
    precise: bool
    scale: float = 1.0
    softcap: float | None = None
    biases: list[tuple[Any, Labels, float]] = dataclasses.field(default_factory=list)
    masks: list[Mask] = dataclasses.field(default_factory=list)
    bias_after_softcap: bool = False


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The labels in the operation's order, those of axes of size 1 left out."""

    batch: Labels
    heads: Labels
    groups: Labels
    row: Labels
    keys: Labels
    contracted: Labels
    features: Labels

    @property
    def scores(self) -> Labels:
        return (*self.batch, *self.heads, *self.groups, *self.row, *self.keys)


def as_match(graph: Graph, attention: FoundAttention) -> Match:
    """The call for what was found.

    Raises:
      NoMatch: the operation does not serve it, or would lose accuracy; the text says why.
    """
    sizes = {label: n for atom, labels in _operands(attention) for label, n in zip(labels, atom.aval.shape) if n != 1}
    axes = _axes(attention, sizes)
    dtype = _dtype(attention)
    rows = math.prod(sizes[x] for x in axes.row)
    columns = sizes[attention.keys]
    (low, high), masks = _static(attention.masks, axes, rows, columns)
    alive = every_row_sees([m for m in attention.masks if m.value is not None], axes.scores) and not any(
        m.value is None for m in attention.masks
    )
    fills = {-math.inf if m.fill == -math.inf else 0.0 for m in attention.masks}
    if not alive and (len(fills) > 1 or any(m.value is not None and m.fill > -math.inf for m in attention.masks[:-1])):
        raise NoMatch("it has masks of different kinds, and rows may see no key, whose value would change")
    dead = None if alive or not attention.masks else math.nan if fills == {-math.inf} else 0.0
    cap = attention.softcap
    unit = 1.0 if cap is None else cap
    static = dict(options(low, high, rows, columns), scale=attention.scale * unit, softcap=cap)
    layouts = [labels for _, labels in _operands(attention)]
    if attention.bias_after_softcap:
        static["bias_after_softcap"], unit = True, 1.0
    biases = [(labels, factor * unit) for _, labels, factor in attention.biases]
    mask_forms = [(m.labels, m.visible) for m in masks]
    out_aval = attention.last.outvars[0].aval
    out_sizes = [sizes.get(label, 1) for label in attention.out]

    def call(query: jax.Array, key: jax.Array, value: jax.Array, *others: jax.Array) -> jax.Array:
        q = _laid(query, layouts[0], (axes.batch, (*axes.heads, *axes.groups), axes.row, axes.contracted), sizes, dtype)
        k = _laid(key, layouts[1], (axes.batch, axes.heads, axes.keys, axes.contracted), sizes, dtype)
        v = _laid(value, layouts[2], (axes.batch, axes.heads, axes.keys, axes.features), sizes, dtype)
        bias = None
        for array, (labels, factor) in zip(others, biases):
            term = _broadcast(array.astype(jnp.promote_types(array.dtype, jnp.float32)), labels, axes, sizes)
            term = term if factor == 1 else term * factor
            bias = term if bias is None else bias + term
        mask = None
        for array, (labels, visible) in zip(others[len(biases) :], mask_forms):
            array = array if array.dtype == jnp.bool_ else array != 0
            term = _broadcast(array if visible else ~array, labels, axes, sizes)
            mask = term if mask is None else mask & term
        with kernel_config(precision="highest") if attention.precise else kernel_config():
            out = flash_attention(q, k, v, bias, mask, layout="bhsd", **static)
        if dead is not None:
            out = _with_dead_rows(out, v, mask, low, high, columns, dead)
        named = (*axes.batch, *axes.heads, *axes.groups, *axes.row, *axes.features)
        out = out.reshape([sizes[label] for label in named])
        present = [label for label in attention.out if label in sizes]
        out = out.transpose([named.index(label) for label in present])
        return out.reshape(out_sizes).astype(out_aval.dtype)

    call.__name__ = "flash_attention"
    operands = (attention.query, attention.key, attention.value, *((a, s) for a, s, _ in attention.biases))
    atoms = (*(a for a, _ in operands), *(m.atom for m in masks))
    if not all(isinstance(a, Var) for a in atoms):
        raise NoMatch("an operand is a number in the program")
    words = _words(attention, axes, sizes, dtype, static, len(biases), masks, dead)
    return Match("flash_attention", attention.last, frozenset(attention.region), call, atoms, words)


def _operands(attention: FoundAttention) -> tuple[Operand, Operand, Operand]:
    return attention.query, attention.key, attention.value


def _axes(attention: FoundAttention, sizes: dict[Hashable, int]) -> _Axes:
    """Which labels are the operation's batch, heads, groups of heads and rows."""
    value = [label for label in attention.value[1] if label in sizes]
    shared = [label for label in attention.shared if label in sizes]
    rows = [label for label in attention.rows if label in sizes]
    shared += [label for label in rows if label in value]  # values of their own for these: heads, too
    rows = [label for label in rows if label not in shared]
    masked = [m.labels for m in attention.masks if m.value is not None]
    row = next((r for r in rows if any(r in labels for labels in masked)), None)
    if row is None and rows:
        row = max(rows, key=lambda label: sizes[label])
    features = tuple(label for label in value if label is not attention.keys and label not in shared)
    if not features and attention.value[0].aval.size == 0:
        raise NoMatch("its values are empty")
    return _Axes(
        tuple(shared[:-1]),
        tuple(shared[-1:]),
        tuple(label for label in rows if label is not row),
        (row,) if row is not None else (),
        (attention.keys,),
        tuple(label for label in attention.contracted if label in sizes),
        features,
    )


def _dtype(attention: FoundAttention) -> np.dtype:
    """The dtype that the operation takes: what all operands widen to without loss."""
    dtypes = [jnp.dtype(atom.aval.dtype) for atom, _ in _operands(attention)]
    wrong = [d.name for d in dtypes if d not in FLOATS]
    if wrong:
        raise NoMatch(f"an operand is {wrong[0]}")
    dtype = next((d for d in (*dtypes, jnp.dtype(jnp.float32)) if all(lossless(o, d) for o in dtypes)), None)
    result = attention.last.outvars[0].aval
    if dtype is None or not lossless(result.dtype, dtype):
        raise NoMatch(
            f"its result is kept in {result.dtype.name}, and the operation rounds it to its operands' "
            f"{dtypes[0].name}; cast the result, or the operands"
        )
    if any(n == 0 for atom, _ in _operands(attention) for n in atom.aval.shape):
        raise NoMatch("an operand is empty")
    return dtype


def _static(
    masks: list[Mask], axes: _Axes, rows: int, columns: int
) -> tuple[tuple[int | None, int | None], list[Mask]]:
    """The causal mask and the window that constants are, as a band; and the masks that are left as operands."""
    limits: tuple[int | None, int | None] = (None, None)
    left = []
    for mask in masks:
        value, mask_labels, plane = mask.value, set(), set()
        if value is not None:
            plane = {*axes.row, *axes.keys}
            for axis, label in enumerate(mask.labels):
                first = value.take([0], axis)
                value = first if label not in plane and bool((value == first).all()) else value
            mask_labels = {label for n, label in zip(value.shape, mask.labels) if n != 1}
        if value is not None and mask_labels <= plane:
            seen = ordered(value, mask.labels, (*axes.row, *axes.keys), np.transpose)
            limit = band(np.broadcast_to(seen, (*(rows for _ in axes.row), columns)).reshape(rows, columns))
            if limit is not None:
                limits = narrower(limits, limit)
                continue
        if not isinstance(mask.atom, Var):
            raise NoMatch("a mask is one number, which hides every position or none")
        if mask.atom.aval.dtype != jnp.bool_ and mask.fill > -math.inf and mask.value is not None:
            raise NoMatch("a constant bias hides positions in a pattern that is neither causal nor a window")
        left.append(mask)
    low, high = limits
    if low is not None and high is not None and low > high:
        raise NoMatch("its masks hide every position")
    return limits, left


def _laid(
    x: AnyArray, labels: Labels, parts: tuple[Labels, ...], sizes: dict[Hashable, int], dtype: np.dtype
) -> jax.Array:
    """`x` with its axes joined to these four, repeated along the ones it lacks."""
    order = tuple(label for part in parts for label in part)
    x = ordered(x, labels, order, jnp.transpose).astype(dtype)
    x = jnp.broadcast_to(x, [sizes[label] for label in order])
    return x.reshape([math.prod(sizes[label] for label in part) for part in parts])


def _broadcast(x: AnyArray, labels: Labels, axes: _Axes, sizes: dict[Hashable, int]) -> jax.Array:
    """A mask or bias `[batch or 1, heads or 1, rows or 1, keys or 1]`."""
    parts = (axes.batch, (*axes.heads, *axes.groups), axes.row, axes.keys)
    x = ordered(x, labels, axes.scores, jnp.transpose)
    shape, joined, axis = [], [], 0
    for part in parts:
        part_sizes = x.shape[axis : axis + len(part)]
        broadcasts = any(n != 1 for n in part_sizes)
        shape += [sizes[label] if broadcasts else 1 for label in part]
        joined.append(math.prod(shape[axis:]))
        axis += len(part)
    return jnp.broadcast_to(x, shape).reshape(joined)


def _with_dead_rows(
    out: jax.Array, value: jax.Array, mask: AnyArray, low: int | None, high: int | None, columns: int, dead: float
) -> jax.Array:
    """`out` with what the program has in rows that see no key: the mean of the values if hidden logits are finite and
    equal, NaN if they are minus infinity. The operation gives 0 there.
    """
    seen = mask
    if (low, high) != (None, None):
        distance = jnp.arange(columns) - jnp.arange(out.shape[2])[:, None]
        if low is not None:
            seen = seen & (distance >= low)
        if high is not None:
            seen = seen & (distance <= high)
    alive = jnp.any(seen, axis=-1, keepdims=True)
    if math.isnan(dead):
        return jnp.where(alive, out, jnp.nan)
    mean = jnp.mean(value, axis=2, keepdims=True, dtype=jnp.promote_types(value.dtype, jnp.float32))
    return jnp.where(alive, out, jnp.repeat(mean, out.shape[1] // value.shape[1], axis=1).astype(out.dtype))


def _words(
    attention: FoundAttention,
    axes: _Axes,
    sizes: dict[Hashable, int],
    dtype: np.dtype,
    static: dict[str, Any],
    biases: int,
    masks: list[Mask],
    dead: float | None,
) -> str:
    """What was recognised."""

    def size(labels: Labels) -> int:
        return math.prod(sizes[label] for label in labels)

    heads, kv_heads = size((*axes.heads, *axes.groups)), size(axes.heads)
    parts = [
        f"{dtype.name}, batch {size(axes.batch)}, heads {heads}" + (f"/{kv_heads}" if heads != kv_heads else ""),
        f"{size(axes.row)} queries, {sizes[attention.keys]} keys, scale {static['scale']:.4g}",
    ]
    for name in ("causal", "causal_align", "q_offset", "window", "softcap"):
        if static.get(name) is not None:
            parts.append("causal" if name == "causal" else f"{name}={static[name]}")
    if biases:
        after = " after the soft-cap" if attention.bias_after_softcap else ""
        parts.append(f"{biases} bias" + ("es" if biases > 1 else "") + after)
    if masks:
        parts.append(f"{len(masks)} mask" + ("s" if len(masks) > 1 else "") + " passed on")
    if dead is not None:
        parts.append("rows that see no key keep " + ("NaN" if math.isnan(dead) else "the mean of the values"))
    return ", ".join(parts)
