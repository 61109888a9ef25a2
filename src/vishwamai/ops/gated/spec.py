"""What a gated linear unit computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import jax.numpy as jnp

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.qtensor import bits
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import OpSpec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes, 1 where an operand is shared between them."""

    x: Annotated[AnyArray, "groups? rows features"]
    gate: Annotated[AnyArray, "groups? features hidden", "optional"]  # or `joint`
    up: Annotated[AnyArray, "groups? features hidden", "optional"]  # or `joint`
    joint: Annotated[AnyArray, "groups? _ features hidden", "optional"]  # gate and up in one array
    # Of a quantized gate and up, whose columns they multiply; in the dtype of sums.
    gate_scale: Annotated[AnyArray, "groups? hidden", "optional"] = None
    up_scale: Annotated[AnyArray, "groups? hidden", "optional"] = None


class Outputs(NamedTuple):
    """`h` is the gated product."""

    h: Annotated[AnyArray, "groups rows hidden"]


class Residuals(NamedTuple):
    """Both products, rounded to the dtype of the operands; kept only where a gradient will be asked for."""

    gate: Annotated[AnyArray, "groups rows hidden"]
    up: Annotated[AnyArray, "groups rows hidden"]


@dataclasses.dataclass(frozen=True)
class GatedSpec(OpSpec):
    """`h = activation(x @ gate) * (x @ up)`, rounded once.

    Attributes:
      activation: one of `core.activations.ACTIVATIONS`, or None for the plain product of both.
      precision: mode of float32 products: "highest" or "high"; "default" for every other dtype, whose products are
        exact.
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
        weights = self.operands.gate if self.operands.joint is None else self.operands.joint
        return weights.shape[-1]

    @property
    def weight_dtype(self) -> jnp.dtype:
        """As the weights are stored."""
        weights = self.operands.gate if self.operands.joint is None else self.operands.joint
        return weights.dtype

    @property
    def quantized(self) -> bool:
        """Whether the weights have scales."""
        return self.operands.gate_scale is not None

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
        return result + sum(-(-o.size * bits(o.dtype) // 8) for o in self.operands if o is not None)

    def tuning_key(self) -> str:
        extras = [str(self.activation), *([self.precision] if self.precision != "default" else [])]
        dtypes = self.operands.x.dtype.name + (f"*{self.weight_dtype.name}" if self.quantized else "")
        return f"{dtypes} {self.groups}x{self.m}x{self.n}x{self.k} {' '.join(extras)}"


def split(spec: GatedSpec, backward: bool) -> str:
    """Groups, rows and columns; the contracted axis in the backward pass alone, for the product of two sums is not the
    sum of products.
    """
    del spec
    return "groups rows hidden features" if backward else "groups rows hidden"


SIGNATURE = Signature(
    Operands("*rows features", "features hidden", "features hidden", "2 features hidden", "hidden", "hidden"),
    Outputs("*rows hidden"),
    labels={
        "gate": "weights[0]",
        "up": "weights[1]",
        "joint": "weights",
        "gate_scale": "weights[0].scales",
        "up_scale": "weights[1].scales",
    },
    hints={"joint": "or a pair (gate, up) of shape (features, hidden)"},
)


@described
def describe(operands: Operands, activation: str | None, precision: str) -> GatedSpec:
    """The spec of the caller's arrays.

    Raises:
      ShapeError: see `check`.
    """
    check(operands, activation)
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, operands.x.dtype)
    return GatedSpec(SIGNATURE.specs(operands), activation, products)


def check(operands: Operands, activation: object) -> None:
    """Checks the caller's arguments.

    Raises:
      ShapeError: an argument is not legal; the text names it, its value and the fix.
    """
    name = "gated_linear_unit"
    x, gate, up, joint, gate_scale, up_scale = operands
    check_float(name, "x", x.dtype)
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"{name}: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    SIGNATURE.check(name, operands)
    if gate_scale is not None and gate.dtype != up.dtype:
        raise ShapeError(
            f"{name}: `weights[0]` holds {gate.dtype.name} and `weights[1]` {up.dtype.name}; quantize both to one "
            "format."
        )
    for label, weights, scale in (
        ("weights[0]", gate, gate_scale),
        ("weights[1]", up, up_scale),
        ("weights", joint, None),
    ):
        if weights is not None and scale is None and weights.dtype != x.dtype:
            raise ShapeError(
                f"{name}: `{label}` is {weights.dtype.name}, but `x` is {x.dtype.name}; pass both in one dtype, for "
                f"instance `weights.astype({x.dtype.name})`."
            )
