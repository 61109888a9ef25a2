"""The public normalizations: `layer_norm` and `rms_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vishwamai.core.op import Op
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import as_array
from vishwamai.ops.norm.cpu import NATIVE
from vishwamai.ops.norm.gpu import TRITON
from vishwamai.ops.norm.reference import XLA
from vishwamai.ops.norm.spec import Kind, NormSpec, Operands, make_spec, norm_axes
from vishwamai.ops.norm.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

NORM: Op[NormSpec] = Op("norm", (PALLAS_TPU, TRITON, NATIVE, XLA), norm_axes, shareable=("scale", "offset"))


def layer_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    residual: Float[Array, "*rows features"] | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Any:
    """Layer normalization over the last axis, optionally of `x + residual`, in one pass over memory.

    `y = (s - mean(s)) / sqrt(var(s) + eps) * scale + offset` with `s = x + residual`. Ba, Kiros, Hinton, "Layer Normalization" (2016).

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64. Statistics are float32 (float64 for float64).
      scale: `[features]`, or None for 1.
      offset: `[features]`, or None for 0.
      eps: added to the variance.
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
    return _norm("layer_norm", "layer", x, scale, offset, eps, residual, config, implementation)


def rms_norm(
    x: Float[Array, "*rows features"],
    scale: Float[Array, " features"] | None = None,
    offset: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-6,
    residual: Float[Array, "*rows features"] | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Any:
    """Root-mean-square normalization over the last axis, optionally of `x + residual`, in one pass over memory.

    `y = s / sqrt(mean(s^2) + eps) * scale + offset` with `s = x + residual`. Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
    Gemma's `1 + weight` is passed as `scale = 1 + weight`.

    Args, returns and errors are those of `layer_norm`.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([[3.0, 4.0]]), eps=0.0).tolist())
    [[0.849, 1.131]]
    """
    return _norm("rms_norm", "rms", x, scale, offset, eps, residual, config, implementation)


def _norm(
    name: str,
    kind: Kind,
    x: Any,
    scale: Any,
    offset: Any,
    eps: float,
    residual: Any,
    config: Any,
    implementation: str | None,
) -> Any:
    x = as_array(name, "x", x)
    residual, scale, offset = (
        None if a is None else as_array(name, label, a)
        for label, a in (("residual", residual), ("scale", scale), ("offset", offset))
    )
    make_spec(
        name, kind, x, residual, scale, offset, eps
    )  # the caller's own shapes are checked before anything is split

    def run(x: Any, residual: Any, scale: Any, offset: Any) -> Any:
        spec = make_spec(name, kind, x, residual, scale, offset, eps)

        def rows(a: Any) -> Any:
            return None if a is None else a.reshape(spec.operands.x.shape)

        def parameter(a: Any) -> Any:
            return None if a is None else a[None]

        operands = Operands(rows(x), rows(residual), parameter(scale), parameter(offset))
        outputs = NORM(spec, operands, config=config, implementation=implementation)
        y = outputs.y.reshape(x.shape)
        return y if outputs.total is None else (y, outputs.total.reshape(x.shape))

    leading = tuple(f"r{i}" for i in range(x.ndim - 1))
    dims = tuple(
        None if a is None else ((*leading, "f") if a.ndim == x.ndim else ("f",)) for a in (x, residual, scale, offset)
    )
    axes = Axes(dims, dims[0] if residual is None else (dims[0], dims[0]), frozenset(leading))
    return follow_explicit_axes(run, axes, x, residual, scale, offset)
