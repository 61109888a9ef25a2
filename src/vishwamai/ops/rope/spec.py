"""What a rotary embedding computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import ArraySpec, OpSpec, array_spec

LAYOUTS = ("bhsd", "bshd")


class Operands(NamedTuple):
    """Operands in the caller's own layout; B counts batch elements and folded vmap axes, P the pairs of features that turn."""

    query: Any  # [B, Hq, T, D], or [B, T, Hq, D]
    key: Any  # [B, Hk, T, D], or [B, T, Hk, D], or None
    cos: Any  # [B or 1, T, P] floating
    sin: Any  # [B or 1, T, P] floating


class Outputs(NamedTuple):
    """The rotated arrays, like the operands."""

    query: Any
    key: Any  # or None


@dataclasses.dataclass(frozen=True)
class RopeSpec(OpSpec):
    """Each pair of a head's first 2 P features turns by an angle of its own; the other features stay.

    Attributes:
      interleaved: pairs are neighbours (2 i, 2 i + 1); else feature i turns with feature i + P.
      layout: "bhsd" or "bshd", of query, key and the results.
    """

    interleaved: bool = False
    layout: str = "bhsd"

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

    def heads(self, x: Any) -> int:
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


def array_dims(layout: str) -> tuple[str, ...]:
    """Factors of query, key and the results."""
    return ("b", "h", "t", "d") if layout == "bhsd" else ("b", "t", "h", "d")


def rope_axes(spec: RopeSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Batch, heads and positions may be split; a head's features stay whole."""
    dims, table = array_dims(spec.layout), ("b", "t", "p")
    return name_axes(arguments, results, (Operands(dims, dims, table, table), Outputs(dims, dims)), "bht")


def check(query: ArraySpec, key: ArraySpec | None, layout: Any) -> None:
    """Checks the arrays that are to be rotated against each other.

    Raises:
      ShapeError: one of them is not legal; the text names it, its value and the mend.
    """
    if layout not in LAYOUTS:
        raise ShapeError(
            f"apply_rope: `layout` is {layout!r}; pass 'bhsd' for [batch, heads, seq, head_dim] or 'bshd'."
        )
    names = ("x",) if key is None else ("x[0]", "x[1]")
    for name, x in zip(names, (query, key), strict=False):
        if x is None:
            continue
        if len(x.shape) != 4:
            raise ShapeError(
                f"apply_rope: `{name}` has shape {x.shape}; pass four axes, in the order of `layout` = {layout!r}."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise ShapeError(
                f"apply_rope: `{name}` has dtype {x.dtype.name}; pass bfloat16, float16, float32 or float64."
            )
    if key is None:
        return
    heads = 1 if layout == "bhsd" else 2
    for axis, what in ((0, "batch elements"), (3 - heads, "positions"), (3, "features")):
        if query.shape[axis] != key.shape[axis]:
            raise ShapeError(
                f"apply_rope: `x[0]` of shape {query.shape} has {query.shape[axis]} {what}, but `x[1]` of shape {key.shape} has {key.shape[axis]}; make them equal, or use one call for each."
            )
    if query.dtype != key.dtype:
        raise ShapeError(
            f"apply_rope: `x[0]` is {query.dtype.name} and `x[1]` is {key.dtype.name}; make them equal, or use one call for each."
        )


def check_positions(positions: Any, batch: int, length: int, coordinates: bool) -> None:
    """Checks the caller's positions (None is legal).

    Raises:
      ShapeError: their shape or dtype does not fit.
    """
    wanted = f"({length},) or ({batch}, {length})"
    if coordinates:
        wanted = f"(3, {batch}, {length}), or {wanted} where all three coordinates are the same"
    if positions is None:
        return
    x = array_spec(positions)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ShapeError(f"apply_rope: `positions` has dtype {x.dtype.name}; pass integers of shape {wanted}.")
    shape = x.shape[1:] if coordinates and len(x.shape) == 3 and x.shape[0] == 3 else x.shape
    if shape not in ((length,), (batch, length), (1, length)):
        raise ShapeError(
            f"apply_rope: `positions` has shape {x.shape}, but `x` has {batch} batch elements and {length} positions; pass shape {wanted}."
        )
