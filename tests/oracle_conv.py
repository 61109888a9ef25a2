"""The causal convolution, token by token, in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from oracle import ACTIVATIONS


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    segment_ids: Any = None,
    return_state: bool = False,
) -> Any:
    batch, seq, channels = x.shape
    width = weight.shape[-1]
    state = jnp.zeros((batch, width - 1, channels)) if initial_state is None else initial_state
    begins = jnp.zeros((batch, seq), bool)
    if segment_ids is not None:
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, :seq]

    def step(state: Any, token: Any) -> Any:
        x, begins = token
        state = jnp.where(begins[:, None, None], 0.0, state)
        seen = jnp.concatenate([state, x[:, None]], axis=1)  # [batch, width, channels]
        z = (seen * weight.T).sum(1) + (0.0 if bias is None else bias)
        return seen[:, 1:], ACTIVATIONS[activation](z)

    state, y = lax.scan(step, state, (x.swapaxes(0, 1), begins.T))
    y = y.swapaxes(0, 1)
    return (y, state) if return_state else y
