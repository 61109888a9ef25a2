"""Rotary position embedding."""

from vishwamai.ops.rope.api import ROPE, apply_rope
from vishwamai.ops.rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
)
from vishwamai.ops.rope.tables import RotaryCache

__all__ = [
    "ROPE",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MRopeScaling",
    "NtkScaling",
    "RopeScaling",
    "RotaryCache",
    "YarnScaling",
    "apply_rope",
]
