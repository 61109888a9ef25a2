"""What a causal convolution over a sequence computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import jax.numpy as jnp

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.segments import check_segment_ids
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import OpSpec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `batch` counts folded vmap axes, and `history` the tokens before the current one
    that the filter reaches.
    """

    x: Annotated[AnyArray, "batch seq channels"]
    weight: Annotated[AnyArray, "batch? channels history+1"]
    bias: Annotated[AnyArray, "batch? channels", "optional"] = None
    initial_state: Annotated[AnyArray, "batch history channels", "optional"] = None
    segment_ids: Annotated[AnyArray, "batch? seq", "optional"] = None


class Outputs(NamedTuple):
    """`y` and `state`, the last `history` tokens; both in the dtype of x."""

    y: Annotated[AnyArray, "batch seq channels"]
    state: Annotated[AnyArray, "batch history channels", "optional"] = None


@dataclasses.dataclass(frozen=True)
class ConvSpec(OpSpec):
    """A causal convolution of each channel with its own filter.

    Attributes:
      activation: one of `core.activations.ACTIVATIONS`, or None.
      return_state: the caller wants `Outputs.state`.
    """

    activation: str | None = None
    return_state: bool = False

    @property
    def history(self) -> int:
        """Tokens before the current one that a filter reaches."""
        return self.operands.weight.shape[-1] - 1

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of sums and of the activation: float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.x.dtype)

    def tuning_key(self) -> str:
        batch, seq, channels = self.operands.x.shape
        return f"{self.operands.x.dtype.name} {batch}x{seq}x{channels}x{self.history + 1} {self.activation}"

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass without the activation (a multiply-add is two)."""
        return 2 * (self.history + 1) * self.operands.x.size

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over memory must move in the forward pass."""
        batch, _, channels = self.operands.x.shape
        state = batch * self.history * channels * self.operands.x.dtype.itemsize if self.return_state else 0
        return self.operands.x.nbytes + state + sum(x.nbytes for x in self.operands if x is not None)


SIGNATURE = Signature(
    Operands("batch seq channels", "channels history+1", "channels", "batch history channels", "batch? seq"),
    lambda spec: Outputs("batch seq channels", "batch history channels" if spec.return_state else None),
    hints={"weight": "the filter of each channel, the current token's factor last"},
)


@described
def describe(operands: Operands, activation: str | None, return_state: bool) -> ConvSpec:
    """The spec of the caller's arrays (their `ArraySpec`s), checked.

    Raises:
      ShapeError: an argument is not legal or does not fit `x`; the text names it, its value and the fix.
    """
    name = "causal_conv1d"
    check_float(name, "x", operands.x.dtype)
    check_float(name, "weight", operands.weight.dtype)
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"{name}: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    SIGNATURE.check(name, operands)
    for label in ("bias", "initial_state"):
        array = getattr(operands, label)
        if array is not None:
            check_float(name, label, array.dtype)
    check_segment_ids(name, operands.segment_ids)
    return ConvSpec(SIGNATURE.specs(operands), activation, return_state)
