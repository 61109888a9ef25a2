"""Attention over tokens that an index chooses, and the index itself."""

from vishwamai.ops.indexed.api import INDEXED, indexed_attention
from vishwamai.ops.indexed.indexer import lightning_index

__all__ = ["INDEXED", "indexed_attention", "lightning_index"]
