"""Cases: named calls of public operations, shared by the contract suite, the ahead-of-time checks, the tuner and the
benchmarks.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.qtensor import FORMATS, FP4, INT4, QTensor
from vishwamai.core.types import AnyArray, PyTree


@dataclasses.dataclass(frozen=True)
class ArrayInit:
    """How one array of a case is made.

    Attributes:
      shape: its shape.
      dtype: its dtype's name.
      kind: "normal" (mean 0), "positive" (around 1, for scales), "integers" (the dtype's whole range for int8 and
        int4, small numbers for fp8), "mask" (bool, about four in five True), "segments" (sorted int32 ids along the
        last axis), "key" (raw data of a random key).
      scale: standard deviation of "normal".
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Literal["normal", "positive", "integers", "mask", "segments", "key"] = "normal"
    scale: float = 1.0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """The array's values, drawn from `rng`."""
        dtype = jnp.dtype(self.dtype)
        if self.kind == "normal":
            return (rng.standard_normal(self.shape) * self.scale).astype(dtype)
        if self.kind == "positive":
            return (1.0 + 0.2 * rng.standard_normal(self.shape)).astype(dtype)
        if self.kind == "integers":
            most = {"int8": 127, "int4": 7}.get(dtype.name, 8)
            return rng.integers(-most, most + 1, self.shape).astype(dtype)
        if self.kind == "mask":
            return rng.random(self.shape) < 0.8
        if self.kind == "segments":
            return np.sort(rng.integers(0, 3, self.shape), axis=-1).astype(np.int32)
        return np.array([rng.integers(2**32), rng.integers(2**32)], np.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call of an operation.

    Attributes:
      name: unique within the op; says what is special about it.
      op: name of the op.
      call: `call(**arrays, **options, implementation=..., config=...)` runs the public function.
      arrays: how each array argument is made. Floating ones are differentiated.
      options: the call's other arguments.
      tags: "contract" (small, every implementation runs it), "model" (a real model's shape, for benchmarks), "long".
    """

    name: str
    op: str
    call: Callable[..., Any]
    arrays: Mapping[str, ArrayInit]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: frozenset[str] = frozenset({"contract"})

    def make(self) -> dict[str, np.ndarray]:
        """The arrays' values: the same in every process."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op}/{self.name}".encode()))
        return {name: init.make(rng) for name, init in self.arrays.items()}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes, for tracing without values."""
        return {
            name: jax.ShapeDtypeStruct(init.shape, jnp.dtype(init.dtype) if init.kind != "mask" else jnp.bool_)
            for name, init in self.arrays.items()
        }

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the arrays that have gradients."""
        return tuple(
            name
            for name, init in self.arrays.items()
            if jnp.issubdtype(jnp.dtype(init.dtype), jnp.floating) and init.kind != "mask"
        )

    def run(self, arrays: Mapping[str, PyTree], **how: object) -> PyTree:
        """Calls the operation on `arrays`; `how` is `implementation=` and `config=`."""
        return self.call(**arrays, **self.options, **how)


def qtensor_of_bytes(values: AnyArray, scales: AnyArray, format: str, axis: int, block_size: int | None) -> QTensor:
    """A QTensor that is made of bytes, so that a case draws the same arrays in every format.

    Args:
      values: int8: the value of an int8 format; sixteen times the value of int4 and fp8 (rounded down); of fp4 the
        upper four bits are the code.
      scales: float32; or, in an MX format, int8: 32 times the exponent (rounded down).
    """
    form = FORMATS[format]
    values, scales = jnp.asarray(values), jax.lax.stop_gradient(jnp.asarray(scales))
    if form.dtype == FP4:
        values = jax.lax.bitcast_convert_type((values >> 4).astype(INT4), form.dtype)
    elif format != "int8":
        values = (values >> 4).astype(form.dtype)
    if form.power_of_two:
        scales = ((scales.astype(jnp.int32) >> 5) + 127).astype(jnp.uint8)
    return QTensor(values, scales, format, axis, block_size)


@dataclasses.dataclass(frozen=True)
class Poison:
    """Where the contract suite puts NaN, to see that it stays there: the last entry of an array along an axis.

    Attributes:
      case: name of the case.
      array: name of the array.
      axis: number of the array's and the output's axis: its last entry along this axis may become NaN, and no other.
    """

    case: str
    array: str
    axis: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the suites that serve every operation must know of one besides its cases: `FACTS` in its `cases.py`.

    Attributes:
      small: the call for transforms, with every kind of array that the op takes and a leading axis of 8.
      batched: the arrays of `small` whose leading axis is that batch; the others are shared.
      poison: a row that must not reach the others.
      declines: implementation -> case -> part of the reason: the contract cases that an implementation does not serve.
      coarser: case -> implementation -> relative rounding unit, where it has a reason to be coarser than its dtypes.
      unreadable: (case, chip) of the programs that libtpu compiles and jaxlib cannot read back.
    """

    small: Case
    batched: tuple[str, ...]
    poison: Poison
    declines: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    coarser: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    unreadable: frozenset[tuple[str, str]] = frozenset()
