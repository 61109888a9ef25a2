"""What the cross entropy of a linear layer means, in float64 and with every logit; part of the oracle."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def linear_cross_entropy(
    x: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    class_weights: Any = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool = False,
    **how: Any,
) -> Any:
    """The cross entropy with a target distribution that is written out, word by word."""
    del how  # precision rounds, and the oracle does not
    words = weight.shape[0]
    logits = jnp.einsum("...d,vd->...v", x, weight) + (0.0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    top = logits.max(-1, keepdims=True)
    logsumexp = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    target = labels if soft else labels[..., None] == jnp.arange(words)
    target = (1 - label_smoothing) * target + label_smoothing / words
    loss = (target * (logsumexp[..., None] - logits)).sum(-1) + z_loss * logsumexp**2
    counted = jnp.ones(loss.shape, bool) if soft else labels != ignore_index
    share = jnp.where(counted, 1.0 if class_weights is None else class_weights[labels], 0.0)
    loss = share * loss
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / share.sum()
    return (loss, logsumexp) if return_logsumexp else loss
