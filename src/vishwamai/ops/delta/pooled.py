"""Steps of serving: the tokens of several sequences, whose states lie in a pool of slots.

On the CPU the native kernel goes on from a sequence's slot and writes its slot, in place where the pool is donated.
Elsewhere the states are gathered, one token of each sequence passes at once, the chunks of sequences with several
follow in turn, and the states are scattered. Either way all states are read before any is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core import ffi, jax_private, observe
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.errors import ShapeError
from vishwamai.core.execute import by_platform
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray
from vishwamai.ops.delta import cpu
from vishwamai.ops.delta.spec import Operands

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_CHUNK = 64
"""Tokens of a sequence that one turn of the loop takes."""

Tokens = tuple[AnyArray, ...]
"""Operands `[1, heads, tokens, ...]`, None for one left out; those of a part have other rows and tokens."""


@dataclasses.dataclass(frozen=True)
class PooledStates:
    """States of sequences that share one row of tokens, as `initial_state` of a recurrence. The call returns
    (y, pool).

    Attributes:
      pool: `[slots, heads, key_dim, value_dim]`, changed in place where it is donated.
      slots: `[2, sequences]` int32, from which slot a sequence's state is read, outside of the pool for zeros, and to
        which it is written, outside of the pool for none. All are read before any is written; no two are written to
        one slot.
      cu_q_lens: `[sequences + 1]` int32, where each sequence's tokens start.
      one_token: flag, token i is that of sequence i, and unused sequences are the last ones.
    """

    pool: Float[Array, "slots heads key_dim value_dim"]
    slots: Int[Array, "2 sequences"]
    cu_q_lens: Int[Array, " sequences+1"]
    one_token: bool = False


def step(
    function: str,
    plan: CallPlan,
    operands: Operands,
    tokens: Tokens,
    part: Callable[..., Any],
    states: PooledStates,
) -> tuple[jax.Array, jax.Array]:
    """y, and the pool with the states after the tokens.

    Args:
      function: name of the public function, for errors.
      plan: plan of the call of all tokens, without a state.
      operands: operands without a state.
      tokens: the public function's operands that have tokens.
      part: the public function of `(*tokens, initial_state=...)`, which returns (y, state).

    Raises:
      ShapeError: the tokens are not one row, or the pool does not fit.
    """
    spec = plan.spec
    shape = spec.heads, spec.key_dim, spec.value_dim
    if spec.batch != 1 or states.pool.shape[1:] != shape or operands.segment_ids is not None:
        raise ShapeError(
            f"{function}: `initial_state` has a pool of shape {tuple(states.pool.shape)}, for {spec.batch} rows"
            f"{'' if operands.segment_ids is None else ' with `segment_ids`'}; pass one row without segment ids, and a "
            f"pool [slots, {', '.join(map(str, shape))}]."
        )
    slots, starts = states.slots.astype(jnp.int32), states.cu_q_lens.astype(jnp.int32)
    arrays = match_varying((states.pool, slots, starts, operands, tokens))

    def gathered(pool: jax.Array, slots: jax.Array, starts: jax.Array, operands: Operands, tokens: Tokens) -> Any:
        del operands
        return _gathered(part, tokens, PooledStates(pool, slots, starts, states.one_token))

    def native(pool: jax.Array, slots: jax.Array, starts: jax.Array, operands: Operands, tokens: Tokens) -> Any:
        del tokens
        return cpu.step(spec, operands, pool, slots, starts)

    serves = (
        plan.choice("cpu").implementation is cpu.NATIVE
        and states.pool.dtype == spec.accumulator
        and spec.value_dim > 1  # for the reason of `cpu.why_not_default`, however many sequences there are
        and ffi.why_not(None, cpu.STEP) is None
        and not jax_private.is_linearized(arrays)
        and not observe.dry_run()
    )
    return by_platform(gathered, {"cpu": native} if serves else {}, *arrays)


def _gathered(part: Callable[..., Any], tokens: Tokens, states: PooledStates) -> tuple[jax.Array, jax.Array]:
    pool, (read, write), starts = states.pool, states.slots, states.cu_q_lens
    counts = starts[1:] - starts[:-1]
    outside = (read < 0) | (read >= pool.shape[0])
    before = jnp.where(outside[:, None, None, None], 0, pool[read])
    # One token of each sequence at once; then, in turn, the chunks of those with several.
    first = tokens if states.one_token else _selection(tokens, starts[:-1])
    y, after = part(*_rows_of_tokens(first), initial_state=before)
    y = jnp.swapaxes(y, 0, 2)
    if not states.one_token:
        single = counts == 1
        count = tokens[0].shape[2]
        after = jnp.where(single[:, None, None, None], after.astype(before.dtype), before)
        y = _scattered(y, jnp.where(single, starts[:-1], count), count)
        y, after = _in_turn(part, tokens, y, after, starts)
    target = jnp.where((counts > 0) & (write >= 0), write, pool.shape[0])
    return y, pool.at[target].set(after.astype(pool.dtype), mode="drop")


def _in_turn(
    part: Callable[..., Any], tokens: Tokens, y: jax.Array, states: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`y` and the states after the chunks of sequences with several tokens."""
    count = tokens[0].shape[2]
    counts = starts[1:] - starts[:-1]
    size = min(_CHUNK, count)
    chunks = jnp.where(counts > 1, -(-counts // size), 0)
    last = jnp.cumsum(chunks)
    padded = tuple(None if x is None else _padded(x, size) for x in tokens)

    def turn(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, states = carry
        sequence = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        start = starts[sequence] + (i - last[sequence] + chunks[sequence]) * size
        new = jnp.arange(size, dtype=jnp.int32) < starts[sequence + 1] - start
        # Tokens whose operands are all 0 leave the state as it is.
        some = (None if x is None else jnp.where(_along(new, x), _slice(x, start, size), 0) for x in padded)
        state = jax.lax.dynamic_index_in_dim(states, sequence, keepdims=True)
        out, state = part(*some, initial_state=state)
        out = jnp.where(_along(new, out), out, _slice(y, start, size))
        y = jax.lax.dynamic_update_slice_in_dim(y, out, start, 2)
        return y, jax.lax.dynamic_update_index_in_dim(states, state.astype(states.dtype), sequence, 0)

    y, states = jax.lax.fori_loop(0, last[-1], turn, (_padded(y, size), states))
    return y[:, :, :count], states


def _along(mask: jax.Array, x: jax.Array) -> jax.Array:
    """A mask of tokens in the shape that fits `[batch, heads, tokens, ...]`."""
    return mask.reshape(-1, *[1] * (x.ndim - 3))


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, 2)


def _padded(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, size), *[(0, 0)] * (x.ndim - 3)])


def _selection(tokens: Tokens, index: jax.Array) -> Tokens:
    """Those tokens of operands `[1, heads, tokens, ...]`."""
    return tuple(None if x is None else jnp.take(x, index, axis=2, mode="clip") for x in tokens)


def _rows_of_tokens(tokens: Tokens) -> Tokens:
    """Operands with a row for each token, `[tokens, heads, 1, ...]`."""
    return tuple(None if x is None else jnp.swapaxes(x, 0, 2) for x in tokens)


def _scattered(y: Float[Array, "1 heads rows ..."], places: jax.Array, count: int) -> jax.Array:
    """`[1, heads, count, ...]` with the rows of y at places below `count`, 0 elsewhere."""
    empty = jnp.zeros((*y.shape[:2], count, *y.shape[3:]), y.dtype)
    return empty.at[:, :, places].set(y, mode="drop")
