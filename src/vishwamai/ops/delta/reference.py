"""The gated delta rule token by token in plain jax.numpy: the definition, and the form for one to few tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.segments import segment_numbers
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.delta.spec import DeltaSpec, Operands, Outputs


def start_state(spec: DeltaSpec, operands: Operands) -> jax.Array:
    """The state before the first token, `[batch, heads, key_dim, value_dim]`."""
    if operands.initial_state is not None:
        return operands.initial_state.astype(spec.accumulator)
    return jnp.zeros((spec.batch, spec.heads, spec.key_dim, spec.value_dim), spec.accumulator)


def with_skip(spec: DeltaSpec, operands: Operands, y: jax.Array) -> jax.Array:
    """`y + skip * value`, in the dtype of sums."""
    if operands.skip is None:
        return y
    return y + operands.skip[:, :, None, None].astype(spec.accumulator) * operands.value.astype(spec.accumulator)


def forward(spec: DeltaSpec, operands: Operands) -> tuple[Outputs, None]:
    """One step of `lax.scan` for each token."""
    acc = spec.accumulator
    repeats = spec.heads // max(1, spec.key_heads)

    def by_token(x: AnyArray) -> AnyArray:
        return None if x is None else jnp.moveaxis(x.astype(acc), 2, 0)

    query, key = (jnp.repeat(by_token(x), repeats, axis=2) for x in (operands.query, operands.key))
    begins = None
    if operands.segment_ids is not None:
        numbers = segment_numbers(operands.segment_ids).T
        begins = jnp.diff(numbers, axis=0, prepend=jnp.zeros_like(numbers[:1])) > 0
    tokens = query, key, by_token(operands.value), by_token(operands.decay), by_token(operands.beta), begins

    def step(state: jax.Array, token: PyTree) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta, begins = token
        if decay is not None:
            state = state * jnp.exp(decay)[..., None]
        if begins is not None:
            state = jnp.where(begins[:, None, None, None], 0.0, state)
        if spec.correction:
            v = v - jnp.sum(k[..., None] * state, axis=-2)
        if beta is not None:
            v = v * beta[..., None]
        state = state + k[..., None] * v[..., None, :]
        return state, spec.scale * jnp.sum(q[..., None] * state, axis=-2)

    start, _ = match_varying((start_state(spec, operands), operands))
    state, y = lax.scan(step, start, tokens)
    y = with_skip(spec, operands, jnp.moveaxis(y, 0, 2)).astype(operands.value.dtype)
    return Outputs(y, state if spec.return_state else None), None


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
