"""Gated linear units."""

from vishwamai.ops.gated.api import GATED, gated_linear_unit, has_kernel

__all__ = ["GATED", "gated_linear_unit", "has_kernel"]
