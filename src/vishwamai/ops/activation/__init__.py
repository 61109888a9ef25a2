"""Activations, and the fusion of GELU with dropout."""

from vishwamai.ops.activation.api import ACTIVATION, fused_gelu_dropout, gelu, relu2, silu

__all__ = ["ACTIVATION", "fused_gelu_dropout", "gelu", "relu2", "silu"]
