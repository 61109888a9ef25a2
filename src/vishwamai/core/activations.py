"""The activations and their derivatives on whole arrays: one formula for the reference, the TPU kernels' last steps and every backward pass."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
"""relu2 is relu squared, gelu the exact one (erf), gelu_tanh its approximation by tanh, silu x * sigmoid(x)."""

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
