"""The activations and their derivatives on whole arrays: one formula for the reference, the TPU kernels' last steps and
every backward pass.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.types import PyTree

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
"""relu2 is relu squared, gelu the exact one (erf), gelu_tanh its approximation by tanh, silu x * sigmoid(x)."""

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_CUBIC = 0.044715  # of the tanh approximation; Hendrycks, Gimpel, "Gaussian Error Linear Units" (2016)


TAIL_STEP = 0.3
TAIL = (
    0.119632006,
    0.120712139,
    0.100175962,
    0.127691736,
    -0.0520339490,
    0.204556704,
    -0.156158388,
    0.0354237221,
)
"""The upper tail of the normal distribution: exp(-t^2 / 2) sum_i TAIL[i] u^(i+1) with u = 1 / (1 + TAIL_STEP t), for
t from 0 to 14.5, relative error 1.7e-7: a minimax fit (Lawson's) in the form of Abramowitz, Stegun, 7.1.26. It is the
tail itself and not one minus the rest, so that it has the relative accuracy of its exponential far out too. The kernels
for GPUs and CPUs have the same numbers.
"""


def _bound(z: jax.Array, float32: float, float64: float) -> float:
    """Where an activation has reached its limit, by the dtype."""
    return float64 if z.dtype == jnp.float64 else float32


@jax.custom_jvp
def _normal_cdf(z: jax.Array) -> jax.Array:
    """P(x < z) of a standard normal x, with relative accuracy on both sides."""
    if z.dtype == jnp.float64:
        return 0.5 * lax.erfc(z * -_SQRT_HALF)
    t = jnp.minimum(jnp.abs(z), 14.5)
    u = 1.0 / (1.0 + TAIL_STEP * t)
    p = jnp.full_like(u, TAIL[-1])
    for a in reversed(TAIL[:-1]):
        p = p * u + a
    tail = jnp.exp(-0.5 * t * t) * (p * u)
    return jnp.where(z < 0, tail, 1.0 - tail)


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    (z,), (dz,) = primals, tangents
    return _normal_cdf(z), dz * (_INV_SQRT_2PI * jnp.exp(-0.5 * z * z))


def _tanh_argument(z: jax.Array) -> jax.Array:
    """Twice the argument of gelu_tanh's tanh, whose sigmoid is half of 1 + tanh without cancellation."""
    return (2.0 * _SQRT_2_OVER_PI) * (z + _CUBIC * z * z * z)


def activate(activation: str | None, z: jax.Array) -> jax.Array:
    """activation(z), in z's dtype; at an infinite z its limit."""
    if activation is None:
        return z
    if activation == "relu":
        return jnp.maximum(z, 0)
    if activation == "relu2":
        return jnp.square(jnp.maximum(z, 0))
    if activation == "sigmoid":
        return lax.logistic(z)
    if activation == "tanh":
        return jnp.tanh(z)
    return _times_share(activation, z)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _times_share(activation: str, z: jax.Array) -> jax.Array:
    """z times a share from 0 to 1, of those activations that are so made."""
    if activation == "silu":
        return jnp.maximum(z, -_bound(z, 110.0, 760.0)) * lax.logistic(z)
    if activation == "gelu":
        return jnp.maximum(z, -_bound(z, 15.0, 40.0)) * _normal_cdf(z)
    assert activation == "gelu_tanh", activation
    return jnp.maximum(z, -_bound(z, 11.0, 22.0)) * lax.logistic(_tanh_argument(z))


@_times_share.defjvp
def _times_share_jvp(activation: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> PyTree:
    (z,), (dz,) = primals, tangents
    return _times_share(activation, z), dz * derivative(activation, z)  # JAX's own would be NaN at infinity


def derivative(activation: str, z: jax.Array) -> jax.Array:
    """d activation(z) / dz, in z's dtype; relu's and relu2's is 0 at 0."""
    if activation == "relu":
        return (z > 0).astype(z.dtype)
    if activation == "relu2":
        return 2.0 * jnp.maximum(z, 0)
    if activation in ("silu", "gelu", "gelu_tanh"):
        return with_derivative(activation, z)[1]
    if activation == "sigmoid":
        s = lax.logistic(z)
        return s * (1.0 - s)
    assert activation == "tanh", activation
    t = jnp.tanh(z)
    return 1.0 - t * t


def with_derivative(activation: str | None, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """activation(z) and its derivative; what they share is computed once."""
    if activation is None:
        return z, jnp.ones_like(z)
    if activation == "silu":
        near = _clamp(z, _bound(z, 110.0, 760.0))
        share = lax.logistic(near)
        slope = share * (1.0 + near * (1.0 - share))
    elif activation == "gelu":
        near = _clamp(z, _bound(z, 15.0, 40.0))
        share = _normal_cdf(near)
        slope = share + near * _INV_SQRT_2PI * jnp.exp(-0.5 * near * near)
    elif activation == "gelu_tanh":
        near = _clamp(z, _bound(z, 11.0, 22.0))
        share = lax.logistic(_tanh_argument(near))
        slope = share * (1.0 + near * (1.0 - share) * (2.0 * _SQRT_2_OVER_PI) * (1.0 + 3.0 * _CUBIC * near * near))
    else:
        return activate(activation, z), derivative(activation, z)
    return jnp.maximum(z, near) * share, slope


def _clamp(z: jax.Array, bound: float) -> jax.Array:
    return jnp.maximum(jnp.minimum(z, bound), -bound)
