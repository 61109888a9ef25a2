"""The public recurrences with a matrix state: `gated_delta_rule`, `linear_attention` and `state_space`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.signature import array_specs, as_arrays, public_call
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.ops.delta.chunked import XLA_CHUNKED
from vishwamai.ops.delta.cpu import NATIVE
from vishwamai.ops.delta.pooled import PooledStates, step
from vishwamai.ops.delta.reference import XLA
from vishwamai.ops.delta.spec import (
    SIGNATURE,
    DeltaSpec,
    Operands,
    check_state_space,
    describe,
    state_space_decay,
    with_channels,
)
from vishwamai.ops.delta.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

DELTA: Op[DeltaSpec] = Op("gated_delta_rule", (PALLAS_TPU, NATIVE, XLA_CHUNKED, XLA), split="batch heads")


@checked
def gated_delta_rule(
    query: Float[Array, "batch key_heads seq key_dim"],
    key: Float[Array, "batch key_heads seq key_dim"],
    value: Float[Array, "batch heads seq value_dim"],
    decay: Float[Array, "batch heads seq *key_dim"] | None = None,
    beta: Float[Array, "batch heads seq"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads key_dim value_dim"] | PooledStates | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    return_state: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """The gated delta rule: a state S of one matrix for each head, which a token decays, corrects and reads.

    With g = exp(decay): `S = g S + beta key (value - (g S)^T key)^T`, `y = scale S^T query`. Yang, Kautz, Hatamizadeh,
    "Gated Delta Networks" (2024); with a decay for each channel of the key, Kimi Team, "Kimi Linear" (2025). Long
    sequences are computed by chunks, as products. Decoding is a call with `seq` = 1 that passes the state on.

    Args:
      query: `[batch, key_heads, seq, key_dim]`; key_heads divides heads, and head h reads key head
        h // (heads // key_heads).
      key: `[batch, key_heads, seq, key_dim]`. Keys of length 1 and betas up to 2 keep the state bounded; nothing is
        normalized.
      value: `[batch, heads, seq, value_dim]`. One dtype for the three: bfloat16, float16, float32 or float64. States
        and sums are float32 (float64 for float64).
      decay: natural logarithm of the factor of the state, at most 0: `[batch, heads, seq]`, or `[batch, heads, seq,
        key_dim]` for one of each channel; None for 0.
      beta: `[batch, heads, seq]`, how much of the correction a token writes; None for 1.
      scale: factor of the query; None for key_dim ** -0.5.
      initial_state: `[batch, heads, key_dim, value_dim]`; None for zeros. Or `vishwamai.ops.delta.PooledStates`, the
        slots of a pool for several sequences in one row; the call then returns the pair (y, pool).
      segment_ids: integers `[batch, seq]` of packed sequences. The state begins anew at each run of equal ids;
        `initial_state` belongs to the first run.
      return_state: returns the state after the last token too.
      config: a `ChunkedConfig`, the tokens of a chunk, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `y`, of the shape and dtype of `value`; with `return_state` the pair (y, state), the state in float32 (float64 for
      float64).

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> key = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(1, 1, 3, 2)
    >>> value = jnp.array([5.0, 7.0, 9.0]).reshape(1, 1, 3, 1)
    >>> y, state = gated_delta_rule(key, key, value, scale=1.0, return_state=True)  # the state stores 7 and 9
    >>> y.ravel().tolist(), state.ravel().tolist()
    ([5.0, 7.0, 9.0], [9.0, 7.0])
    """
    name = "gated_delta_rule"
    arrays = Operands(value, query, key, _with_channels(name, decay), beta, None, initial_state, segment_ids)
    if isinstance(initial_state, PooledStates):
        tokens = query, key, value, decay, beta
        part = functools.partial(gated_delta_rule, scale=scale)
        return _step(name, part, arrays, tokens, scale, True, config, implementation)
    return _call(name, arrays, scale, True, return_state, config, implementation)


@checked
def linear_attention(
    query: Float[Array, "batch key_heads seq key_dim"],
    key: Float[Array, "batch key_heads seq key_dim"],
    value: Float[Array, "batch heads seq value_dim"],
    decay: Float[Array, "batch heads seq *key_dim"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads key_dim value_dim"] | PooledStates | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    return_state: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Causal linear attention with decay: `S = exp(decay) S + key value^T`, `y = scale S^T query`. Katharopoulos et
    al., "Transformers are RNNs" (2020); with one decay for each head, RetNet and Lightning Attention; with one of each
    channel, gated linear attention.

    Args, returns and errors are those of `gated_delta_rule`.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 3, 1))
    >>> linear_attention(ones, ones, ones, jnp.full((1, 1, 3), jnp.log(0.5))).ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    name = "linear_attention"
    arrays = Operands(value, query, key, _with_channels(name, decay), None, None, initial_state, segment_ids)
    if isinstance(initial_state, PooledStates):
        tokens = query, key, value, decay
        part = functools.partial(linear_attention, scale=scale)
        return _step(name, part, arrays, tokens, scale, False, config, implementation)
    return _call(name, arrays, scale, False, return_state, config, implementation)


@checked
def state_space(
    x: Float[Array, "batch heads seq head_dim"],
    dt: Float[Array, "batch heads seq"],
    A: Float[Array, " heads *state_dim"],
    B: Float[Array, "batch groups seq state_dim"],
    C: Float[Array, "batch groups seq state_dim"],
    D: Float[Array, " heads"] | None = None,
    *,
    initial_state: Float[Array, "batch heads state_dim head_dim"] | PooledStates | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    return_state: bool = False,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """The selective state space of Mamba2: `S = exp(dt A) S + dt B x^T`, `y = S^T C + D x`. Dao, Gu, "Transformers are
    SSMs" (2024). With heads of one feature and an A for each number of the state, that of Mamba: Gu, Dao (2023).

    It is the recurrence of `linear_attention` with C, B and x as query, key and value, so it runs by chunks too.

    Args:
      x: `[batch, heads, seq, head_dim]`, bfloat16, float16, float32 or float64.
      dt: steps, `[batch, heads, seq]`, after their bias and softplus.
      A: `[heads]`, negative; or `[heads, state_dim]`, one for each number of the state.
      B: `[batch, groups, seq, state_dim]` in the dtype of `x`; groups divides heads.
      C: `[batch, groups, seq, state_dim]`.
      D: `[heads]`, or None for 0.
      initial_state: `[batch, heads, state_dim, head_dim]`; None for zeros. transformers swaps the last two axes.

    The other arguments, returns and errors are those of `gated_delta_rule`.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 3, 1))
    >>> print(state_space(ones, jnp.ones((1, 1, 3)), jnp.array([-1.0]), ones, ones, jnp.array([10.0])).ravel().tolist())
    [11.000, 11.368, 11.503]
    """
    name = "state_space"
    plain = None
    if initial_state is not None and not isinstance(initial_state, PooledStates):
        plain = initial_state = as_array(name, "initial_state", initial_state)
    check_state_space(x, dt, A, B, C, D, plain, segment_ids)
    dt, A = as_array(name, "dt", dt), as_array(name, "A", A)
    wide = accumulator_dtype(dt.dtype)
    decay = state_space_decay(dt.astype(wide), A.astype(wide))
    arrays = Operands(x, C, B, decay, dt, D, initial_state, segment_ids)
    if isinstance(initial_state, PooledStates):

        def part(x: AnyArray, dt: AnyArray, B: AnyArray, C: AnyArray, **options: Any) -> Any:
            return state_space(x, dt, A, B, C, D, **options)

        return _step(name, part, arrays, (x, dt, B, C), 1.0, False, config, implementation)
    return _call(name, arrays, 1.0, False, return_state, config, implementation)


def _with_channels(function: str, decay: AnyArray) -> AnyArray:
    """`with_channels` of what may become an array."""
    return with_channels(function, None if decay is None else as_array(function, "decay", decay))


def _call(
    function: str,
    arrays: Operands,
    scale: float | None,
    correction: bool,
    return_state: bool,
    config: object,
    implementation: str | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    arrays = as_arrays(function, arrays)
    spec = describe(array_specs(arrays), function, scale, correction, return_state)
    y, state = public_call(DELTA, SIGNATURE, spec, arrays, config=config, implementation=implementation)
    return (y, state) if return_state else y


def _step(
    name: str,
    part: Callable[..., Any],
    arrays: Operands,
    tokens: tuple[AnyArray, ...],
    scale: float | None,
    correction: bool,
    config: object,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """A call with states in a pool; `part` is the public function of its operands that have tokens, `tokens`."""
    states = arrays.initial_state
    arrays = as_arrays(name, arrays._replace(initial_state=None))
    spec = describe(array_specs(arrays), name, scale, correction, True)
    plan = DELTA.plan(spec, config=config, implementation=implementation)
    part = functools.partial(part, return_state=True, config=config, implementation=implementation)
    return step(name, plan, arrays, tokens, part, states)
