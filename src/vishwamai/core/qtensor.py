"""`QTensor`: an array of few bits with the scales that bring it back, and the arithmetic that every operation on one
shares.

`x[i] ~ values[i] * scales[block of i]`. The formats are int8, int4 and floats of 8 and 4 bits with float32 scales, and
the microscaling formats of the Open Compute Project ("OCP Microscaling Formats (MX) Specification v1.0", 2023). In
those, 32 neighbours share a power of two that is stored in 8 bits (e8m0). Weights packed for a CPU have
uint4 too, with a zero point in each scale: `x[i] ~ scale * (values[i] - zero)`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NoReturn

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Num, Shaped

INT4 = jnp.dtype(jnp.int4)
UINT4 = jnp.dtype(jnp.uint4)
FP4 = jnp.dtype(jnp.float4_e2m1fn)


@dataclasses.dataclass(frozen=True)
class Format:
    """How a number is stored.

    Attributes:
      dtype: the values' dtype. largest: the largest value, symmetrically (-128 of int8 and -8 of int4 are not used).
      block_size: numbers that share a scale where the format says so (the MX formats), else None.
      power_of_two: scales are powers of two, stored as the bits of e8m0; else they are float32.
    """

    dtype: jnp.dtype
    largest: float
    block_size: int | None = None
    power_of_two: bool = False

    @property
    def scale_dtype(self) -> str:
        """Name of the dtype of scales: "uint32" for words with a zero point (`zero_words`)."""
        return "uint8" if self.power_of_two else "uint32" if self.dtype == UINT4 else "float32"


FORMATS: dict[str, Format] = {
    "int8": Format(jnp.dtype(jnp.int8), 127),
    "int4": Format(INT4, 7),
    "fp8_e4m3": Format(jnp.dtype(jnp.float8_e4m3fn), 448),
    "fp8_e5m2": Format(jnp.dtype(jnp.float8_e5m2), 57344),
    "fp4_e2m1": Format(FP4, 6),
    "mxfp8_e4m3": Format(jnp.dtype(jnp.float8_e4m3fn), 448, 32, True),
    "mxfp8_e5m2": Format(jnp.dtype(jnp.float8_e5m2), 57344, 32, True),
    "mxfp4": Format(FP4, 6, 32, True),
}
ZERO_FORMATS: dict[str, Format] = {"uint4": Format(UINT4, 15)}
"""Formats of weights with zero points, which `pack_weight` takes and `quantize` does not make."""

ZERO_STEPS = 16
"""Zero points are multiples of 1 / 16, below 16."""

_ALIASES = {
    "fp8": "fp8_e4m3",
    "fp4": "fp4_e2m1",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn": "fp4_e2m1",
    "mxfp8": "mxfp8_e4m3",
}


def format_name(name: str) -> str:
    """The format's own name for it or one of its aliases ("fp8", "mxfp8", the dtypes' names).

    Raises:
      ShapeError: there is no such format.
    """
    canonical = _ALIASES.get(name, name) if isinstance(name, str) else None
    if canonical is None or canonical not in FORMATS:
        raise ShapeError(f"quantize: `format` is {name!r}; pass one of {', '.join((*FORMATS, *_ALIASES))}.")
    return canonical


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("format", "axis", "block_size")
)
@dataclasses.dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized array: a pytree of two arrays, so it passes through jit, vmap, scan and checkpoints like any other.

    Attributes:
      values: `[..., K, ...]` in the format's dtype.
      scales: float32, or uint8 in an MX format (the bits of e8m0: the exponent of two, biased by 127, and 255 for NaN),
        or uint32 in uint4 (`zero_words`):
        `[]` if axis is None; else values' shape with `axis` of size 1, or, with a block size, of size
        `ceil(K / block_size)`.
      format: a name of `FORMATS` or `ZERO_FORMATS`.
      axis: the axis along which numbers share a scale, counted from the end (-1, -2); None if all share one. A product
        must contract this axis.
      block_size: how many neighbours along `axis` share a scale; None for all of them.

    >>> from vishwamai import quantize
    >>> weight = quantize(jnp.ones((256, 64)), "int8", axis=-2, block_size=128)
    >>> weight
    QTensor(int8[256,64], float32[2,64], format='int8', axis=-2, block_size=128)
    >>> float(weight.dequantize()[0, 0])
    1.0
    """

    values: Shaped[Array, ...]
    scales: Num[Array, ...]
    format: str
    axis: int | None
    block_size: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that is represented."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the values."""
        return jnp.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales; two 4-bit numbers take one byte, as TPUs hold them."""
        return sum((x.size * bits(x.dtype) + 7) // 8 for x in map(array_spec, (self.values, self.scales)))

    def dequantize(self, dtype: DTypeLike | None = None) -> Float[Array, ...]:
        """`values * scales`, computed in float32 (float64 scales: in float64) and rounded once to `dtype` (default:
        what it is computed in).
        """
        wide = jnp.float64 if self.scales.dtype == jnp.float64 else jnp.float32
        scales = self.scales
        if self.block_size is not None:
            assert self.axis is not None
            scales = expand(scales, self.axis, self.block_size, self.shape[self.axis])
        values = self.values.astype(wide)
        if self.format in ZERO_FORMATS:
            scales, zeros = of_zero_words(scales)
            values = values - zeros
        out = values * scale_values(scales, wide)
        return out if dtype is None else out.astype(dtype)

    def __repr__(self) -> str:
        def show(x: AnyArray) -> str:
            return str(array_spec(x) if hasattr(x, "dtype") else x)

        tail = f"format={self.format!r}, axis={self.axis}, block_size={self.block_size}"
        return f"QTensor({show(self.values)}, {show(self.scales)}, {tail})"


def bits(dtype: DTypeLike) -> int:
    """Bits of a number as memory on an accelerator holds it: 4 for int4, uint4 and float4_e2m1fn."""
    return 4 if jnp.dtype(dtype) in (INT4, UINT4, FP4) else 8 * jnp.dtype(dtype).itemsize


def scale_values(scales: jax.Array, dtype: DTypeLike) -> AnyArray:
    """Scales as floats; uint8 ones are the bits of e8m0.

    2^-127, the least, is subnormal in float32 and counts as zero where the hardware says so.
    """
    if scales.dtype != jnp.uint8:
        return scales.astype(dtype)
    code = scales.astype(jnp.int32)
    power = jax.lax.bitcast_convert_type(code << 23, jnp.float32)
    return jnp.where(code == 255, jnp.float32(jnp.nan), power).astype(dtype)


def check_symmetric(where: str, format: str) -> None:
    """Checks the format of a QTensor whose values are multiplied before they are scaled.

    Raises:
      ShapeError: it has zero points.
    """
    if format in ZERO_FORMATS:
        raise ShapeError(
            f"{where} is a QTensor in {format}, whose zero points need `pack_weight`; pack it, or pass what "
            "`dequantize` gives."
        )


def zero_words(scales: jax.Array, zeros: jax.Array) -> jax.Array:
    """uint32 words of float32 scales, whose lowest byte gives way to the zero point in sixteenths.

    Scales that came from bfloat16 or float16 keep all of their bits.

    >>> words = zero_words(jnp.float32(0.5), jnp.float32(7.25))
    >>> [float(part) for part in of_zero_words(words)]
    [0.5, 7.25]
    """
    steps = jnp.clip(jnp.round(zeros * ZERO_STEPS), 0, 255).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(scales, jnp.uint32) & jnp.uint32(0xFFFFFF00) | steps


def of_zero_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales, zeros) in float32 of `zero_words`."""
    scales = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFFFF00), jnp.float32)
    return scales, (words & jnp.uint32(0xFF)).astype(jnp.float32) / ZERO_STEPS


def expand(scales: jax.Array, axis: int, block_size: int, size: int) -> jax.Array:
    """Block scales, `ceil(size / block_size)` of them along `axis`, repeated to one for each of `size` numbers."""
    block_size = min(block_size, max(1, size))
    repeated = jnp.repeat(scales, block_size, axis=axis, total_repeat_length=scales.shape[axis] * block_size)
    return jax.lax.slice_in_dim(repeated, 0, size, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def undifferentiable(name: str, values: AnyArray, scales: jax.Array) -> PyTree:
    """(values, scales) as they are; whoever asks for their gradient gets an error that begins with `name`, such as
    "gemm: `b` is a QTensor".
    """
    del name
    return values, scales


def _no_gradient(name: str, saved: PyTree, cotangents: PyTree) -> NoReturn:
    raise UnsupportedError(
        f"{name}, and quantized values have no gradient; differentiate with respect to the other "
        "arguments only, or train the float array through `fake_quantize`, whose gradient is straight-through."
    )


undifferentiable.defvjp(lambda name, values, scales: ((values, scales), None), _no_gradient)
