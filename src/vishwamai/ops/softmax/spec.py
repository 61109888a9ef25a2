"""What a softmax computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import RowSpec, array_spec


class Operands(NamedTuple):
    """Operands in the op's own layout; G counts folded vmap axes, R the rows, F what is summed over."""

    x: Any  # [G, R, F]


class Outputs(NamedTuple):
    """`y` is the softmax, or its logarithm."""

    y: Any  # [G, R, F]


@dataclasses.dataclass(frozen=True)
class SoftmaxSpec(RowSpec):
    """A softmax over the last axis.

    Attributes:
      log: its logarithm instead.
      moved: the caller's axis is not the last, so that a kernel's rows must be made by a transposition.
    """

    log: bool = False
    moved: bool = False

    def tuning_key(self) -> str:
        o = self.operands
        return f"{'log ' if self.log else ''}{o.x.dtype.name} {self.groups * self.rows}x{self.features}"

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass, about 5 an element; the op is bound by memory."""
        return 5 * self.operands.x.size

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over HBM must move in the forward pass."""
        return 2 * self.operands.x.nbytes


def softmax_axes(spec: SoftmaxSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Rows and groups may be split; what is summed over stays whole."""
    rows = ("g", "r", "f")
    return name_axes(arguments, results, (Operands(rows), Outputs(rows)), "gr")


def make_spec(name: str, x: Any, axis: Any, log: bool) -> SoftmaxSpec:
    """Checks the caller's arguments (`x` of any rank) and describes them in the op's own layout.

    Raises:
      ShapeError: one of them is not legal; the text names it, its value and the mend.
    """
    x = array_spec(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ShapeError(f"{name}: `x` has dtype {x.dtype.name}; pass bfloat16, float16, float32 or float64.")
    if not x.shape:
        raise ShapeError(f"{name}: `x` is a scalar; pass an array with an axis to sum over.")
    rank = len(x.shape)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(
            f"{name}: `axis` is {axis!r}, but `x` has shape {x.shape}; pass a number from {-rank} to {rank - 1}."
        )
    features = x.shape[axis]
    if features == 0:
        raise ShapeError(
            f"{name}: `x` has shape {x.shape}, with nothing along axis {axis}; pass at least one element there."
        )
    flat = dataclasses.replace(x, shape=(1, x.size // features, features))
    return SoftmaxSpec(Operands(flat), log, axis % rank != rank - 1)
