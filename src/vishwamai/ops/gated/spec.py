"""What a gated linear unit computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import ArraySpec, OpSpec


class Operands(NamedTuple):
    """Operands in the op's own layout; G counts folded vmap axes, 1 where an operand is shared between them."""

    x: Any  # [G or 1, M, K]
    gate: Any  # [G or 1, K, N], or None where `both` is there
    up: Any  # [G or 1, K, N], or None where `both` is there
    both: Any  # [G or 1, 2, K, N], gate and up in one array, or None


class Outputs(NamedTuple):
    """`h` is the gated product."""

    h: Any  # [G, M, N]


class Residuals(NamedTuple):
    """Both products, rounded to the dtype of the operands; kept only where a gradient will be asked for."""

    gate: Any  # [G, M, N]
    up: Any  # [G, M, N]


@dataclasses.dataclass(frozen=True)
class GatedSpec(OpSpec):
    """`h = activation(x @ gate) * (x @ up)`, rounded once.

    Attributes:
      activation: one of `core.activations.ACTIVATIONS`, or None for the plain product of both.
      precision: of float32 products: "highest" or "high"; "default" for every other dtype, whose products are exact.
    """

    activation: str | None = "silu"
    precision: str = "default"

    @property
    def groups(self) -> int:
        sizes = {operand.shape[0] for operand in self.operands if operand is not None}
        return 0 if 0 in sizes else max(sizes)

    @property
    def m(self) -> int:
        return self.operands.x.shape[1]

    @property
    def k(self) -> int:
        return self.operands.x.shape[2]

    @property
    def n(self) -> int:
        weights = self.operands.gate if self.operands.both is None else self.operands.both
        return weights.shape[-1]

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of sums and of the activation: float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.x.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products in the forward pass (a multiply-add is two)."""
        return 4 * self.groups * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move between HBM and the chip at least."""
        result = self.groups * self.m * self.n * self.operands.x.dtype.itemsize
        return result + sum(operand.nbytes for operand in self.operands if operand is not None)

    def tuning_key(self) -> str:
        extras = [str(self.activation), *([self.precision] if self.precision != "default" else [])]
        return f"{self.operands.x.dtype.name} {self.groups}x{self.m}x{self.n}x{self.k} {' '.join(extras)}"


def gated_axes(spec: GatedSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Groups, rows and columns may be split; the contracted axis stays whole, for the product of two sums is not the sum of products."""
    weights, out = ("g", "k", "n"), ("g", "m", "n")
    operands = Operands(("g", "m", "k"), weights, weights, ("g", "two", "k", "n"))
    return name_axes(arguments, results, (operands, Outputs(out), Residuals(out, out)), "gmn")


def check(x: ArraySpec, gate: ArraySpec, up: ArraySpec | None, activation: Any) -> None:
    """Checks the caller's arguments; `up` is None where `gate` holds both weights.

    Raises:
      ShapeError: an argument is not legal; the text names it, its value and the mend.
    """
    name = "gated_linear_unit"
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ShapeError(f"{name}: `x` has dtype {x.dtype.name}; pass bfloat16, float16, float32 or float64.")
    if not x.shape:
        raise ShapeError(f"{name}: `x` is a scalar; pass an array whose last axis holds the features.")
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"{name}: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    features = x.shape[-1]
    if up is None:
        if len(gate.shape) != 3 or gate.shape[0] != 2 or gate.shape[1] != features:
            raise ShapeError(
                f"{name}: `weights` has shape {gate.shape}, but `x` has {features} features in its last axis; pass shape (2, {features}, hidden), or a pair (gate, up) of shape ({features}, hidden)."
            )
    else:
        for label, weights in (("weights[0]", gate), ("weights[1]", up)):
            if len(weights.shape) != 2 or weights.shape[0] != features:
                raise ShapeError(
                    f"{name}: `{label}` has shape {weights.shape}, but `x` has {features} features in its last axis; pass shape ({features}, hidden)."
                )
        if gate.shape != up.shape:
            raise ShapeError(
                f"{name}: `weights[0]` has shape {gate.shape} and `weights[1]` {up.shape}; make them equal."
            )
    for label, weights in (("weights[0]", gate), ("weights[1]", up or gate)):
        if weights.dtype != x.dtype:
            raise ShapeError(
                f"{name}: `{label}` is {weights.dtype.name}, but `x` is {x.dtype.name}; pass both in one dtype, for instance `weights.astype({x.dtype.name})`."
            )
