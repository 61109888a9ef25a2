"""Models built on the public operations: decoders and encoders, and the directories that Hugging Face writes.

Names are imported when they are used: the decoder needs flax, the encoder of `minilm` does not. `__all__` has those
that docs/api.md promises; the others serve this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vishwamai.models.checkpoint import from_pretrained
    from vishwamai.models.config import ModelConfig, read_config
    from vishwamai.models.cpu_weights import pack_weights
    from vishwamai.models.decoder import Decoder
    from vishwamai.models.embedding import SentenceEncoder
    from vishwamai.models.generation import GenerationConfig, read_generation_config
    from vishwamai.models.layers.layer import LayerKind as LayerKind
    from vishwamai.models.pages import PagedBatch as PagedBatch
    from vishwamai.models.pages import page_shapes as page_shapes
    from vishwamai.models.pooling import Pooling
    from vishwamai.models.rotation import Rope as Rope
    from vishwamai.models.saving import save_pretrained
    from vishwamai.models.tokenizer import Detokenizer, Tokenizer, read_tokenizer

_MODULES = {
    "Decoder": "decoder",
    "Detokenizer": "tokenizer",
    "GenerationConfig": "generation",
    "LayerKind": "layers.layer",
    "ModelConfig": "config",
    "PagedBatch": "pages",
    "Pooling": "pooling",
    "Rope": "rotation",
    "SentenceEncoder": "embedding",
    "Tokenizer": "tokenizer",
    "from_pretrained": "checkpoint",
    "pack_weights": "cpu_weights",
    "page_shapes": "pages",
    "read_config": "config",
    "read_generation_config": "generation",
    "read_tokenizer": "tokenizer",
    "save_pretrained": "saving",
}

__all__ = [
    "Decoder",
    "Detokenizer",
    "GenerationConfig",
    "ModelConfig",
    "Pooling",
    "SentenceEncoder",
    "Tokenizer",
    "from_pretrained",
    "pack_weights",
    "read_config",
    "read_generation_config",
    "read_tokenizer",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vishwamai.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vishwamai.models.{_MODULES[name]}"), name)
