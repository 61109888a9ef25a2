"""The public causal convolution: `causal_conv1d`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vishwamai.core.arguments import checked
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, as_arrays, public_call
from vishwamai.ops.conv.reference import XLA
from vishwamai.ops.conv.spec import SIGNATURE, ConvSpec, Operands, describe

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

CONV: Op[ConvSpec] = Op("causal_conv1d", (XLA,), split="batch channels")


@checked
def causal_conv1d(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None = None,
    *,
    activation: str | None = None,
    initial_state: Float[Array, "batch width-1 channels"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal convolution of every channel with a short filter of its own, as layers with a state have it before their
    recurrence.

    `y[t] = activation(bias + sum over j of weight[j] x[t - width + 1 + j])`, where tokens before the first are those of
    `initial_state`, or zero. Decoding is a call with `seq` = 1 that passes the state on.

    Args:
      x: `[batch, seq, channels]`, bfloat16, float16, float32 or float64. Sums are float32 (float64 for float64).
      weight: `[channels, width]`; the last factor is the current token's, as in torch's `Conv1d` with one group for
        each channel.
      bias: `[channels]`, or None for 0.
      activation: "silu", "relu", "relu2", "gelu", "gelu_tanh", "sigmoid", "tanh", or None.
      initial_state: `[batch, width - 1, channels]`, the tokens before the first one; None for zeros.
      segment_ids: integers `[batch, seq]` of packed sequences. A token sees those of its own run of equal ids alone;
        `initial_state` belongs to the first run.
      return_state: returns the last `width - 1` tokens too, zero where they belong to another run than the last.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `y`, of the shape and dtype of `x`; with `return_state` the pair (y, state), the state in the dtype of `x`.

    Raises:
      ShapeError: an argument is not legal or does not fit `x`.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> x, weight = jnp.arange(4.0).reshape(1, 4, 1), jnp.array([[10.0, 1.0]])
    >>> causal_conv1d(x, weight).ravel().tolist()
    [0.0, 1.0, 12.0, 23.0]
    >>> y, state = causal_conv1d(x[:, :3], weight, return_state=True)
    >>> causal_conv1d(x[:, 3:], weight, initial_state=state).ravel().tolist()
    [23.0]
    """
    arrays = as_arrays("causal_conv1d", Operands(x, weight, bias, initial_state, segment_ids))
    spec = describe(array_specs(arrays), activation, return_state)
    y, state = public_call(CONV, SIGNATURE, spec, arrays, implementation=implementation)
    return (y, state) if return_state else y
