"""What a normalization computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import RowSpec, array_spec

Kind = Literal["layer", "rms"]


class Operands(NamedTuple):
    """Operands in the op's own layout; G counts folded vmap axes, R the rows, F the features."""

    x: Any  # [G, R, F]
    residual: Any  # [G, R, F] or None
    scale: Any  # [G or 1, F] or None
    offset: Any  # [G or 1, F] or None


class Outputs(NamedTuple):
    """`y` is the normalized array; `total` is x + residual, None without a residual."""

    y: Any  # [G, R, F]
    total: Any  # [G, R, F] or None


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


def norm_axes(spec: NormSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Rows and groups may be split; features stay whole. The backward pass keeps no residuals: it recomputes the statistics from its input."""
    rows, parameters = ("g", "r", "f"), ("g", "f")
    dims = (Operands(rows, rows, parameters, parameters), Outputs(rows, rows))
    return name_axes(arguments, results, dims, "gr")


def make_spec(name: str, kind: Kind, x: Any, residual: Any, scale: Any, offset: Any, eps: float) -> NormSpec:
    """Checks the caller's arguments (`x` of any rank) and describes them in the op's own layout.

    Raises:
      ShapeError: an argument does not fit `x`; the text names it, its value and the mend.
    """
    x = array_spec(x)
    if len(x.shape) < 1:
        raise ShapeError(f"{name}: `x` is a scalar; pass an array whose last axis holds the features.")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ShapeError(f"{name}: `x` has dtype {x.dtype.name}; pass bfloat16, float16, float32 or float64.")
    if not (isinstance(eps, (int, float)) and eps >= 0):
        raise ShapeError(f"{name}: `eps` is {eps!r}; pass a number that is zero or more, such as 1e-6.")
    features = x.shape[-1]
    rows = x.size // features if features else 0
    for label, parameter in (("scale", scale), ("offset", offset)):
        if parameter is None:
            continue
        if tuple(parameter.shape) != (features,):
            raise ShapeError(
                f"{name}: `{label}` has shape {tuple(parameter.shape)}, but `x` has {features} features in its last axis; pass `{label}` of shape ({features},)."
            )
        if not jnp.issubdtype(array_spec(parameter).dtype, jnp.floating):
            raise ShapeError(
                f"{name}: `{label}` has dtype {array_spec(parameter).dtype.name}; pass a floating-point array."
            )
    if residual is not None and array_spec(residual) != x:
        raise ShapeError(
            f"{name}: `residual` is {array_spec(residual)}, but `x` is {x}; pass `residual` of the same shape and dtype as `x`."
        )
    if features == 0:
        raise ShapeError(
            f"{name}: `x` has shape {x.shape} with no features in its last axis; pass at least one feature."
        )
    flat = dataclasses.replace(x, shape=(1, rows, features))

    def parameter_spec(p: Any) -> Any:
        return None if p is None else dataclasses.replace(array_spec(p), shape=(1, features))

    return NormSpec(
        Operands(flat, None if residual is None else flat, parameter_spec(scale), parameter_spec(offset)),
        kind,
        float(eps),
    )
