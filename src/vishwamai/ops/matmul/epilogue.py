"""What follows the sum, and what its gradient needs: scales, bias, the activations and their derivatives.

Written with `jax.numpy` on whole arrays, so the reference, the TPU kernel's last step and every backward pass share one formula.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_CUBIC = 0.044715  # of the tanh approximation; Hendrycks, Gimpel, "Gaussian Error Linear Units" (2016)


def activate(activation: str | None, z: jax.Array) -> jax.Array:
    """activation(z), in z's dtype."""
    if activation is None:
        return z
    if activation == "relu":
        return jnp.maximum(z, 0)
    if activation == "relu2":
        return jnp.square(jnp.maximum(z, 0))
    if activation == "silu":
        return z * lax.logistic(z)
    if activation == "gelu":
        return 0.5 * z * (1.0 + lax.erf(z * _SQRT_HALF))
    if activation == "gelu_tanh":
        return 0.5 * z * (1.0 + jnp.tanh(_SQRT_2_OVER_PI * (z + _CUBIC * z * z * z)))
    if activation == "sigmoid":
        return lax.logistic(z)
    assert activation == "tanh", activation
    return jnp.tanh(z)


def derivative(activation: str, z: jax.Array) -> jax.Array:
    """d activation(z) / dz, in z's dtype; relu's and relu2's is 0 at 0."""
    if activation == "relu":
        return (z > 0).astype(z.dtype)
    if activation == "relu2":
        return 2.0 * jnp.maximum(z, 0)
    if activation == "silu":
        s = lax.logistic(z)
        return s * (1.0 + z * (1.0 - s))
    if activation == "gelu":
        return 0.5 * (1.0 + lax.erf(z * _SQRT_HALF)) + z * _INV_SQRT_2PI * jnp.exp(-0.5 * z * z)
    if activation == "gelu_tanh":
        t = jnp.tanh(_SQRT_2_OVER_PI * (z + _CUBIC * z * z * z))
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * z * z)
    if activation == "sigmoid":
        s = lax.logistic(z)
        return s * (1.0 - s)
    assert activation == "tanh", activation
    t = jnp.tanh(z)
    return 1.0 - t * t


def rows(scale: Any, dtype: Any) -> Any:
    """`scale_a`, `[G, M or 1]`, so that it multiplies `[G, M, N]`."""
    return scale[:, :, None].astype(dtype)


def columns(vector: Any, dtype: Any) -> Any:
    """`bias` or `scale_b`, `[G, N or 1]`, so that it meets `[G, M, N]`."""
    return vector[:, None, :].astype(dtype)
