"""The public activations: `gelu`, `silu`, `relu2` and `fused_gelu_dropout`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.core import dropout
from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import array_spec, as_array
from vishwamai.core.types import AnyArray
from vishwamai.ops.activation.cpu import NATIVE
from vishwamai.ops.activation.gpu import TRITON
from vishwamai.ops.activation.reference import XLA
from vishwamai.ops.activation.spec import SIGNATURE, ActivationSpec, Operands, check, check_dropout, describe

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Key

ACTIVATION: Op[ActivationSpec] = Op("activation", (TRITON, NATIVE, XLA), split="groups rows features")


@checked
def gelu(
    x: Float[Array, "*axes"], *, approximate: bool = False, config: object = None, implementation: str | None = None
) -> Float[Array, "*axes"]:
    """Gaussian error linear unit: `x Phi(x)`, or its approximation by tanh. Hendrycks, Gimpel (2016).

    Args:
      x: bfloat16, float16, float32 or float64, of any shape. The arithmetic is float32 (float64 for float64), rounded
        once.
      approximate: `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`. `jax.nn.gelu` takes this one unless told
        otherwise, torch the exact one.
      config: None; there is nothing to configure.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      Of the shape and dtype of `x`.

    Raises:
      ShapeError: `x` has no activation.
      UnsupportedError: the implementation asked for does not exist.

    >>> import jax.numpy as jnp
    >>> print(gelu(jnp.array([-1.0, 0.0, 1.0])).tolist())
    [-0.159, 0.000, 0.841]
    """
    return _activation("gelu", "gelu_tanh" if approximate else "gelu", x, config, implementation)


@checked
def silu(
    x: Float[Array, "*axes"], *, config: object = None, implementation: str | None = None
) -> Float[Array, "*axes"]:
    """Sigmoid linear unit (swish): `x sigmoid(x)`. Elfwing, Uchibe, Doya (2017).

    Args, returns and errors are those of `gelu`.

    >>> import jax.numpy as jnp
    >>> print(silu(jnp.array([-1.0, 0.0, 1.0])).tolist())
    [-0.269, 0.000, 0.731]
    """
    return _activation("silu", "silu", x, config, implementation)


@checked
def relu2(
    x: Float[Array, "*axes"], *, config: object = None, implementation: str | None = None
) -> Float[Array, "*axes"]:
    """Squared rectifier: `max(x, 0)^2`. So et al., "Primer" (2021).

    Args, returns and errors are those of `gelu`.

    >>> import jax.numpy as jnp
    >>> print(relu2(jnp.array([-1.0, 0.0, 3.0])).tolist())
    [0.000, 0.000, 9.000]
    """
    return _activation("relu2", "relu2", x, config, implementation)


@checked
def fused_gelu_dropout(
    x: Float[Array, "*axes"],
    rate: float = 0.1,
    *,
    key: Key[Array, ""] | None = None,
    approximate: bool = False,
    deterministic: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*axes"]:
    """GELU and dropout in one pass: `keep * gelu(x) / (1 - rate)`, whose mask is computed again in the backward pass,
    never stored.

    `keep` is a pure function of the key, the number of the row (counted over all axes but the last) and the column: the
    same key drops the same elements on every platform, and on any number of devices. Srivastava et al., "Dropout"
    (2014).

    Args:
      x: argument of `gelu`.
      rate: share of the elements to drop, in [0, 1).
      key: a random key. Rows count from 0 in the array given: inside your own `shard_map`, fold the shard's index into
        the key.
      approximate: argument of `gelu`.
      deterministic: drop nothing (at inference); no key is needed.
      config: None; there is nothing to configure.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      Of the shape and dtype of `x`.

    Raises:
      ShapeError: an argument is not legal, or a key is missing.
      UnsupportedError: the implementation asked for does not exist.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((64, 64))
    >>> y = fused_gelu_dropout(x, 0.25, key=jax.random.key(0))
    >>> print(f"{(y == 0).mean():.2f} {y.max():.3f} {fused_gelu_dropout(x, deterministic=True).max():.3f}")
    0.25 1.122 0.841
    """
    key = None if key is None else jnp.asarray(key)
    check_dropout("fused_gelu_dropout", rate, key, deterministic)
    activation = "gelu_tanh" if approximate else "gelu"
    dropping = None if deterministic or not rate else key
    return _activation("fused_gelu_dropout", activation, x, config, implementation, float(rate), dropping)


def _activation(
    name: str,
    activation: str,
    x: AnyArray,
    config: object,
    implementation: str | None,
    rate: float = 0.0,
    key: AnyArray = None,
) -> AnyArray:
    x = as_array(name, "x", x)
    check(name, array_spec(x))
    if not x.ndim:
        return _activation(name, activation, x[None], config, implementation, rate, key)[0]
    arrays = Operands(x, None, None, None)
    if key is not None:
        rows = jnp.arange(math.prod(x.shape[:-1]), dtype=jnp.uint32).reshape(x.shape[:-1])
        columns = jnp.arange(x.shape[-1], dtype=jnp.uint32)
        arrays = Operands(x, rows, columns, dropout.seeds(key, 1, 1)[0])
    spec = describe(array_specs(arrays), activation, rate)
    return public_call(ACTIVATION, SIGNATURE, spec, arrays, config=config, implementation=implementation).y
