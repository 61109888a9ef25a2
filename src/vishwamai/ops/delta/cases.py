"""Cases of the recurrences: small ones for the contract suite, and the layers of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.delta.api import gated_delta_rule, linear_attention, state_space


def decaying_delta_rule(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    log_decay: AnyArray = None,
    logit: AnyArray = None,
    *,
    decay_scale: float = 1.0,
    linear: bool = False,
    **how: PyTree,
) -> PyTree:
    """`gated_delta_rule`, or `linear_attention`, of decays below 0 and betas in (0, 1) that random numbers become."""
    decay = None if log_decay is None else -decay_scale * jax.nn.softplus(log_decay)
    if linear:
        return linear_attention(query, key, value, decay, **how)
    return gated_delta_rule(query, key, value, decay, None if logit is None else jax.nn.sigmoid(logit), **how)


def positive_state_space(
    x: AnyArray,
    step: jax.Array,
    rate: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    **how: Any,
) -> PyTree:
    """`state_space` of positive steps and negative rates."""
    return state_space(x, jax.nn.softplus(step), -jnp.exp(rate), B, C, D, **how)


def delta_case(
    name: str,
    shape: tuple[int, int, int],
    key_dim: int,
    value_dim: int,
    dtype: str = "float32",
    *,
    key_heads: int | None = None,
    decay: float | None = 1.0,
    channels: bool = False,
    beta: float | None = 0.0,
    state: bool = False,
    segments: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    """A case of `decaying_delta_rule`.

    Args:
      shape: (batch, heads, tokens).
      decay: scale of the log-decays; None for no decay.
      beta: standard deviation of the logits of beta in tens, so that 1 has betas near 0 and 1; None for no beta.
    """
    batch, heads, seq = shape
    narrow = batch, key_heads or heads, seq, key_dim
    wide = "float64" if dtype == "float64" else "float32"
    # Keys of a length near 1, which keep the state bounded.
    arrays = {"query": ArrayInit(narrow, dtype), "key": ArrayInit(narrow, dtype, scale=max(1, key_dim) ** -0.5)}
    arrays["value"] = ArrayInit((*shape, value_dim), dtype)
    if decay is not None:
        arrays["log_decay"] = ArrayInit((*shape, key_dim) if channels else shape, wide)
        options["decay_scale"] = decay
    if beta is not None and not options.get("linear"):
        arrays["logit"] = ArrayInit(shape, wide, scale=1.0 + 10.0 * beta)
    return _with_rest(
        name, decaying_delta_rule, arrays, (batch, heads, key_dim, value_dim), wide, state, segments, tags, options
    )


def state_space_case(
    name: str,
    shape: tuple[int, int, int],
    state_dim: int,
    head_dim: int,
    dtype: str = "float32",
    *,
    key_heads: int | None = None,
    skip: bool = True,
    channels: bool = False,
    state: bool = False,
    segments: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    """A case of `positive_state_space`; `key_heads` are its groups, and with `channels` each number of the state has a
    rate.
    """
    batch, heads, seq = shape
    wide = "float64" if dtype == "float64" else "float32"
    arrays = {
        "x": ArrayInit((*shape, head_dim), dtype),
        "step": ArrayInit(shape, wide),
        "rate": ArrayInit((heads, state_dim) if channels else (heads,), wide),
        "B": ArrayInit((batch, key_heads or heads, seq, state_dim), dtype, scale=max(1, state_dim) ** -0.5),
        "C": ArrayInit((batch, key_heads or heads, seq, state_dim), dtype),
    }
    if skip:
        arrays["D"] = ArrayInit((heads,), wide)
    dims = batch, heads, state_dim, head_dim
    return _with_rest(name, positive_state_space, arrays, dims, wide, state, segments, tags, options)


def _with_rest(
    name: str,
    call: Any,
    arrays: dict[str, ArrayInit],
    dims: tuple[int, int, int, int],
    wide: str,
    state: bool,
    segments: bool,
    tags: tuple[str, ...],
    options: dict[str, Any],
) -> Case:
    value = arrays["value" if "value" in arrays else "x"]
    if state:
        arrays["initial_state"] = ArrayInit(dims, wide)
    if segments:
        arrays["segment_ids"] = ArrayInit((dims[0], value.shape[2]), "int32", "segments")
    options = {key: option for key, option in options.items() if option is not None}
    return Case(name, "gated_delta_rule", call, arrays, options, frozenset(tags))


CASES = (
    *(delta_case(f"delta {dtype}", (2, 2, 70), 24, 40, dtype) for dtype in ("float32", "bfloat16")),
    delta_case("two heads to a key", (1, 4, 37), 16, 24, key_heads=2, state=True, return_state=True),
    delta_case("no decay, no beta", (2, 2, 33), 16, 16, decay=None, beta=None),
    delta_case("strong decay", (1, 2, 65), 16, 16, decay=200.0, beta=1.0, return_state=True),
    delta_case("segments and state", (2, 2, 130), 16, 24, state=True, segments=True, return_state=True),
    delta_case("channels", (1, 2, 63), 24, 16, channels=True, state=True, segments=True, return_state=True),
    delta_case("channels bfloat16", (2, 2, 40), 32, 32, "bfloat16", channels=True, decay=0.1),
    delta_case("channels, strong decay", (1, 1, 64), 16, 16, channels=True, decay=200.0),
    delta_case("one token", (3, 4, 1), 16, 24, "bfloat16", key_heads=2, state=True, return_state=True),
    delta_case("chunks of 16", (1, 2, 100), 16, 8, config=16, return_state=True),
    delta_case("linear", (2, 2, 70), 16, 24, linear=True, return_state=True),
    delta_case("linear, no decay", (2, 2, 20), 16, 24, decay=None, linear=True),
    delta_case("linear channels", (1, 2, 33), 16, 24, linear=True, channels=True, segments=True),
    delta_case("float16", (1, 2, 20), 16, 16, "float16"),
    delta_case("float64", (1, 2, 70), 16, 16, "float64", state=True, return_state=True),
    delta_case("no tokens", (2, 2, 0), 16, 8, state=True, return_state=True),
    state_space_case("state space", (2, 4, 70), 24, 16, key_heads=2, state=True, return_state=True),
    state_space_case("state space bfloat16", (2, 4, 37), 16, 32, "bfloat16", key_heads=1, segments=True),
    state_space_case(
        "state space, channels",
        (1, 4, 70),
        12,
        1,
        key_heads=1,
        channels=True,
        state=True,
        segments=True,
        return_state=True,
    ),
    # One sequence of 4096 tokens.
    delta_case("Qwen3-Next 80B", (1, 32, 4096), 128, 128, "bfloat16", key_heads=16, tags=("model",)),
    delta_case("Kimi Linear 48B", (1, 32, 4096), 128, 128, "bfloat16", channels=True, tags=("model",)),
    state_space_case("Mamba2 2.7B", (1, 80, 4096), 128, 64, "bfloat16", key_heads=1, tags=("model",)),
    delta_case("MiniMax M1", (1, 64, 4096), 128, 128, "bfloat16", linear=True, tags=("model",)),
    delta_case(
        "Qwen3-Next 80B, 8 sequences",
        (8, 32, 1),
        128,
        128,
        "bfloat16",
        key_heads=16,
        state=True,
        return_state=True,
        tags=("model",),
    ),
)

FACTS = Facts(
    small=Case(
        "small",
        "gated_delta_rule",
        gated_delta_rule,
        {
            "query": ArrayInit((8, 2, 12, 8)),
            "key": ArrayInit((8, 2, 12, 8), scale=0.3),
            "value": ArrayInit((8, 4, 12, 16)),
            "decay": ArrayInit((8, 4, 12), scale=0.3),
            "beta": ArrayInit((8, 4, 12), kind="positive"),
            "initial_state": ArrayInit((8, 4, 8, 16)),
            "segment_ids": ArrayInit((8, 12), "int32", "segments"),
        },
        {"return_state": True},
    ),
    batched=("query", "key", "value", "decay", "beta", "initial_state", "segment_ids"),
    poison=Poison("delta float32", "value"),
    declines={
        "pallas_tpu": {
            **dict.fromkeys((case.name for case in CASES if "channels" in case.name), "each channel has a decay"),
            "float16": "`value` is float16",
            "float64": "`value` is float64",
            "no tokens": "an axis is empty",
        },
        "native_cpu": {"no tokens": "an axis is empty"},
    },
    coarser={
        # A log-decay's gradient is a difference of sums over a chunk, and a rate's the sum of those of all tokens.
        "state space": dict.fromkeys(("xla_chunked", "pallas_tpu", "native_cpu"), 2.0**-21),
        # A state in float32, of one pass of bfloat16 products.
        "one token": {"pallas_tpu": 2.0**-8},
    },
)
