"""Cross entropy of a linear layer's logits that are never held."""

from vishwamai.ops.loss.api import LOSS, linear_cross_entropy

__all__ = ["LOSS", "linear_cross_entropy"]
