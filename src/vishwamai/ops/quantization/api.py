"""The public functions: `quantize`, `dequantize`, `fake_quantize`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import FORMATS, QTensor, format_name
from vishwamai.core.quantized.code_tensor import CodeFormat, CodeTensor
from vishwamai.core.spec import as_jax_dtype
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.quantization.codes import encoded
from vishwamai.ops.quantization.rounding import magnitude, rounded

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Key

_SCALES = ("absmax", "percentile")
_ROUNDINGS = ("nearest", "stochastic")


@overload
def quantize(
    x: Float[Array, ...],
    format: str = "int8",
    *,
    axis: int | None = -1,
    block_size: int | None = None,
    scale: str = "absmax",
    percentile: float = 99.9,
    rounding: str = "nearest",
    key: Key[Array, ""] | None = None,
) -> QTensor: ...


@overload
def quantize(x: Float[Array, ...], format: CodeFormat, *, axis: int | None = -1) -> CodeTensor: ...


@checked
def quantize(
    x: Float[Array, ...],
    format: str | CodeFormat = "int8",
    *,
    axis: int | None = -1,
    block_size: int | None = None,
    scale: str = "absmax",
    percentile: float = 99.9,
    rounding: str = "nearest",
    key: Key[Array, ""] | None = None,
) -> QTensor | CodeTensor:
    """Rounds an array to few bits: `values = round(x / scales)`, with one scale for all numbers that lie along `axis`,
    or for each block of them.

    A product contracts the axis along which scales are shared: the last one of activations `[..., M, K]`, axis -2 of
    weights `[K, N]`. The named formats are symmetric (no zero point). XLA fuses the whole of it into one or two
    passes, so there is no kernel.

    Args:
      x: any floating array; computed in float32 (float64 for float64).
      format: "int8", "int4", "fp8_e4m3" (or "fp8"), "fp8_e5m2", "fp4_e2m1" (or "fp4"), "mxfp8_e4m3" (or "mxfp8"),
        "mxfp8_e5m2", "mxfp4"; or a `CodeFormat` of your own, for weights `[..., K, N]` with axis=-2, to the nearest of
        its levels.
      axis: the axis along which numbers share a scale, -1 and -2 counting from the end; None gives one scale for the
        whole array.
      block_size: how many neighbours along `axis` share a scale; the last block may be shorter. The MX formats have 32.
      scale: "absmax" (the largest number of a block becomes the largest of the format) or "percentile" (a percentile of
        the magnitudes does, and what is beyond saturates). The MX formats' scale is the power of two at or below
        absmax, as their specification has it.
      percentile: share of the magnitudes, in (0, 100].
      rounding: "nearest" (ties to even) or "stochastic" (unbiased, with `key`).
      key: a random key, for stochastic rounding.

    Returns:
      A `QTensor`; a `CodeTensor` in a `CodeFormat`. A block of zeros has scale 1. NaN or infinity makes the scale of
      its block, and so all of the block, NaN.

    Raises:
      ShapeError: an argument is not one of those above, or they contradict one another.

    >>> import jax.numpy as jnp
    >>> q = quantize(jnp.array([[1.0, -2.0, 4.0]]), "int8")
    >>> q.values.tolist(), round(float(q.scales[0, 0]), 4)
    ([[32, -64, 127]], 0.0315)
    >>> quantize(jnp.ones((64, 16)), "mxfp4", axis=-2)
    QTensor(float4_e2m1fn[64,16], uint8[2,16], format='mxfp4', axis=-2, block_size=32)
    """
    x = jnp.asarray(x)
    if isinstance(format, CodeFormat):
        return encoded(x, format, axis, {"block_size": block_size, "scale": scale, "rounding": rounding, "key": key})
    name = format_name(format)
    axis, block_size = check_quantize(x, name, axis, block_size, scale, percentile, rounding, key)
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    size = functools.partial(magnitude, method=scale, percentile=percentile)
    noise = None if key is None else lambda blocks: jax.random.uniform(key, blocks.shape, blocks.dtype)
    return QTensor(*rounded(wide, FORMATS[name], axis, block_size, size, noise), name, axis, block_size)


def check_quantize(
    x: PyTree, name: str, axis: Any, block_size: Any, scale: str, percentile: float, rounding: str, key: object
) -> tuple[int | None, int | None]:
    """(axis counted from the end, block size) of `quantize`'s arguments; raises ShapeError."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShapeError(f"quantize: `x` has dtype {x.dtype.name}; pass a floating-point array.")
    fixed = FORMATS[name].block_size
    if fixed is not None:
        if block_size not in (None, fixed):
            raise ShapeError(f"quantize: `block_size` is {block_size}, but {name} has blocks of {fixed}; leave it out.")
        if scale != "absmax":
            raise ShapeError(
                f"quantize: `scale` is {scale!r}, but {name} takes its scale from the largest number; leave it out."
            )
        block_size = fixed
    if axis is not None:
        if not -x.ndim <= axis < x.ndim:
            raise ShapeError(f"quantize: `axis` is {axis}, but `x` has shape {x.shape}; pass one of its axes, or None.")
        axis = axis - x.ndim if axis >= 0 else axis
    if block_size is not None:
        if axis is None:
            raise ShapeError(
                f"quantize: `block_size` is {block_size}, but `axis` is None; name the axis that is cut into blocks."
            )
        if not isinstance(block_size, int) or block_size < 1:
            raise ShapeError(f"quantize: `block_size` is {block_size!r}; pass a positive integer, or None.")
    if scale not in _SCALES:
        raise ShapeError(f"quantize: `scale` is {scale!r}; pass one of {', '.join(_SCALES)}.")
    if not 0 < percentile <= 100:
        raise ShapeError(f"quantize: `percentile` is {percentile}; pass a number in (0, 100].")
    if rounding not in _ROUNDINGS:
        raise ShapeError(f"quantize: `rounding` is {rounding!r}; pass one of {', '.join(_ROUNDINGS)}.")
    if (rounding == "stochastic") != (key is not None):
        raise ShapeError(
            f"quantize: `rounding` is {rounding!r} and `key` is {'absent' if key is None else 'given'}; a random key "
            "goes with stochastic rounding."
        )
    return axis, block_size


@checked
def dequantize(q: QTensor | CodeTensor, dtype: DTypeLike | None = None) -> Float[Array, ...]:
    """The array that a `QTensor` or a `CodeTensor` stands for, rounded once to `dtype` (default
    float32).

    Raises:
      ShapeError: `q` is neither.

    >>> import jax.numpy as jnp
    >>> dequantize(quantize(jnp.array([0.5, -2.0, 7.0]), "int4"), jnp.bfloat16)
    Array([0, -2, 7], dtype=bfloat16)
    """
    if not isinstance(q, (QTensor, CodeTensor)):
        raise ShapeError(f"dequantize: `q` is a {type(q).__name__}; pass what `quantize` gives.")
    return q.dequantize(None if dtype is None else as_jax_dtype("dequantize", "dtype", dtype))


@checked
def fake_quantize(x: Float[Array, ...], format: str = "int8", **options: object) -> Float[Array, ...]:
    """`dequantize(quantize(x))` in x's dtype, with a straight-through gradient: for training a network that will be
    quantized.

    The gradient passes as if nothing had been rounded (Bengio et al., "Estimating or Propagating Gradients Through
    Stochastic Neurons", 2013); beyond a percentile, where numbers saturate, it is 0.

    Args:
      x: any floating array.
      format: argument of `quantize`, like `options`.

    >>> import jax, jax.numpy as jnp
    >>> jax.grad(lambda x: (fake_quantize(x, "int4") ** 2).sum())(jnp.array([0.5, 7.0]))
    Array([ 0., 14.], dtype=float32)
    """
    x = jnp.asarray(x)
    key = options.pop("key", None)
    return _straight_through(format, tuple(sorted(options.items())), x, key)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _straight_through(format: str, options: tuple[tuple[str, Any], ...], x: AnyArray, key: Any) -> AnyArray:
    return quantize(x, format, key=key, **dict(options)).dequantize(x.dtype)


@_straight_through.defjvp
def _straight_through_jvp(format: str, options: Any, primals: PyTree, tangents: PyTree) -> tuple[AnyArray, AnyArray]:
    x, key = primals
    out = _straight_through(format, options, x, key)
    if dict(options).get("scale") != "percentile":
        return out, tangents[0]
    q = quantize(x, format, key=key, **dict(options))
    largest = QTensor(jnp.full_like(q.values, FORMATS[q.format].largest), q.scales, q.format, q.axis, q.block_size)
    return out, jnp.where(jnp.abs(x) <= largest.dequantize(), tangents[0], jnp.zeros_like(tangents[0]))
