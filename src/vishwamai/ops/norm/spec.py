"""What a normalization computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import RowSpec
from vishwamai.core.types import AnyArray

Kind = Literal["layer", "rms"]


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes."""

    x: Annotated[AnyArray, "groups rows features"]
    residual: Annotated[AnyArray, "groups rows features", "optional"]
    scale: Annotated[AnyArray, "groups? features", "optional"]
    offset: Annotated[AnyArray, "groups? features", "optional"]


class Outputs(NamedTuple):
    """`y` is the normalized array; `total` is x + residual, None without a residual."""

    y: Annotated[AnyArray, "groups rows features"]
    total: Annotated[AnyArray, "groups rows features", "optional"]


@dataclasses.dataclass(frozen=True)
class NormSpec(RowSpec):
    """A normalization over the last axis.

    Attributes:
      kind: "layer" subtracts the mean and divides by the standard deviation, "rms" divides by the root mean square.
      eps: added to the variance (or mean square), in its units.
    """

    kind: Kind = "layer"
    eps: float = 1e-6

    def tuning_key(self) -> str:
        o = self.operands
        extras = "".join(
            letter for letter, value in (("r", o.residual), ("s", o.scale), ("o", o.offset)) if value is not None
        )
        return f"{self.kind} {o.x.dtype.name} {self.groups * self.rows}x{self.features} {extras}".rstrip()

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass, about 8 an element; the op is bound by memory."""
        return 8 * self.operands.x.size

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over HBM must move in the forward pass."""
        o = self.operands
        parameters = sum(p.nbytes for p in (o.scale, o.offset) if p is not None)
        return o.x.nbytes * (4 if o.residual is not None else 2) + parameters


SIGNATURE = Signature(
    Operands(x="*rows features", residual="*rows features", scale="features", offset="features"),
    lambda spec: Outputs("*rows features", None if spec.operands.residual is None else "*rows features"),
)


@described
def describe(operands: Operands, kind: Kind, eps: float) -> NormSpec:
    """The spec of the caller's arrays (their `ArraySpec`s), checked.

    Raises:
      ShapeError: an argument does not fit `x`; the text names it, its value and the fix.
    """
    name = f"{kind}_norm"
    x = operands.x
    check_float(name, "x", x.dtype)
    if not (isinstance(eps, (int, float)) and eps >= 0):
        raise ShapeError(f"{name}: `eps` is {eps!r}; pass a number that is zero or more, such as 1e-6.")
    if operands.residual is not None and operands.residual != x:
        raise ShapeError(
            f"{name}: `residual` is {operands.residual}, but `x` is {x}; pass `residual` of the same shape and dtype "
            "as `x`."
        )
    SIGNATURE.check(name, operands)
    for label, parameter in (("scale", operands.scale), ("offset", operands.offset)):
        if parameter is not None and not jnp.issubdtype(parameter.dtype, jnp.floating):
            raise ShapeError(f"{name}: `{label}` has dtype {parameter.dtype.name}; pass a floating-point array.")
    if x.shape[-1] == 0:
        raise ShapeError(
            f"{name}: `x` has shape {x.shape} with no features in its last axis; pass at least one feature."
        )
    return NormSpec(SIGNATURE.specs(operands), kind, float(eps))


def check_offset(scale: AnyArray, by: object) -> None:
    """Checks `scale_offset`.

    Raises:
      ShapeError: there is no scale to add it to, or it is not a number.
    """
    if scale is None or isinstance(by, bool) or not isinstance(by, (int, float)):
        raise ShapeError(
            f"rms_norm: `scale_offset` is {by!r}{' and `scale` is None' if scale is None else ''}; pass a number, such "
            "as 1.0, with a `scale`."
        )
