"""Recurrences with a matrix state: the gated delta rule, linear attention and state spaces."""

from vishwamai.ops.delta.api import DELTA, gated_delta_rule, linear_attention, state_space

__all__ = ["DELTA", "gated_delta_rule", "linear_attention", "state_space"]
