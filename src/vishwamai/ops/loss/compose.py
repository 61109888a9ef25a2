"""The loss of the three numbers that the op gives for each token, for arrays of JAX and tensors of torch alike."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.loss.spec import Outputs


def compose(
    xp: Any,
    numbers: Outputs,
    vocab: int,
    active: AnyArray,
    unknown: PyTree,
    shares: AnyArray,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    mass: AnyArray = None,
) -> AnyArray:
    """`linear_cross_entropy` of the op's outputs `[...]`; see there for the formula.

    Args:
      xp: `jax.numpy` or `torch`, whose arrays these are.
      vocab: entries of the whole vocabulary.
      active: bool `[...]`, tokens that are not ignored; `unknown`: those whose label is out of range.
      shares: weight of each token in the mean: its class weight, or `active` where all weigh the same.
      mass: the sum of each token's probabilities, where the labels are such; else each has one label.
    """
    logsumexp, at_label, total = numbers
    normalizer = logsumexp if mass is None else ((1.0 - label_smoothing) * mass + label_smoothing) * logsumexp
    loss = normalizer - (1.0 - label_smoothing) * at_label
    if label_smoothing > 0:
        loss = loss - label_smoothing / vocab * total
    if z_loss:
        loss = loss + z_loss * logsumexp**2
    # A factor and not a term, so that its gradients are NaN too.
    factor = xp.where(unknown, xp.nan, 1.0 if shares is active else shares)
    loss = xp.where(active, loss * factor, 0.0)
    return loss if reduction == "none" else reduced(xp, loss.sum(), shares, reduction)


def reduced(xp: ModuleType, total: AnyArray, shares: AnyArray, reduction: str) -> AnyArray:
    """The loss of all tokens for "sum" and "mean", of the sum of their losses."""
    if reduction == "sum":
        return total
    divisor = shares.sum()
    return total / xp.where(divisor == 0, 1, divisor)
