"""What an activation computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import ArraySpec, OpSpec

_FACTORS = "abcdefhijklmnopq"
"""A name for each of the caller's axes."""


class Operands(NamedTuple):
    """Operands in the op's own layout; G counts folded vmap axes. Nothing is flattened, so any axis may be split over devices.

    The dropout's rows and columns are operands, so that a shard knows where in the whole array it stands.
    """

    x: Any  # [G, ..., F]
    rows: Any  # uint32 [G or 1, ...], the number of each row of features, or None without dropout
    columns: Any  # uint32 [G or 1, F], or None
    seed: Any  # uint32 [G or 1, 2], or None


class Outputs(NamedTuple):
    """`y` is the activation, dropped and scaled."""

    y: Any  # [G, ..., F]


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


def array_dims(rank: int) -> tuple[str, ...]:
    """Factors of the caller's array of `rank` axes."""
    return tuple(_FACTORS[:rank])


def activation_axes(spec: ActivationSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Every axis may be split."""
    names = array_dims(len(spec.operands.x.shape) - 1)
    whole = ("g", *names)
    dims = (Operands(whole, whole[:-1], ("g", names[-1]), ("g", None)), Outputs(whole))
    return name_axes(arguments, results, dims, "g" + "".join(names))


def check(name: str, x: ArraySpec) -> None:
    """Raises ShapeError for an `x` that has no activation."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ShapeError(f"{name}: `x` has dtype {x.dtype.name}; pass bfloat16, float16, float32 or float64.")
    if len(x.shape) > len(_FACTORS):
        raise ShapeError(f"{name}: `x` has {len(x.shape)} axes; reshape it to {len(_FACTORS)} or fewer.")


def check_dropout(name: str, rate: Any, key: Any, deterministic: bool) -> None:
    """Raises ShapeError for a rate or a key that means nothing."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ShapeError(f"{name}: `rate` is {rate!r}; pass a number from 0 up to, but not including, 1.")
    if rate and key is None and not deterministic:
        raise ShapeError(
            f"{name}: `rate` is {rate}, but `key` is None; pass a key, such as jax.random.key(0), or deterministic=True."
        )
    if key is None:
        return
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    if not typed and not (key.dtype == jnp.uint32 and key.ndim == 1):
        raise ShapeError(
            f"{name}: `key` has shape {tuple(key.shape)} and dtype {key.dtype}; pass one key: jax.random.key(0), or the uint32 data of one."
        )
