"""What every operation means, written again from the mathematics in float64: the oracle of the contract suite.

Nothing here is shared with the library. The gradients are JAX's own differentiation of these formulas.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

Arrays = Mapping[str, Any]


def wide(x: Any) -> Any:
    """A floating array in float64, any other as it is."""
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


# --- norm ------------------------------------------------------------------------------------------------------------------------------------------


def layer_norm(x: Any, scale: Any = None, offset: Any = None, *, eps: float = 1e-6, residual: Any = None) -> Any:
    s = x if residual is None else x + residual
    mean = s.sum(-1, keepdims=True) / s.shape[-1]
    return _scaled(s, (s - mean), scale, offset, eps, residual)


def rms_norm(x: Any, scale: Any = None, offset: Any = None, *, eps: float = 1e-6, residual: Any = None) -> Any:
    s = x if residual is None else x + residual
    return _scaled(s, s, scale, offset, eps, residual)


def _scaled(s: Any, numerator: Any, scale: Any, offset: Any, eps: float, residual: Any) -> Any:
    y = numerator / jnp.sqrt((numerator**2).sum(-1, keepdims=True) / s.shape[-1] + eps)
    y = y * (1.0 if scale is None else scale) + (0.0 if offset is None else offset)
    return y if residual is None else (y, s)


# --- matmul ----------------------------------------------------------------------------------------------------------------------------------------

ACTIVATIONS: Mapping[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "relu2": lambda x: jnp.where(x > 0, x, 0.0) ** 2,
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "tanh": jnp.tanh,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def gemm(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: Any = None,
    scale_b: Any = None,
    **how: Any,
) -> Any:
    """`activation(scale_a * scale_b * (a @ b) + bias)`; a scale is one number, or one per row of `a` (column of `b`)."""
    del how  # precision and out_dtype round, and the oracle does not
    a, b = (jnp.asarray(x, jnp.float64) for x in (a, b))
    a = jnp.swapaxes(a, -1, -2) if transpose_a else a
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    out = (
        (a[..., :, :, None] * b[..., None, :, :]).sum(-2) if a.shape[-1] < 8 else jnp.einsum("...mk,...kn->...mn", a, b)
    )
    if scale_a is not None:
        out = out * (scale_a[..., :, None] if np.ndim(scale_a) else scale_a)
    if scale_b is not None:
        out = out * (scale_b[..., None, :] if np.ndim(scale_b) else scale_b)
    if bias is not None:
        out = out + (bias[..., None, :] if np.ndim(bias) > 1 else bias)
    return ACTIVATIONS[activation](out)


# --- attention -------------------------------------------------------------------------------------------------------------------------------------


def keep_mask(seeds: np.ndarray, rows: int, columns: int, rate: float) -> np.ndarray:
    """Kept positions, bool `[batch, heads, rows, columns]`: the mixing of `core/dropout.py` done on Python-sized integers.

    Args:
      seeds: uint32 `[batch, heads, 2]`.
    """

    def xor_shift(x: np.ndarray, bits: int) -> np.ndarray:
        return x ^ (x >> np.uint64(bits))

    def times(x: np.ndarray, factor: int) -> np.ndarray:
        return (x * np.uint64(factor)) & np.uint64(0xFFFFFFFF)

    def plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x + y) & np.uint64(0xFFFFFFFF)

    seed = np.asarray(seeds).astype(np.uint64)[..., None, None, :]
    r = plus(times(np.arange(rows, dtype=np.uint64)[:, None], 0x9E3779B1), seed[..., 0])
    r = xor_shift(times(xor_shift(r, 16), 0x85EBCA6B), 13)
    c = plus(times(np.arange(columns, dtype=np.uint64)[None, :], 0xC2B2AE35), seed[..., 1])
    c = xor_shift(times(xor_shift(c, 16), 0x27D4EB2F), 15)
    z = plus(r, c)
    z = xor_shift(times(xor_shift(z, 16), 0x7FEB352D), 15)
    z = xor_shift(times(z, 0x846CA68B), 16)
    return (z >> np.uint64(8)) >= np.uint64(round(rate * 2**24))


def visible(
    batch: int,
    heads: int,
    rows: int,
    columns: int,
    *,
    mask: Any = None,
    causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
) -> np.ndarray:
    """Which key each query may attend to, bool `[batch, heads, rows, columns]`, one condition at a time."""
    see = np.ones((batch, heads, rows, columns), bool)
    i = np.arange(rows)[:, None] + (columns - rows if causal_align == "bottom_right" else 0)
    j = np.arange(columns)[None, :]
    if causal:
        see &= j <= i
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        see &= np.ones_like(see) if left is None else i - left <= j
        see &= np.ones_like(see) if right is None else j <= i + right
    if segment_ids is not None:
        q_ids, kv_ids = (np.asarray(ids) for ids in segment_ids)
        see &= (q_ids[..., :, None] == kv_ids[..., None, :]).reshape(-1, 1, rows, columns)
    if mask is not None:
        see &= np.asarray(mask)
    return see


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    **seen: Any,
) -> Any:
    """Attention with the whole score matrix, one feature after another in the order of the contract."""
    if layout == "bshd":
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    batch, heads, rows, features = query.shape
    group = heads // key.shape[1]
    columns = key.shape[2]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scale = 1 / np.sqrt(features) if scale is None else scale
    logits = scale * jnp.einsum("bhid,bhjd->bhij", query, key)
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    see = visible(batch, heads, rows, columns, mask=mask, **seen)
    see = see & (logits > -jnp.inf)
    sink = jnp.full((batch, heads, rows, 1), -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(jnp.asarray(sinks).reshape(-1, heads, 1, 1), sink.shape)
    hidden = jnp.where(see, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(hidden, -1, keepdims=True, initial=-jnp.inf), sink))
    top = jnp.where(top == -jnp.inf, 0.0, top)  # nothing to attend to
    weights = jnp.where(see, jnp.exp(jnp.where(see, logits - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True) + (jnp.exp(sink - top) if sinks is not None else 0.0)
    anything = total > 0
    safe = jnp.where(anything, total, 1.0)
    probability = weights / safe
    if dropout_rate:
        seeds = jax.random.bits(dropout_key, (batch, heads, 2), jnp.uint32)
        kept = keep_mask(np.asarray(seeds), rows, columns, dropout_rate)
        probability = jnp.where(kept, probability / (1 - dropout_rate), 0.0)
    out = jnp.einsum("bhij,bhjd->bhid", probability, value)
    if layout == "bshd":
        out = jnp.swapaxes(out, 1, 2)
    if not return_lse:
        return out
    logsumexp = jnp.where(anything, jnp.log(safe) + top, -jnp.inf)[..., 0]
    return out, logsumexp


# --- any case --------------------------------------------------------------------------------------------------------------------------------------

ORACLES: Mapping[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gemm": gemm,
    "flash_attention": flash_attention,
}


@functools.cache
def every() -> Mapping[str, Callable[..., Any]]:
    """Those above, and the `ORACLES` of every `oracle_*.py` beside this file."""
    found = dict(ORACLES)
    for path in sorted(pathlib.Path(__file__).parent.glob("oracle_*.py")):
        found |= importlib.import_module(path.stem).ORACLES
    return found


def of(call: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle of a public function, by its name."""
    return every()[call.__name__]


def evaluate(
    call: Callable[..., Any], arrays: Arrays, options: Mapping[str, Any], differentiable: tuple[str, ...]
) -> tuple[Any, Callable[[Any], dict[str, np.ndarray]]]:
    """The outputs in float64, and the function from the outputs' cotangents to the gradients of the arrays named."""
    function = of(call)
    with jax.enable_x64(True):
        chosen = {name: wide(arrays[name]) for name in differentiable}
        rest = {name: wide(x) for name, x in arrays.items() if name not in differentiable}
        outputs, pull = jax.vjp(lambda chosen: function(**rest, **chosen, **options), chosen)
        values = jax.tree.map(np.asarray, outputs)

    def gradients(cotangents: Any) -> dict[str, np.ndarray]:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, pull(jax.tree.map(wide, cotangents))[0])

    return values, gradients
