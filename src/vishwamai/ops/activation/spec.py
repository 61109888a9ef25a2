"""What an activation computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import ArraySpec, OpSpec
from vishwamai.core.types import AnyArray

_MOST_AXES = 16


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes. Nothing is flattened, so any axis may be split
    over devices.

    The dropout's rows and columns are operands, so that a shard knows where in the whole array it stands.
    """

    x: Annotated[AnyArray, "groups *rows features"]
    rows: Annotated[
        Any, "groups? *rows", "optional"
    ]  # uint32, the number of each row of features; None without dropout
    columns: Annotated[AnyArray, "groups? features", "optional"]  # uint32
    seed: Annotated[AnyArray, "groups? _", "optional"]  # uint32, two numbers


class Outputs(NamedTuple):
    """`y` is the activation, dropped and scaled."""

    y: Annotated[AnyArray, "groups *rows features"]


@dataclasses.dataclass(frozen=True)
class ActivationSpec(OpSpec):
    """`y = keep * activation(x) / (1 - rate)`.

    Attributes:
      activation: "gelu" (exact), "gelu_tanh", "silu" or "relu2".
      rate: share of the elements to drop; 0 without a seed.
    """

    activation: str = "gelu"
    rate: float = 0.0

    @property
    def accumulator(self) -> jnp.dtype:
        """float32, or float64 for float64 inputs."""
        return accumulator_dtype(self.operands.x.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass, about 10 an element."""
        return 10 * self.operands.x.size

    @property
    def bytes_moved(self) -> int:
        """Bytes that one pass over HBM must move in the forward pass: nothing is stored of the mask."""
        return 2 * self.operands.x.nbytes


SIGNATURE = Signature(Operands("*rows features", "*rows", "features", "groups? _"), Outputs("*rows features"))


@described
def describe(operands: Operands, activation: str, rate: float) -> ActivationSpec:
    """The spec of the caller's arrays, which have one axis at least."""
    check("fused_gelu_dropout", operands.x)
    return ActivationSpec(SIGNATURE.specs(operands), activation, 0.0 if operands.seed is None else rate)


def check(name: str, x: ArraySpec) -> None:
    """Raises ShapeError for an `x` that has no activation."""
    check_float(name, "x", x.dtype)
    if len(x.shape) > _MOST_AXES:
        raise ShapeError(f"{name}: `x` has {len(x.shape)} axes; reshape it to {_MOST_AXES} or fewer.")


def check_dropout(name: str, rate: object, key: AnyArray, deterministic: bool) -> None:
    """Raises ShapeError for a rate or a key that means nothing."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ShapeError(f"{name}: `rate` is {rate!r}; pass a number from 0 up to, but not including, 1.")
    if rate and key is None and not deterministic:
        raise ShapeError(
            f"{name}: `rate` is {rate}, but `key` is None; pass a key, such as jax.random.key(0), or "
            "deterministic=True."
        )
    if key is None:
        return
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    if not typed and not (key.dtype == jnp.uint32 and key.ndim == 1):
        raise ShapeError(
            f"{name}: `key` has shape {tuple(key.shape)} and dtype {key.dtype}; pass one key: jax.random.key(0), or "
            "the uint32 data of one."
        )
