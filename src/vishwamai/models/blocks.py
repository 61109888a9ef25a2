"""Products and norms that the halves of a layer share, as functions of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.weight import Weight

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


def linear(x: Any, weight: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """`x @ weight + bias`; plain weights are brought to the dtype of `x`, quantized and packed ones stay."""
    if isinstance(weight, Weight):
        out = weight.product(x, out_dtype or x.dtype)
        return out if bias is None else out + bias.astype(out.dtype)
    return vishwamai.gemm(x, in_dtype(weight, x.dtype), bias=bias, out_dtype=out_dtype or x.dtype)


def in_dtype(weight: Any, dtype: Any) -> Any:
    """A plain weight in a dtype; another as it is."""
    return weight.astype(dtype) if isinstance(weight, jax.Array) else weight


def norm(config: ModelConfig, x: Any, scale: Any, residual: Any = None) -> Any:
    """`rms_norm` with the scale as the family stores it; with `residual`, of the sum, which is returned too."""
    offset = 1.0 if config.norm_offset else 0.0
    return vishwamai.rms_norm(x, scale, eps=config.norm_eps, scale_offset=offset, residual=residual)


def final_norm(config: ModelConfig, x: Any, scale: Any, residual: Any = None) -> Any:
    """The norm before the head, of `x` or of its sum with `residual`, over the divisor of the logits: the head is
    linear.
    """
    hidden = norm(config, x, scale) if residual is None else norm(config, x, scale, residual)[0]
    return hidden if config.logit_divisor == 1.0 else hidden / jnp.asarray(config.logit_divisor, hidden.dtype)
