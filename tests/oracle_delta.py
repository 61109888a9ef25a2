"""The recurrences from their equations, one token after another, in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from oracle import sigmoid


def _softplus(x: Any) -> Any:
    return jnp.where(x > 0, x, 0.0) + jnp.log(1 + jnp.exp(jnp.where(x > 0, -x, x)))


def decaying_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any = None,
    logit: Any = None,
    *,
    decay_scale: float = 1.0,
    linear: bool = False,
    config: Any = None,
    **how: Any,
) -> Any:
    decay = None if log_decay is None else -decay_scale * _softplus(log_decay)
    beta = None if logit is None or linear else sigmoid(logit)
    return _recurrence(query, key, value, decay, beta, correction=not linear, **how)


def gated_delta_rule(query: Any, key: Any, value: Any, decay: Any = None, beta: Any = None, **how: Any) -> Any:
    return _recurrence(query, key, value, decay, beta, correction=True, **how)


def positive_state_space(
    x: Any,
    step: Any,
    rate: Any,
    B: Any,
    C: Any,
    D: Any = None,
    *,
    config: Any = None,
    return_state: bool = False,
    **how: Any,
) -> Any:
    dt = _softplus(step)
    decay = -dt * jnp.exp(rate)[:, None] if rate.ndim == 1 else -dt[..., None] * jnp.exp(rate)[:, None]
    y, state = _recurrence(C, B, x, decay, dt, correction=False, scale=1.0, return_state=True, **how)
    y = y if D is None else y + x * D[:, None, None]
    return (y, state) if return_state else y


def _recurrence(
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    beta: Any,
    *,
    correction: bool,
    scale: float | None = None,
    initial_state: Any = None,
    segment_ids: Any = None,
    return_state: bool = False,
) -> Any:
    batch, heads, seq, value_dim = value.shape
    key_dim = key.shape[-1]
    query, key = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (query, key))
    scale = key_dim**-0.5 if scale is None else scale
    factor = jnp.ones((batch, heads, seq, 1)) if decay is None else jnp.exp(decay)
    factor = factor[..., None] if factor.ndim == 3 else factor
    beta = jnp.ones((batch, heads, seq)) if beta is None else beta
    state = jnp.zeros((batch, heads, key_dim, value_dim)) if initial_state is None else initial_state
    begins = jnp.zeros((batch, seq), bool)
    if segment_ids is not None and seq:
        begins = begins.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])

    def step(state: Any, t: Any) -> Any:
        state = jnp.where(begins[:, t, None, None, None], 0.0, factor[:, :, t, :, None] * state)
        target = value[:, :, t]
        if correction:
            target = target - jnp.einsum("bhkv,bhk->bhv", state, key[:, :, t])
        state = state + jnp.einsum("bhk,bhv->bhkv", key[:, :, t], beta[:, :, t, None] * target)
        return state, scale * jnp.einsum("bhkv,bhk->bhv", state, query[:, :, t])

    if not seq:
        y = jnp.zeros_like(value)
    else:
        state, rows = lax.scan(step, state, jnp.arange(seq))
        y = jnp.moveaxis(rows, 0, 2)
    return (y, state) if return_state else y
