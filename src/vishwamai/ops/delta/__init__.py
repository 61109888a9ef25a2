"""Recurrences with a matrix state: the gated delta rule, linear attention and state spaces."""

from vishwamai.ops.delta.api import DELTA, gated_delta_rule, linear_attention, state_space
from vishwamai.ops.delta.pooled import PooledStates

__all__ = ["DELTA", "PooledStates", "gated_delta_rule", "linear_attention", "state_space"]
