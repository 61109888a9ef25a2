"""The gated linear unit from its formula, in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import oracle
from oracle_matmul import decode


def gated(x: Any, gate: Any = None, up: Any = None, joint: Any = None, activation: Any = "silu", **how: Any) -> Any:
    del how  # precision and tiles
    gate, up = (gate, up) if joint is None else joint
    return oracle.ACTIVATIONS[activation](jnp.einsum("...k,kn->...n", x, gate)) * jnp.einsum("...k,kn->...n", x, up)


def quantized_gated(x: Any, gate: Any, up: Any, gate_scales: Any, up_scales: Any, *, format: str, **how: Any) -> Any:
    weights = (decode(w, s, format, -2, None) for w, s in ((gate, gate_scales), (up, up_scales)))
    return gated(x, *weights, **how)
