"""The static side of an operand: its shape and dtype, read from anything that has both (JAX, NumPy or torch)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype

Self = TypeVar("Self", bound="OpSpec")


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one operand."""

    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the array takes, unpadded."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}".replace(" ", "")


def array_spec(x: Any) -> ArraySpec:
    """The `ArraySpec` of an array."""
    dtype = x.dtype if not type(x).__module__.startswith("torch") else str(x.dtype).removeprefix("torch.")
    return ArraySpec(tuple(x.shape), jnp.dtype(dtype))


def as_array(function: str, name: str, x: Any) -> jax.Array:
    """`x` as an array of JAX; `function` and `name` are the public function and its argument, for the error.

    Raises:
      ShapeError: it cannot be one; or it is a torch tensor, whose gradient would be lost.

    >>> as_array("gemm", "a", [[1.0, 2.0]]).shape
    (1, 2)
    >>> as_array("gemm", "b", None)
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: gemm: `b` is None; pass an array of JAX or NumPy.
    """
    if isinstance(x, jax.Array):
        return x
    if type(x).__module__.partition(".")[0] == "torch":
        raise ShapeError(
            f"{function}: `{name}` is a torch tensor; call `vishwamai.torch.{function}`, or pass an array of JAX (`jax.numpy.from_dlpack`)."
        )
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        what = "None" if x is None else f"of type {type(x).__name__}, which cannot be read as numbers"
        raise ShapeError(f"{function}: `{name}` is {what}; pass an array of JAX or NumPy.") from error


def as_dtype(function: str, name: str, dtype: Any) -> jnp.dtype:
    """`dtype` as a dtype of JAX; `function` and `name` are the public function and its argument, for the error.

    Raises:
      ShapeError: there is no such dtype.

    >>> as_dtype("gemm", "out_dtype", "bfloat16").itemsize
    2
    """
    try:
        return jnp.dtype(dtype)
    except TypeError as error:
        raise ShapeError(f"{function}: `{name}` is {dtype!r}; pass a dtype, such as jnp.float32.") from error


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """Base of every op's spec: what its operands look like (a named tuple of `ArraySpec`, None for an absent one), then the op's options."""

    operands: Any

    def localize(self: Self, operands: Any) -> Self:
        """The same computation for operands of other sizes (a shard, or a folded vmap axis)."""
        return dataclasses.replace(
            self, operands=type(self.operands)(*(None if x is None else array_spec(x) for x in operands))
        )

    def __str__(self) -> str:
        arrays = [
            f"{name}={value}"
            for name, value in zip(self.operands._fields, self.operands, strict=True)
            if value is not None
        ]
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.name != "operands"]
        return ", ".join([*arrays, *(f"{name}={value}" for name, value, default in fields if value != default)])


@dataclasses.dataclass(frozen=True)
class RowSpec(OpSpec):
    """Base of the ops that work row by row on an operand `x` of shape [groups, rows, features]."""

    @property
    def groups(self) -> int:
        return self.operands.x.shape[0]

    @property
    def rows(self) -> int:
        return self.operands.x.shape[1]

    @property
    def features(self) -> int:
        return self.operands.x.shape[2]

    @property
    def accumulator(self) -> jnp.dtype:
        """What the row's sums are held in: float32, or float64 for float64 inputs."""
        return accumulator_dtype(self.operands.x.dtype)
