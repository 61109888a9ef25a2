"""The public softmaxes: `softmax` and `log_softmax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.ops.softmax.cpu import NATIVE
from vishwamai.ops.softmax.gpu import TRITON
from vishwamai.ops.softmax.reference import XLA
from vishwamai.ops.softmax.spec import SIGNATURE, Operands, SoftmaxSpec, check_axis, describe
from vishwamai.ops.softmax.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

SOFTMAX: Op[SoftmaxSpec] = Op("softmax", (PALLAS_TPU, TRITON, NATIVE, XLA), split="groups rows")


@checked
def softmax(
    x: Float[Array, "*axes"], *, axis: int = -1, config: object = None, implementation: str | None = None
) -> Float[Array, "*axes"]:
    """Softmax along one axis, in one pass over memory: `exp(x - max(x)) / sum(exp(x - max(x)))`.

    Its gradient is `y * (dy - sum(y * dy))`, and keeps the result alone. A slice that is -inf throughout gives NaN, as
    in `jax.nn.softmax`.

    Args:
      x: bfloat16, float16, float32 or float64. The arithmetic is float32 (float64 for float64), rounded once.
      axis: the axis that is summed over.
      config: tiles (a `SoftmaxConfig`), a block size in rows, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      Of the shape and dtype of `x`.

    Raises:
      ShapeError: an argument is not legal.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> print(softmax(jnp.log(jnp.array([1.0, 2.0, 5.0]))).tolist())
    [0.125, 0.250, 0.625]
    """
    return _softmax("softmax", x, axis, False, config, implementation)


@checked
def log_softmax(
    x: Float[Array, "*axes"], *, axis: int = -1, config: object = None, implementation: str | None = None
) -> Float[Array, "*axes"]:
    """Logarithm of the softmax along one axis, in one pass over memory: `x - max(x) - log(sum(exp(x - max(x))))`.

    Its gradient is `dy - softmax(x) * sum(dy)`, from `x`. Args, returns and errors are those of `softmax`.

    >>> import jax.numpy as jnp
    >>> print(log_softmax(jnp.zeros(4)).tolist())
    [-1.386, -1.386, -1.386, -1.386]
    """
    return _softmax("log_softmax", x, axis, True, config, implementation)


def _softmax(name: str, x: AnyArray, axis: int, log: bool, config: object, implementation: str | None) -> AnyArray:
    x = as_array(name, "x", x)
    axis = check_axis(name, x.shape, axis)
    arrays = Operands(jnp.moveaxis(x, axis, -1))
    spec = describe(array_specs(arrays), log, axis != x.ndim - 1)
    outputs = public_call(SOFTMAX, SIGNATURE, spec, arrays, config=config, implementation=implementation)
    return jnp.moveaxis(outputs.y, -1, axis)
