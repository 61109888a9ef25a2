"""What a rotary embedding computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core import dims
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.shape_checks import Argument, check_float, check_shapes
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import ArraySpec, OpSpec, array_spec
from vishwamai.core.types import AnyArray

LAYOUTS = ("bhsd", "bshd")


class Operands(NamedTuple):
    """Operands in the caller's own layout, here "bhsd"; `batch` counts folded vmap axes too, `pairs` those of features
    that turn.
    """

    query: Annotated[AnyArray, "batch heads seq head_dim"]
    key: Annotated[AnyArray, "batch heads seq head_dim", "optional"]
    cos: Annotated[AnyArray, "batch? seq pairs"]  # floating
    sin: Annotated[AnyArray, "batch? seq pairs"]  # floating


class Outputs(NamedTuple):
    """The rotated arrays, like the operands."""

    query: Annotated[AnyArray, "batch heads seq head_dim"]
    key: Annotated[AnyArray, "batch heads seq head_dim", "optional"]


@dataclasses.dataclass(frozen=True)
class RopeSpec(OpSpec):
    """Each pair of a head's first 2 P features turns by an angle of its own; the other features stay.

    Attributes:
      interleaved: pairs are neighbours (2 i, 2 i + 1); else feature i turns with feature i + P.
      layout: "bhsd" or "bshd", of query, key and the results.
    """

    interleaved: bool = False
    layout: str = "bhsd"

    def dims(self, kind: object) -> Any:
        """Of query and key as `layout` orders them."""
        declared = super().dims(kind)
        return declared if self.layout == "bhsd" else declared._replace(query=_BSHD, key=_BSHD)

    @property
    def batch(self) -> int:
        return self.operands.query.shape[0]

    @property
    def positions(self) -> int:
        return self.operands.cos.shape[1]

    @property
    def pairs(self) -> int:
        return self.operands.cos.shape[2]

    @property
    def head_dim(self) -> int:
        return self.operands.query.shape[3]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """float32, or float64 where an operand is."""
        return accumulator_dtype(*(x.dtype for x in self.operands if x is not None))

    def heads(self, x: ArraySpec) -> int:
        """Heads of the query or the key."""
        return x.shape[1 if self.layout == "bhsd" else 2]

    def tuning_key(self) -> str:
        q, k = self.operands.query, self.operands.key
        heads = f"{self.heads(q)}+{0 if k is None else self.heads(k)}"
        form = f"{self.layout}{' interleaved' if self.interleaved else ''}"
        return f"{q.dtype.name} {self.batch}x{heads}x{self.positions}x{self.head_dim} {2 * self.pairs} {form}"

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: three for every rotated feature; the op is bound by memory."""
        arrays = [x for x in self.operands[:2] if x is not None]
        return sum(3 * x.size * 2 * self.pairs // max(1, self.head_dim) for x in arrays)

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over HBM must move in the forward pass."""
        o = self.operands
        return sum(2 * x.nbytes for x in (o.query, o.key) if x is not None) + o.cos.nbytes + o.sin.nbytes


class Cached(NamedTuple):
    """The caller's arrays where each device reads its own positions' rows, of a cache that it has whole."""

    query: Annotated[AnyArray, "batch heads seq head_dim"]
    key: Annotated[AnyArray, "batch heads seq head_dim", "optional"]
    cos: Annotated[AnyArray, "_ _"]
    sin: Annotated[AnyArray, "_ _"]
    positions: Annotated[AnyArray, "batch? seq"]  # three coordinates in front with `MRopeScaling`


def _signature(heads: str, kind: object, **more: str) -> Signature:
    return Signature(
        dims.declared(kind)._replace(query=heads, key=heads, **more),
        lambda spec: Outputs(heads, None if spec.operands.key is None else heads),
    )


_BSHD = "batch seq heads head_dim"
_HEADS = {"bhsd": dims.declared(Operands).query, "bshd": _BSHD}
SIGNATURES = {layout: _signature(heads, Operands) for layout, heads in _HEADS.items()}
"""By `layout`."""
CACHED = {
    (layout, coordinates): _signature(heads, Cached, positions="_ batch? seq" if coordinates else "batch? seq")
    for layout, heads in _HEADS.items()
    for coordinates in (False, True)
}
"""By `layout`, and by whether a position has three coordinates."""


@described
def describe(operands: Operands, interleaved: bool, layout: str) -> RopeSpec:
    """The spec of the caller's arrays.

    Raises:
      ShapeError: see `check`.
    """
    check(operands.query, operands.key, layout)
    return RopeSpec(operands, interleaved, layout)


def needs_separate_calls(query: Any, key: Any, layout: str) -> bool:
    """Whether query and key are turned by a call each: one has a single head and the other several.

    Devices that split the several have the single one whole, and so its result. The dims of one call cannot say that: a
    result that a device has whole, beside operands that are split, is one term of a sum.
    """
    heads = 1 if layout == "bhsd" else 2
    counts = {query.shape[heads], key.shape[heads]}
    return len(counts) == 2 and 1 in counts


@described
def check(query: ArraySpec, key: ArraySpec | None, layout: object) -> None:
    """Checks the arrays that are to be rotated against each other.

    Raises:
      ShapeError: one of them is not legal; the text names it, its value and the fix.
    """
    if layout not in LAYOUTS:
        raise ShapeError(
            f"apply_rope: `layout` is {layout!r}; pass 'bhsd' for [batch, heads, seq, head_dim] or 'bshd'."
        )
    text = _HEADS[layout]
    arrays = [("x" if key is None else "x[0]", text, query)]
    if key is not None:
        arrays.append(("x[1]", text.replace("heads", "key_heads"), key))
    check_shapes("apply_rope", (Argument(name, text, x.shape, f"layout={layout!r}") for name, text, x in arrays))
    for name, _, x in arrays:
        check_float("apply_rope", name, x.dtype)
    if key is None:
        return
    if query.dtype != key.dtype:
        raise ShapeError(
            f"apply_rope: `x[0]` is {query.dtype.name} and `x[1]` is {key.dtype.name}; make them equal, or use one "
            "call for each."
        )


def check_positions(positions: AnyArray, batch: int, length: int, coordinates: bool) -> None:
    """Checks the caller's positions (None is legal).

    Raises:
      ShapeError: their shape or dtype does not fit.
    """
    if positions is None:
        return
    x = array_spec(positions)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ShapeError(f"apply_rope: `positions` has dtype {x.dtype.name}; pass integers of shape [seq].")
    text, hint = CACHED[LAYOUTS[0], False].operands.positions, None
    if coordinates:
        hint = f"or (3, {batch}, {length}): time, height and width"
        text = text if len(x.shape) < 3 else f"3 {text}"
    sizes = {"batch": ("x", batch), "seq": ("x", length)}
    check_shapes("apply_rope", [Argument("positions", text, x.shape, hint)], sizes)
