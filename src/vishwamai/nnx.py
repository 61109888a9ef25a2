"""Flax NNX layers and `dot_product_attention` on the library's kernels, under Flax's and JAX's own names and arguments.

A class is Flax's class with another forward pass: parameters, their names, initializers and dtypes are Flax's, so
checkpoints and optimizers see no change. Needs Flax: the extra `models`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.core.arguments import checks_its_own, described
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.precision import precision_of
from vishwamai.core.spec import as_jax_dtype
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention import flash_attention
from vishwamai.ops.matmul import gemm
from vishwamai.ops.norm import layer_norm, rms_norm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

__all__ = ["Attention", "LayerNorm", "Linear", "RMSNorm", "dot_product_attention"]


@checks_its_own("local_window_size", "scale")
def dot_product_attention(
    query: Float[Array, "*batch q_len heads qk_dim"],
    key: Float[Array, "*batch kv_len kv_heads qk_dim"],
    value: Float[Array, "*batch kv_len kv_heads v_dim"],
    bias: Float[Array, "#*batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#*batch #heads #q_len #kv_len"] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Key[Array, ""] | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    query_seq_lengths: Int[Array, " batch"] | None = None,
    key_value_seq_lengths: Int[Array, " batch"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`flash_attention` with the arguments of `jax.nn.dot_product_attention` and of `flax.nnx.dot_product_attention`.

    It stands in for either. Two things differ. A row of the query that sees no key, such as one past
    `query_seq_lengths`, gives 0, where those give a mean of values. Dropout draws for each batch element and head,
    whatever `broadcast_dropout` says, and keeps no array of the scores' size.

    Args:
      query: `[..., q_len, heads, qk_dim]`, with any number of batch axes, bfloat16, float16, float32 or float64.
      key: `[..., kv_len, kv_heads, qk_dim]`, where `heads` is a multiple of `kv_heads`.
      value: `[..., kv_len, kv_heads, v_dim]`.
      bias: added to the scaled logits; broadcasts to `[..., heads, q_len, kv_len]`.
      mask: True (or not 0) = attend; broadcasts the same way.
      broadcast_dropout: has no effect.
      dropout_rng: the random key of the dropout, which `dropout_rate` above 0 needs unless `deterministic`.
      dropout_rate: share of the probabilities to drop, in [0, 1).
      deterministic: drop nothing.
      dtype: dtype of the products and the result; None promotes query, key and value to one dtype.
      precision: mode of float32 products, as JAX and Flax take it: a `jax.lax.Precision` or its name, a pair of them,
        or a `jax.lax.DotAlgorithmPreset`; None takes the ambient one.
      module: None. The probabilities are never formed, so a module cannot keep them.
      promote_dtype: Flax's function that brings query, key and value to one dtype; None does as JAX promotes.
      is_causal: query i sees no key after it.
      scale: multiplies query.key; None for 1/sqrt(qk_dim).
      query_seq_lengths: `[batch]`: rows from this one on give 0.
      key_value_seq_lengths: `[batch]`: no query sees the keys from this one on.
      local_window_size: (left, right), or one number for both: query i sees keys i-left ... i+right.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.
      return_residual: return the logsumexp of the logits too.

    Returns:
      `[..., q_len, heads, v_dim]`; with `return_residual`, the pair of it and the logsumexp `[..., q_len, heads]`,
      float32 (float64 for float64).

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: `module` is given, or the implementation asked for cannot serve the call.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
    >>> ours = dot_product_attention(q, k, v, is_causal=True)
    >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
    >>> lens = jnp.array([50, 100])
    >>> dot_product_attention(q, k, v, key_value_seq_lengths=lens, local_window_size=(15, 0), scale=0.1).shape
    (2, 100, 4, 64)
    """
    del broadcast_dropout
    name = "dot_product_attention"
    if module is not None:
        raise UnsupportedError(
            f"{name}: `module` is given, to keep the probabilities (sow_weights=True), but they are never formed; "
            "leave it out."
        )
    query, key, value = _one_dtype(name, query, key, value, dtype, promote_dtype)
    for label, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim < 3 or array.ndim != query.ndim or array.shape[:-3] != query.shape[:-3]:
            raise ShapeError(
                f"{name}: `{label}` has shape {array.shape}; pass [..., length, heads, dim], with the batch axes of "
                f"`query`, which has shape {query.shape}."
            )
    batch, shape = query.shape[:-3], (query.shape[-2], query.shape[-3], key.shape[-3])
    q, k, v = (array.reshape(math.prod(batch), *array.shape[-3:]) for array in (query, key, value))
    mask = None if mask is None else _scores(name, "mask", mask.astype(bool), batch, shape)
    bias = None if bias is None else _scores(name, "bias", bias, batch, shape)
    if query_seq_lengths is not None:
        lens = _lengths(name, "query_seq_lengths", query_seq_lengths, math.prod(batch))
        inside = (jnp.arange(shape[1]) < lens[:, None])[:, None, :, None]
        mask = inside if mask is None else mask & inside
    if key_value_seq_lengths is not None:
        key_value_seq_lengths = _lengths(name, "key_value_seq_lengths", key_value_seq_lengths, math.prod(batch))
    window: Any = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    drops = dropout_rate != 0.0 and not deterministic
    products = precision_of(name, precision)
    with contextlib.nullcontext() if products is None else kernel_config(precision=products):
        mixed = flash_attention(
            q,
            k,
            v,
            bias,
            mask,
            causal=is_causal,
            window=window,
            kv_lens=key_value_seq_lengths,
            dropout_rate=dropout_rate if drops else 0.0,
            dropout_key=dropout_rng if drops else None,
            scale=scale,
            return_lse=return_residual,
            layout="bshd",
            implementation=implementation,
        )
    if not return_residual:
        return mixed.reshape(*batch, *mixed.shape[1:])
    out, lse = mixed
    lse = lse.swapaxes(1, 2)
    return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])


class Attention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention`, whose attention is `dot_product_attention` of this module.

    Projections are Flax's `LinearGeneral`. `sow_weights=True` is an UnsupportedError: the probabilities are never
    formed.

    >>> layer = Attention(8, 64, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 100, 64)), is_causal=True).shape
    (2, 100, 64)
    """

    def __init__(
        self, *args: Any, attention_fn: Callable[..., Any] = dot_product_attention, rngs: nnx.Rngs, **kwargs: Any
    ) -> None:
        super().__init__(*args, attention_fn=attention_fn, rngs=rngs, **kwargs)


class RMSNorm(nnx.RMSNorm):
    """Flax's `nnx.RMSNorm` by `vishwamai.rms_norm`: one pass over memory, statistics in float32.

    >>> norm = RMSNorm(64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 100, 64), jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        super().__init__(num_features, rngs=rngs, **kwargs)
        _check_last_axis(self)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """The normalized `x`, `[..., features]`.

        Raises:
          UnsupportedError: `mask` is given.
        """
        _check_no_mask(self, mask)
        x, scale = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)  # type: ignore[misc]
        return rms_norm(x, scale, eps=self.epsilon)


class LayerNorm(nnx.LayerNorm):
    """Flax's `nnx.LayerNorm` by `vishwamai.layer_norm`: one pass over memory, statistics in float32.

    >>> LayerNorm(64, rngs=nnx.Rngs(0))(jnp.ones((2, 100, 64))).shape
    (2, 100, 64)
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        super().__init__(num_features, rngs=rngs, **kwargs)
        _check_last_axis(self)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """The normalized `x`, `[..., features]`.

        Raises:
          UnsupportedError: `mask` is given.
        """
        _check_no_mask(self, mask)
        parts = (x, _value(self.scale), _value(self.bias))
        x, scale, bias = self.promote_dtype(parts, dtype=self.dtype)  # type: ignore[misc]
        return layer_norm(x, scale, bias, eps=self.epsilon)


class Linear(nnx.Linear):
    """Flax's `nnx.Linear` by `vishwamai.gemm`: the bias is added to the sum before it is rounded.

    Of float32, `precision` is at least as accurate as asked for; None takes that of `KernelConfig`.

    >>> Linear(64, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 100, 64))).shape
    (2, 100, 32)
    """

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        if self.dot_general is not jax.lax.dot_general:
            raise UnsupportedError(
                "Linear: `dot_general` is given, but `vishwamai.gemm` multiplies; use flax.nnx.Linear."
            )

    def __call__(self, inputs: Array, out_sharding: object = None) -> Array:
        """`inputs @ kernel + bias`, `[..., out_features]` of `inputs`, `[..., in_features]`.

        Raises:
          UnsupportedError: `out_sharding` is given.
        """
        if out_sharding is not None:
            raise UnsupportedError(
                "Linear: `out_sharding` is given, but the result lies as inputs and kernel do; leave it out, and "
                "reshard the result."
            )
        parts = (inputs, _value(self.kernel), _value(self.bias))
        inputs, kernel, bias = self.promote_dtype(parts, dtype=self.dtype)  # type: ignore[misc]
        rows = inputs[None] if inputs.ndim == 1 else inputs
        precision = precision_of("Linear", self.precision)
        y = gemm(rows, kernel, bias=bias, precision=precision, out_dtype=self.preferred_element_type)
        return y[0] if inputs.ndim == 1 else y


def _value(parameter: Any) -> Any:
    """The array of a Flax parameter; None for one that is left out."""
    return None if parameter is None else parameter[...]


def _check_last_axis(norm: Any) -> None:
    for name in ("reduction_axes", "feature_axes"):
        axes = getattr(norm, name)
        if axes not in (-1, (-1,), [-1]):
            raise UnsupportedError(
                f"{type(norm).__name__}: `{name}` is {axes}, but the kernels normalize the last axis; leave it out, or "
                f"use flax.nnx.{type(norm).__name__}."
            )
    if norm.axis_name is not None:
        raise UnsupportedError(
            f"{type(norm).__name__}: `axis_name` is {norm.axis_name!r}, but statistics are taken on one device; leave "
            f"it out, or use flax.nnx.{type(norm).__name__}."
        )


def _check_no_mask(norm: object, mask: AnyArray) -> None:
    if mask is not None:
        raise UnsupportedError(
            f"{type(norm).__name__}: `mask` is given, but every feature is normalized; leave it out, or use "
            f"flax.nnx.{type(norm).__name__}."
        )


def _one_dtype(name: str, query: AnyArray, key: Any, value: Any, dtype: Any, promote: Callable[..., Any] | None) -> Any:
    """Query, key and value in one dtype."""
    if dtype is not None:
        dtype = as_jax_dtype(name, "dtype", dtype)
    if promote is None:
        wide = jnp.result_type(query, key, value) if dtype is None else dtype
        return tuple(array.astype(wide) for array in (query, key, value))
    arrays = promote((query, key, value), dtype=dtype)
    if not (isinstance(arrays, (tuple, list)) and len(arrays) == 3 and all(isinstance(x, jax.Array) for x in arrays)):
        raise ShapeError(
            f"{name}: `promote_dtype` gave {described(arrays)}; pass a function of (query, key, value) and `dtype` "
            "that gives the three arrays in one dtype."
        )
    return arrays


def _scores(name: str, label: str, array: Any, batch: tuple[int, ...], shape: tuple[int, int, int]) -> Any:
    """`[batch or 1, heads or 1, q_len or 1, kv_len or 1]` of what broadcasts to `[*batch, heads, q_len, kv_len]`."""
    full = (*batch, *shape)
    padded = (1,) * (len(full) - array.ndim) + array.shape
    if len(padded) != len(full) or any(n not in (1, m) for n, m in zip(padded, full)):
        raise ShapeError(f"{name}: `{label}` has shape {array.shape}, which does not broadcast to {full}.")
    array = array.reshape(padded)
    if any(n != 1 for n in padded[:-3]):
        array = jnp.broadcast_to(array, (*batch, *padded[-3:]))
    return array.reshape(math.prod(array.shape[:-3]), *padded[-3:])


def _lengths(name: str, label: str, lens: Any, batch: int) -> Any:
    if lens.shape != (batch,) or not jnp.issubdtype(lens.dtype, jnp.integer):
        raise ShapeError(f"{name}: `{label}` is {lens.dtype}{lens.shape}; pass integers of shape ({batch},).")
    return lens
