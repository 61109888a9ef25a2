"""Products and norms that the halves of a layer share, as functions of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.activations import activate
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.types import PyTree
from vishwamai.core.weight import Weight

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays


def linear(
    x: jax.Array,
    weight: PyTree,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    activation: str | None = None,
) -> jax.Array:
    """`activation(x @ weight + bias)`; a plain weight is brought to the dtype of `x`, another one stays."""
    if isinstance(weight, Weight):
        out = weight.product(x, out_dtype or x.dtype)
        return activate(activation, out if bias is None else out + bias.astype(out.dtype))
    options = {"bias": bias, "activation": activation, "out_dtype": out_dtype or x.dtype}
    return vishwamai.gemm(x, in_dtype(weight, x.dtype), **options)


def in_dtype(weight: PyTree, dtype: DTypeLike) -> PyTree:
    """A plain weight in a dtype; another as it is."""
    return weight.astype(dtype) if isinstance(weight, jax.Array) else weight


def times(x: jax.Array, factor: float) -> jax.Array:
    """`factor * x` in the dtype of `x`."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def norm(
    config: ModelConfig,
    x: jax.Array,
    scale: jax.Array | None,
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> PyTree:
    """The family's norm over the last axis.

    Args:
      config: the model.
      x: the input, `[..., features]`.
      scale: `[features]`, as the family stores it; None for 1.
      residual: an array like `x`; the norm is that of the sum, which is returned too.
      bias: `[features]`, of layer norms; None for 0.
    """
    if config.layer_norm:
        if config.norm_offset and scale is not None:
            scale = scale.astype(jnp.promote_types(scale.dtype, jnp.float32)) + 1.0
        return vishwamai.layer_norm(x, scale, bias, eps=config.norm_eps, residual=residual)
    offset = 1.0 if config.norm_offset else 0.0
    return vishwamai.rms_norm(x, scale, eps=config.norm_eps, scale_offset=offset, residual=residual)


def head_matrix(config: ModelConfig, head: PyTree) -> PyTree:
    """The head `[vocab, hidden]` that the logits are a product with, of the head as the model has it.

    Raises:
      UnsupportedError: its rows are normalized, and it is not an array.
    """
    if not config.head_norm or isinstance(head, PackedQTensor):  # `pack_weights` packs normalized ones
        return head
    if not isinstance(head, jax.Array):
        raise UnsupportedError(
            f"{config.family}: the head's rows are normalized, so it is not quantized; load it plain."
        )
    wide = head.astype(jnp.promote_types(head.dtype, jnp.float32))
    length = jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True))
    return (wide / jnp.maximum(length, 1e-12)).astype(head.dtype)


def final_norm(config: ModelConfig, arrays: Arrays, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    """The norm before the head, of `x` or of its sum with `residual`, times the factors of the logits: the head is
    linear.

    Args:
      config: the model.
      arrays: the parameters outside of the layers by name.
      x, residual: `[..., hidden]`.
    """
    hidden = norm(config, x, arrays.get("norm"), residual, arrays.get("norm_bias"))
    hidden = hidden if residual is None else hidden[0]
    divisor = config.logit_divisor * (1.0 if config.logit_base is None else config.hidden_size / config.logit_base)
    if divisor != 1.0:
        hidden = hidden / jnp.asarray(divisor, hidden.dtype)
    if config.logit_multiplier != 1.0:
        hidden = hidden * jnp.asarray(config.logit_multiplier, hidden.dtype)
    return hidden
