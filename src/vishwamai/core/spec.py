"""The static side of an operand: its shape and dtype, read from anything that has both (JAX, NumPy or torch)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import dims
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


Self = TypeVar("Self", bound="OpSpec")


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one operand."""

    shape: tuple[int, ...]
    dtype: jnp.dtype

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype))  # kept, since a call looks its spec up in several caches

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


def array_spec(x: PyTree) -> ArraySpec:
    """The `ArraySpec` of an array."""
    return _array_spec(tuple(x.shape), x.dtype)


@functools.lru_cache(maxsize=4096)
def _array_spec(shape: tuple[int, ...], dtype: DTypeLike) -> ArraySpec:
    torch = type(dtype).__module__.startswith("torch")
    return ArraySpec(shape, jnp.dtype(str(dtype).removeprefix("torch.") if torch else dtype))


SYMBOLIC = "sizes are symbols (jax.export), and it is made for known ones."
"""The reason of every implementation but the definition."""


def is_symbolic(arrays: Iterable[PyTree]) -> bool:
    """Whether a size of one of the arrays, or of their `ArraySpec`s, is a symbol of `jax.export`."""
    return any(not _is_number(size) for x in arrays if x is not None for size in x.shape)


def _is_number(size: object) -> bool:
    return isinstance(size, (int, np.integer))


def static_size(size: Any, assumed: int) -> int:
    """A size, or `assumed` in place of a symbol of `jax.export`, for a choice that changes no result."""
    return size if _is_number(size) else assumed


def at_least_1(size: Any) -> Any:
    """`max(1, size)`; a symbol of `jax.export` is at least 1."""
    return max(1, size) if _is_number(size) else size


def as_array(function: str, name: str, x: AnyArray) -> jax.Array:
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
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise ShapeError(f"{function}: `{name}` is a random key; pass an array of numbers.")
        return x
    if type(x).__module__.partition(".")[0] == "torch":
        raise ShapeError(
            f"{function}: `{name}` is a torch tensor; call `vishwamai.torch.{function}`, or pass an array of JAX "
            "(`jax.numpy.from_dlpack`)."
        )
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        description = "None" if x is None else f"of type {type(x).__name__}, which cannot be read as numbers"
        if isinstance(error, OverflowError):
            description = f"{x!r}, which no integer of 32 bits holds"
        raise ShapeError(f"{function}: `{name}` is {description}; pass an array of JAX or NumPy.") from error


def as_dtype(function: str, name: str, dtype: DTypeLike) -> jnp.dtype:
    """`dtype` as a dtype of JAX; `function` and `name` are the public function and its argument, for the error.

    Raises:
      ShapeError: there is no such dtype.

    >>> as_dtype("gemm", "out_dtype", "bfloat16").itemsize
    2
    """
    try:
        parsed = None if isinstance(dtype, (jax.Array, np.ndarray)) else jnp.dtype(dtype)
    except (TypeError, ValueError):
        parsed = None
    if dtype is None or parsed is None or not (jnp.issubdtype(parsed, jnp.number) or parsed == jnp.bool_):
        raise ShapeError(f"{function}: `{name}` is {dtype!r}; pass a dtype, such as jnp.float32.")
    return parsed


def as_jax_dtype(function: str, name: str, dtype: DTypeLike) -> jnp.dtype:
    """`as_dtype` of what JAX's arrays can have as it is set up.

    Raises:
      ShapeError: there is no such dtype; or it has 64 bits, and JAX's 64-bit types are off.
    """
    parsed = as_dtype(function, name, dtype)
    if jax.dtypes.canonicalize_dtype(parsed) != parsed:
        raise ShapeError(
            f"{function}: `{name}` is {parsed.name}, but JAX's 64-bit types are off; turn them on by "
            f'jax.config.update("jax_enable_x64", True), or pass {jax.dtypes.canonicalize_dtype(parsed).name}.'
        )
    return parsed


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """Base of every op's spec: what its operands look like (a named tuple of `ArraySpec`, None for an absent one), then
    the op's options.
    """

    operands: Any = dataclasses.field(repr=False)

    def localize(self: Self, operands: PyTree) -> Self:
        """The same computation for operands of other sizes (a shard, or a folded vmap axis)."""
        return dataclasses.replace(
            self, operands=type(self.operands)(*(None if x is None else array_spec(x) for x in operands))
        )

    def dims(self, kind: object) -> Any:
        """The dims of every field of a named-tuple type of the op, as texts of `core.dims`; an option that changes a
        layout overrides it.
        """
        return dims.declared(kind)

    def __str__(self) -> str:
        arrays = [
            f"{name}={value}"
            for name, value in zip(self.operands._fields, self.operands, strict=True)
            if value is not None
        ]
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.repr]
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


@dataclasses.dataclass(frozen=True)
class QueryKeySpec(OpSpec):
    """Base of the ops that score a query of shape [batch, q_heads, q_len, qk_dim] against a key of shape [batch,
    kv_heads, kv_len, qk_dim].
    """

    @property
    def batch(self) -> int:
        return self.operands.query.shape[0]

    @property
    def q_heads(self) -> int:
        return self.operands.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.operands.key.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one kv head; a key without heads counts as one."""
        return self.q_heads // at_least_1(self.kv_heads)

    @property
    def q_len(self) -> int:
        return self.operands.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.operands.key.shape[2]

    @property
    def qk_dim(self) -> int:
        return self.operands.query.shape[3]

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of logits, statistics and sums: float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.query.dtype)
