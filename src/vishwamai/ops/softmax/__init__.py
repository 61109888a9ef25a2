"""Softmax and its logarithm."""

from vishwamai.ops.softmax.api import SOFTMAX, log_softmax, softmax

__all__ = ["SOFTMAX", "log_softmax", "softmax"]
