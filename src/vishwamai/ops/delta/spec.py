"""What the gated delta rule computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.segments import check_segment_ids
from vishwamai.core.shape_checks import Argument, check_float, check_shapes
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import OpSpec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `batch` counts folded vmap axes. Head h of the state reads head h // group of
    query and key.
    """

    value: Annotated[AnyArray, "batch heads seq value_dim"]
    query: Annotated[AnyArray, "batch heads/ seq key_dim"]
    key: Annotated[AnyArray, "batch heads/ seq key_dim"]
    decay: Annotated[AnyArray, "batch heads seq key_dim?", "optional"] = None  # logarithm
    beta: Annotated[AnyArray, "batch heads seq", "optional"] = None
    skip: Annotated[AnyArray, "batch? heads", "optional"] = None
    initial_state: Annotated[AnyArray, "batch heads key_dim value_dim", "optional"] = None
    segment_ids: Annotated[AnyArray, "batch? seq", "optional"] = None


class Outputs(NamedTuple):
    """`y` in the dtype of value; `state` in the dtype of sums, None unless the call asks for it."""

    y: Annotated[AnyArray, "batch heads seq value_dim"]
    state: Annotated[AnyArray, "batch heads key_dim value_dim", "optional"] = None


@dataclasses.dataclass(frozen=True)
class DeltaSpec(OpSpec):
    """A recurrence over a matrix state S, with g = exp(decay):

    S = g S + beta key (value - [correction] (g S)^T key)^T,  y = scale S^T query + skip value.

    Attributes:
      scale: multiplies the query.
      correction: the delta rule; False for linear attention and state spaces.
      return_state: the caller wants `Outputs.state`.
    """

    scale: float = 1.0
    correction: bool = True
    return_state: bool = False

    @property
    def batch(self) -> int:
        return self.operands.value.shape[0]

    @property
    def heads(self) -> int:
        return self.operands.value.shape[1]

    @property
    def key_heads(self) -> int:
        return self.operands.key.shape[1]

    @property
    def seq(self) -> int:
        return self.operands.value.shape[2]

    @property
    def key_dim(self) -> int:
        return self.operands.key.shape[3]

    @property
    def value_dim(self) -> int:
        return self.operands.value.shape[3]

    @property
    def by_channel(self) -> bool:
        """Whether each channel of the key has a decay of its own."""
        return self.operands.decay is not None and self.operands.decay.shape[3] != 1

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of states and sums: float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.value.dtype)

    def tuning_key(self) -> str:
        sizes = f"{self.batch}x{self.heads}/{self.key_heads}x{self.seq}x{self.key_dim}x{self.value_dim}"
        options = ["delta" if self.correction else "linear", *(["channels"] if self.by_channel else [])]
        return f"{self.operands.value.dtype.name} {sizes} {' '.join(options)}"

    @property
    def flops(self) -> int:
        """Floating-point operations of the recurrence (a multiply-add is two): two or three products with the state for
        a token.
        """
        products = 3 if self.correction else 2
        return 2 * products * self.batch * self.heads * self.seq * self.key_dim * self.value_dim

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over memory must move in the forward pass."""
        state = self.batch * self.heads * self.key_dim * self.value_dim * self.accumulator.itemsize
        operands = sum(x.nbytes for x in self.operands if x is not None)
        return operands + self.operands.value.nbytes + (state if self.return_state else 0)


SIGNATURE = Signature(
    Operands(
        "batch heads seq value_dim",
        "batch heads/ seq key_dim",
        "batch heads/ seq key_dim",
        "batch heads seq key_dim?",
        "batch heads seq",
        "heads",
        "batch heads key_dim value_dim",
        "batch? seq",
    ),
    lambda spec: Outputs("batch heads seq value_dim", "batch heads key_dim value_dim" if spec.return_state else None),
)


@described
def describe(operands: Operands, function: str, scale: float | None, correction: bool, return_state: bool) -> DeltaSpec:
    """The spec of the caller's arrays (their `ArraySpec`s), checked.

    Args:
      function: name of the public function, for errors.
      scale: None for the inverse square root of key_dim.

    Raises:
      ShapeError: an argument is not legal or does not fit the others; the text names it, its value and the fix.
    """
    value = operands.value
    check_float(function, "value", value.dtype)
    SIGNATURE.check(function, operands)
    for label in ("query", "key"):
        array = getattr(operands, label)
        if array.dtype != value.dtype:
            raise ShapeError(
                f"{function}: `{label}` has dtype {array.dtype.name}, but `value` {value.dtype.name}; pass one dtype."
            )
    for label in ("decay", "beta", "skip", "initial_state"):
        array = getattr(operands, label)
        if array is not None:
            check_float(function, label, array.dtype)
    check_segment_ids(function, operands.segment_ids)
    factor = math.sqrt(1 / max(1, operands.key.shape[-1])) if scale is None else float(scale)
    return DeltaSpec(SIGNATURE.specs(operands), factor, correction, return_state)


def state_space_decay(dt: AnyArray, A: AnyArray) -> AnyArray:
    """The log-decays `[batch, heads, seq, 1 or state_dim]` of a state space, of arrays of JAX or torch."""
    return dt[..., None] * (A[:, None, None] if A.ndim == 1 else A[:, None, :])


def with_channels(function: str, decay: AnyArray) -> AnyArray:
    """A decay, of JAX or torch, with an axis of channels, 1 where they share it; None stays.

    Raises:
      ShapeError: it is neither of heads nor of channels.
    """
    if decay is None or decay.ndim == 4:
        return decay
    if decay.ndim != 3:
        raise ShapeError(
            f"{function}: `decay` has {decay.ndim} axes; pass [batch, heads, seq], or [batch, heads, seq, key_dim] for "
            "a decay of each channel."
        )
    return decay[..., None]


def check_state_space(
    x: AnyArray,
    dt: AnyArray,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    D: AnyArray,
    initial_state: AnyArray,
    segment_ids: AnyArray,
) -> None:
    """Checks the arrays of `state_space`, of JAX or torch, by the names that its caller knows.

    Raises:
      ShapeError: the shapes contradict one another.
    """
    texts = {
        "x": (x, "batch heads seq head_dim"),
        "dt": (dt, "batch heads seq"),
        "A": (A, "heads" if A.ndim == 1 else "heads state_dim"),
        "B": (B, "batch heads/ seq state_dim"),
        "C": (C, "batch heads/ seq state_dim"),
        "D": (D, "heads"),
        "initial_state": (initial_state, "batch heads state_dim head_dim"),
        "segment_ids": (segment_ids, "batch? seq"),
    }
    check_shapes(
        "state_space",
        (Argument(name, text, tuple(array.shape)) for name, (array, text) in texts.items() if array is not None),
    )
