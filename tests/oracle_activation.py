"""Activations, dropout, softmaxes and gated linear units from their formulas, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle


def gelu(x: Any, *, approximate: bool = False) -> Any:
    return oracle.ACTIVATIONS["gelu_tanh" if approximate else "gelu"](x)


def silu(x: Any) -> Any:
    return oracle.ACTIVATIONS["silu"](x)


def relu2(x: Any) -> Any:
    return oracle.ACTIVATIONS["relu2"](x)


def fused_gelu_dropout(
    x: Any, rate: float = 0.1, *, key: Any = None, approximate: bool = False, deterministic: bool = False
) -> Any:
    y = gelu(x, approximate=approximate)
    if deterministic or not rate:
        return y
    seeds = np.asarray(jax.random.bits(key, (1, 1, 2), jnp.uint32))
    keep = oracle.keep_mask(seeds, x.size // x.shape[-1], x.shape[-1], rate).reshape(x.shape)
    return jnp.where(keep, y / (1 - rate), 0.0)


def softmax(x: Any, *, axis: int = -1) -> Any:
    e = jnp.exp(x)
    return e / e.sum(axis, keepdims=True)


def log_softmax(x: Any, *, axis: int = -1) -> Any:
    return x - jnp.log(jnp.exp(x).sum(axis, keepdims=True))


def gated(x: Any, gate: Any = None, up: Any = None, both: Any = None, activation: Any = "silu", **how: Any) -> Any:
    del how  # precision and tiles
    gate, up = (gate, up) if both is None else both
    return oracle.ACTIVATIONS[activation](jnp.einsum("...k,kn->...n", x, gate)) * jnp.einsum("...k,kn->...n", x, up)


ORACLES = {f.__name__: f for f in (gelu, silu, relu2, fused_gelu_dropout, softmax, log_softmax, gated)}
