"""Causal convolutions over a sequence."""

from vishwamai.ops.conv.api import CONV, causal_conv1d

__all__ = ["CONV", "causal_conv1d"]
