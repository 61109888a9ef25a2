"""Attention: exact, in memory linear in the sequences, forward and backward."""

from vishwamai.ops.attention.api import ATTENTION, flash_attention

__all__ = ["ATTENTION", "flash_attention"]
