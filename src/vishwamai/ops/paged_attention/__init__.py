"""Attention over paged keys and values."""

from vishwamai.ops.paged_attention.api import PAGED_ATTENTION, ragged_paged_attention
from vishwamai.ops.paged_attention.update import update_pages

__all__ = ["PAGED_ATTENTION", "ragged_paged_attention", "update_pages"]
