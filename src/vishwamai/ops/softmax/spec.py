"""What a softmax computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

from vishwamai.core.errors import ShapeError
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import RowSpec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes, `features` is summed over."""

    x: Annotated[AnyArray, "groups rows features"]


class Outputs(NamedTuple):
    """`y` is the softmax, or its logarithm."""

    y: Annotated[AnyArray, "groups rows features"]


@dataclasses.dataclass(frozen=True)
class SoftmaxSpec(RowSpec):
    """A softmax over the last axis.

    Attributes:
      log: its logarithm instead.
      transposed: the caller's axis is not the last, so that a kernel's rows must be made by a transposition.
    """

    log: bool = False
    transposed: bool = False

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


SIGNATURE = Signature(Operands("*rows features"), Outputs("*rows features"))


def check_axis(name: str, shape: tuple[int, ...], axis: Any) -> int:
    """The caller's axis, counted from 0.

    Raises:
      ShapeError: `x` has no such axis.
    """
    rank = len(shape)
    if not shape:
        raise ShapeError(f"{name}: `x` is a scalar; pass an array with an axis to sum over.")
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(
            f"{name}: `axis` is {axis!r}, but `x` has shape {tuple(shape)}; pass a number from {-rank} to {rank - 1}."
        )
    if shape[axis] == 0:
        raise ShapeError(
            f"{name}: `x` has shape {tuple(shape)}, with nothing along axis {axis}; pass at least one element there."
        )
    return axis % rank


@described
def describe(operands: Operands, log: bool, transposed: bool = False) -> SoftmaxSpec:
    """The spec of an array whose last axis is summed over.

    Raises:
      ShapeError: its dtype is not legal.
    """
    x = operands.x
    check_float("log_softmax" if log else "softmax", "x", x.dtype)
    return SoftmaxSpec(SIGNATURE.specs(operands), log, transposed)
