"""What the cross entropy of a linear layer computes: operands, options, and the checks that all platforms share.

The op gives three numbers for each token, from which `api` composes every loss: the logsumexp of its logits, the logit of its label and, for label
smoothing, the sum of its logits. All three can be combined from parts of the vocabulary, so the vocabulary may be split over devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import OpSpec, array_spec

REDUCTIONS = ("none", "mean", "sum")
FLOATS = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))


class Operands(NamedTuple):
    """Operands in the op's own layout; G counts folded vmap axes, T the tokens, D the features, V the words of the vocabulary."""

    x: Any  # [G, T, D]
    weight: Any  # [G or 1, V, D], of x's dtype
    bias: Any  # [G or 1, V] in the accumulation dtype, or None
    labels: Any  # [G, T] int32; one outside 0 ... V-1 has no logit


class Outputs(NamedTuple):
    """Three numbers for each token, in the accumulation dtype."""

    logsumexp: Any  # [G, T]
    label_logit: Any  # [G, T]; 0 where the label is outside the vocabulary
    logit_sum: Any  # [G, T], or None unless the spec asks for it


@dataclasses.dataclass(frozen=True)
class LossSpec(OpSpec):
    """Logits `z = x @ weight.T + bias`, capped as `softcap * tanh(z / softcap)`, and their logsumexp, label's logit and sum.

    Attributes:
      softcap: bound of the logits, or None.
      precision: of float32 products: "highest" or "high"; "default" for every other dtype, whose products are exact.
      logit_sum: whether the sum of the logits is wanted.
    """

    softcap: float | None = None
    precision: str = "default"
    logit_sum: bool = False

    @property
    def groups(self) -> int:
        return self.operands.x.shape[0]

    @property
    def tokens(self) -> int:
        return self.operands.x.shape[1]

    @property
    def features(self) -> int:
        return self.operands.x.shape[2]

    @property
    def vocab(self) -> int:
        return self.operands.weight.shape[1]

    @property
    def accumulator(self) -> jnp.dtype:
        """float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.x.dtype)

    @property
    def shared(self) -> bool:
        """Whether all groups have the same weight and bias, so that they are one problem of more tokens."""
        bias = self.operands.bias
        return self.operands.weight.shape[0] == 1 and (bias is None or bias.shape[0] == 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of the logits in the forward pass (a multiply-add is two)."""
        return 2 * self.groups * self.tokens * self.vocab * self.features

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move between HBM and the chip at least: no logits among them."""
        outputs = (3 if self.logit_sum else 2) * self.groups * self.tokens * self.accumulator.itemsize
        return outputs + sum(operand.nbytes for operand in self.operands if operand is not None)

    def tuning_key(self) -> str:
        extras = [word for word, given in (("bias", self.operands.bias), ("cap", self.softcap)) if given is not None]
        extras += ["sum"] if self.logit_sum else []
        extras += [self.precision] if self.precision != "default" else []
        tokens = self.groups * self.tokens if self.shared else f"{self.groups}x{self.tokens}"
        return f"{self.operands.x.dtype.name} {tokens}x{self.vocab}x{self.features} {' '.join(extras)}".rstrip()


def loss_axes(spec: LossSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Groups and tokens may be split; features stay whole. Parts of the vocabulary are combined outside the op, see `api`."""
    rows = ("g", "t")
    operands = Operands(("g", "t", "d"), ("g", "v", "d"), ("g", "v"), rows)
    return name_axes(arguments, results, (operands, Outputs(rows, rows, rows)), "gt")


# --- Checks of the caller's arguments --------------------------------------------------------------------------------------------------------------


def check(
    x: Any,
    weight: Any,
    labels: Any,
    bias: Any,
    softcap: Any,
    label_smoothing: Any,
    z_loss: Any,
    ignore_index: Any,
    reduction: Any,
) -> None:
    """Checks the caller's arguments against one another.

    Raises:
      ShapeError: two arguments contradict each other or the operation; the text names them, their values and the mend.
    """
    check_arrays(x, weight, labels, bias)
    check_options(softcap, label_smoothing, z_loss, ignore_index, reduction)


def check_arrays(x: Any, weight: Any, labels: Any, bias: Any) -> None:
    """The arrays' part of `check`."""
    x, weight, labels = array_spec(x), array_spec(weight), array_spec(labels)
    name = "linear_cross_entropy"
    for label, array in (("x", x), ("weight", weight)):
        if array.dtype not in FLOATS:
            raise ShapeError(
                f"{name}: `{label}` has dtype {array.dtype.name}; pass bfloat16, float16, float32 or float64."
            )
    if not x.shape:
        raise ShapeError(f"{name}: `x` is a scalar; pass `[..., features]`.")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape:
        turned = len(weight.shape) == 2 and weight.shape[0] == x.shape[-1]
        mend = "`weight.T`" if turned else f"`weight` of shape (words, {x.shape[-1]}), neither of them 0"
        raise ShapeError(
            f"{name}: `weight` has shape {weight.shape}, but `x` has {x.shape[-1]} features in its last axis; pass {mend}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ShapeError(f"{name}: `labels` has dtype {labels.dtype.name}; pass integers, one word for each token.")
    if labels.shape != x.shape[:-1]:
        raise ShapeError(
            f"{name}: `labels` has shape {labels.shape}, but `x` of shape {x.shape} has tokens {x.shape[:-1]}; pass `labels` of shape {x.shape[:-1]}."
        )
    if bias is not None:
        given = array_spec(bias)
        if given.shape != weight.shape[:1] or given.dtype not in FLOATS:
            raise ShapeError(
                f"{name}: `bias` is {given}, but `weight` has {weight.shape[0]} words; pass a floating `bias` of shape ({weight.shape[0]},)."
            )


def check_options(softcap: Any, label_smoothing: Any, z_loss: Any, ignore_index: Any, reduction: Any) -> None:
    """The options' part of `check`."""
    name = "linear_cross_entropy"
    if softcap is not None and not (_number(softcap) and 0 < softcap < math.inf):
        raise ShapeError(f"{name}: `softcap` is {softcap!r}; pass a positive number, such as 30.0, or None.")
    if not (_number(label_smoothing) and 0 <= label_smoothing <= 1):
        raise ShapeError(f"{name}: `label_smoothing` is {label_smoothing!r}; pass a number from 0 to 1.")
    if not (_number(z_loss) and 0 <= z_loss < math.inf):
        raise ShapeError(f"{name}: `z_loss` is {z_loss!r}; pass a number that is zero or more, such as 1e-4.")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ShapeError(f"{name}: `ignore_index` is {ignore_index!r}; pass an integer, such as -100.")
    if reduction not in REDUCTIONS:
        raise ShapeError(f"{name}: `reduction` is {reduction!r}; pass one of {', '.join(map(repr, REDUCTIONS))}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
