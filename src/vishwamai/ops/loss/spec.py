"""What the cross entropy of a linear layer computes: operands, options, and the checks that all platforms share.

The op gives three numbers for each token, from which `api` composes every loss: the logsumexp of its logits, the logit
of its label and, for label smoothing, the sum of its logits. All three can be combined from parts of the vocabulary, so
the vocabulary may be split over devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vishwamai.core import dims
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import OpSpec, array_spec
from vishwamai.core.types import AnyArray

REDUCTIONS = ("none", "mean", "sum")


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes."""

    x: Annotated[AnyArray, "groups tokens features"]
    weight: Annotated[AnyArray, "groups? vocab features"]  # of x's dtype
    bias: Annotated[AnyArray, "groups? vocab", "optional"]  # in the accumulation dtype
    labels: Annotated[AnyArray, "groups tokens"]  # int32; one outside the vocabulary has no logit
    targets: Annotated[AnyArray, "groups tokens vocab", "optional"]  # floating: a weight for every logit


class Outputs(NamedTuple):
    """Three numbers for each token, in the accumulation dtype."""

    logsumexp: Annotated[AnyArray, "groups tokens"]
    # 0 where the label is outside the vocabulary; with targets, their sum of weighted logits is added.
    label_logit: Annotated[AnyArray, "groups tokens"]
    logit_sum: Annotated[AnyArray, "groups tokens", "optional"]  # None unless the spec asks for it


@dataclasses.dataclass(frozen=True)
class LossSpec(OpSpec):
    """Logits `z = x @ weight.T + bias`, capped as `softcap * tanh(z / softcap)`, and their logsumexp, label's logit and
    sum.

    Attributes:
      softcap: bound of the logits, or None.
      precision: mode of float32 products: "highest" or "high"; "default" for every other dtype, whose products are
        exact.
      logit_sum: bool, True computes the sum of the logits.
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
        extras = [word for word, value in (("bias", self.operands.bias), ("cap", self.softcap)) if value is not None]
        extras += ["sum"] if self.logit_sum else []
        extras += ["targets"] if self.operands.targets is not None else []
        extras += [self.precision] if self.precision != "default" else []
        tokens = self.groups * self.tokens if self.shared else f"{self.groups}x{self.tokens}"
        return f"{self.operands.x.dtype.name} {tokens}x{self.vocab}x{self.features} {' '.join(extras)}".rstrip()


SIGNATURE = Signature(
    Operands("*tokens features", "vocab features", "vocab", "*tokens", "*tokens vocab"),
    lambda spec: Outputs("*tokens", "*tokens", "*tokens" if spec.logit_sum else None),
    labels={"targets": "labels"},
)


class Parts(NamedTuple):
    """The caller's arrays where the vocabulary may be split over devices: each computes numbers of its own part."""

    x: Annotated[AnyArray, "*tokens features"]
    weight: Annotated[AnyArray, "vocab features"]
    bias: Annotated[AnyArray, "vocab", "optional"]
    labels: Annotated[AnyArray, "*tokens"]
    targets: Annotated[AnyArray, "*tokens vocab", "optional"]
    entries: Annotated[AnyArray, "vocab"]  # 0, 1, 2 ...: they tell a device which part it has


PARTS = Signature(
    dims.declared(Parts),
    lambda spec: Outputs("*tokens vocab", "*tokens vocab", "*tokens vocab" if spec.logit_sum else None),
    split="tokens vocab",
)
"""Its results have one more axis, along the parts."""


@described
def describe(operands: Operands, softcap: float | None, precision: str, logit_sum: bool) -> LossSpec:
    """The spec of the caller's arrays, of which `x` and `weight` have one dtype.

    Raises:
      ShapeError: see `check_arrays`.
    """
    check_arrays(operands)
    specs = SIGNATURE.specs(operands)
    specs = specs._replace(labels=dataclasses.replace(specs.labels, dtype=jnp.dtype(jnp.int32)))
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, specs.x.dtype)
    return LossSpec(specs, softcap, products, logit_sum)


@described
def check_arrays(operands: Operands) -> None:
    """Checks the caller's arrays (their `ArraySpec`s) against one another.

    Raises:
      ShapeError: two of them contradict each other or the operation; the text names them, their values and the fix.
    """
    x, weight, bias, labels, targets = operands
    name = "linear_cross_entropy"
    for label, array in (("x", x), ("weight", weight), ("bias", bias), ("labels", targets)):
        if array is not None:
            check_float(name, label, array.dtype)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ShapeError(f"{name}: `labels` has dtype {labels.dtype.name}; pass integers, one for each token.")
    SIGNATURE.check(name, operands)
    if 0 in weight.shape:
        raise ShapeError(f"{name}: `weight` has shape {weight.shape}; pass (vocab, features), neither of them 0.")


def probabilities(labels: AnyArray, x: AnyArray, floating: bool) -> bool:
    """Whether the labels are probabilities of all entries, and not one entry for each token.

    Args:
      labels, x: arrays of any framework.
      floating: bool, True where the labels are floats.

    Raises:
      ShapeError: they are floating and have no axis of the vocab.
    """
    if floating and len(labels.shape) != len(x.shape):
        dtype = str(labels.dtype).removeprefix("torch.")
        raise ShapeError(
            f"linear_cross_entropy: `labels` has dtype {dtype} and shape {tuple(labels.shape)}; pass integers, one "
            "for each token, or probabilities of shape [..., vocab]."
        )
    return floating


WITHOUT_TARGETS = "`labels` are probabilities, and the kernel takes one label for each token."
"""Why an implementation declines them."""


def check_labels(labels: np.ndarray, *, vocab: int, ignore_index: int) -> None:
    """Checks the values of the labels.

    Raises:
      ShapeError: one is outside the vocab, and is not `ignore_index`.
    """
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab))
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ShapeError(
            f"linear_cross_entropy: `labels` holds {labels[first]} at {list(first)} (of {wrong.sum()} such), but the "
            f"vocab is {vocab}; pass labels from 0 to {vocab - 1}, or `ignore_index` ({ignore_index}) for a token "
            "without a loss."
        )


def check_class_weights(weights: AnyArray, floating: bool, vocab: int, label_smoothing: float, targets: bool) -> None:
    """Checks the class weights, an array of any framework, which is `floating` or not.

    Raises:
      ShapeError: they are not a floating-point array with one for each entry of the vocab.
      UnsupportedError: they come with label smoothing, whose target would need a sum of weighted logits; or with
        labels that are probabilities.
    """
    if targets:
        raise UnsupportedError(
            "linear_cross_entropy: `class_weights` with labels that are probabilities; leave it out, and pass "
            "`labels * class_weights`, which is the same."
        )
    if tuple(weights.shape) != (vocab,) or not floating:
        raise ShapeError(
            f"linear_cross_entropy: `class_weights` is {array_spec(weights)}, but the vocab is {vocab}; pass a "
            f"floating-point array of shape ({vocab},)."
        )
    if label_smoothing:
        raise UnsupportedError(
            f"linear_cross_entropy: `class_weights` with label_smoothing = {label_smoothing} needs the sum of all "
            "weighted logits, which is not computed; pass one of them."
        )


def check_options(softcap: Any, label_smoothing: Any, z_loss: Any, ignore_index: object, reduction: object) -> None:
    """Checks the options.

    Raises:
      ShapeError: one of them is not legal; the text names it, its value and the fix.
    """
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


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
