"""The public normalizations: `layer_norm` and `rms_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.signature import array_specs, as_arrays, public_call
from vishwamai.core.spec import as_array
from vishwamai.core.types import PyTree
from vishwamai.ops.norm.cpu import NATIVE
from vishwamai.ops.norm.gpu import TRITON
from vishwamai.ops.norm.reference import XLA
from vishwamai.ops.norm.spec import SIGNATURE, Kind, NormSpec, Operands, check_offset, describe
from vishwamai.ops.norm.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

NORM: Op[NormSpec] = Op("norm", (PALLAS_TPU, TRITON, NATIVE, XLA), split="groups rows")


@overload
def layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    residual: None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*rows features"]: ...


@overload
def layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    residual: Float[Array, "*rows features"],
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows features"], Float[Array, "*rows features"]]: ...


@checked
def layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    residual: Float[Array, "*rows features"] | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Layer normalization over the last axis, optionally of `x + residual`, in one pass over memory.

    `y = (s - mean(s)) / sqrt(var(s) + eps) * scale + offset` with `s = x + residual`. Ba, Kiros, Hinton, "Layer
    Normalization" (2016).

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64. Statistics are float32 (float64 for float64).
      scale: `[features]`, or None for 1.
      offset: `[features]`, or None for 0.
      eps: added to the variance. On TPUs and GPUs, 0 is right where values are not below 1e-15, and any eps where they
        are not above 1e17; elsewhere the squares may leave the range of float32.
      residual: like `x`; added before normalizing. The sum is returned too, for the next residual connection.
      config: tiles (a `NormConfig`), a block size in rows, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `y`, of the shape and dtype of `x`; with `residual`, the pair `(y, x + residual)`.

    Raises:
      ShapeError: an argument does not fit `x`.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> print(layer_norm(jnp.array([[1.0, 2.0, 3.0, 6.0]])).tolist())
    [[-1.069, -0.535, 0.000, 1.604]]
    """
    return _norm("layer", Operands(x, residual, scale, offset), eps, config, implementation)


@overload
def rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    residual: None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*rows features"]: ...


@overload
def rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Float[Array, "*rows features"],
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows features"], Float[Array, "*rows features"]]: ...


@checked
def rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Float[Array, "*rows features"] | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Root-mean-square normalization over the last axis, optionally of `x + residual`, in one pass over memory.

    `y = s / sqrt(mean(s^2) + eps) * scale + offset` with `s = x + residual`. Zhang, Sennrich, "Root Mean Square Layer
    Normalization" (2019).

    Args, returns and errors are those of `layer_norm`, and:
      scale_offset: added to `scale` in float32, whatever its dtype: 1.0 for Gemma, whose weights are stored less 1.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([[3.0, 4.0]]), eps=0.0).tolist())
    [[0.849, 1.131]]
    >>> print(rms_norm(jnp.array([[3.0, 4.0]]), jnp.zeros(2), eps=0.0, scale_offset=1.0).tolist())
    [[0.849, 1.131]]
    """
    if scale_offset:
        check_offset(scale, scale_offset)
        scale = as_array("rms_norm", "scale", scale)
        scale = scale.astype(accumulator_dtype(scale.dtype)) + scale_offset
    return _norm("rms", Operands(x, residual, scale, offset), eps, config, implementation)


def _norm(kind: Kind, arrays: Operands, eps: float, config: object, implementation: str | None) -> PyTree:
    arrays = as_arrays(f"{kind}_norm", arrays)
    spec = describe(array_specs(arrays), kind, eps)
    y, total = public_call(NORM, SIGNATURE, spec, arrays, config=config, implementation=implementation)
    return y if total is None else (y, total)
