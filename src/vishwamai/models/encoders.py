"""Which models are encoders, and what each computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.models import rotary_bert
from vishwamai.models.bert import PREFIXES, BertConfig
from vishwamai.models.config import ModelConfig, read_config
from vishwamai.models.modernbert import ModernBertConfig
from vishwamai.models.rotary_bert import RotaryBertConfig
from vishwamai.models.shards import read_index
from vishwamai.models.text_part import text_tensors
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

    from vishwamai.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class DecoderStates:
    """A decoder whose states are pooled, such as Qwen3-Embedding and EmbeddingGemma.

    Attributes:
      model: configuration of the decoder.
    """

    model: ModelConfig

    @property
    def model_type(self) -> str:
        """The family."""
        return self.model.family

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        """Features of a state."""
        return self.model.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return self.model.num_layers

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.model.max_positions

    def read(self, directory: Path, dtype: DTypeLike = jnp.float32) -> Decoder:
        """The decoder of a directory, whose head may be absent; see `from_pretrained`."""
        from vishwamai.models.checkpoint import from_pretrained

        headless = "lm_head.weight" not in text_tensors(read_index(directory))
        config = dataclasses.replace(self.model, tie_embeddings=True) if headless else self.model
        return from_pretrained(directory, dtype=dtype, config=config)

    def encode(
        self, parameters: Decoder, tokens: jax.Array, mask: jax.Array, types: jax.Array, operations: object
    ) -> jax.Array:
        """The last hidden state of every token, `[batch, seq, hidden]`; `types` and `operations` have no effect."""
        # Without it tokens see those before them alone, and padding comes last.
        segments = mask.astype(jnp.int32) if self.model.bidirectional else None
        return parameters(tokens, segment_ids=segments)


EncoderConfig = BertConfig | ModernBertConfig | RotaryBertConfig | DecoderStates


def read_encoder_config(directory: Path) -> EncoderConfig:
    """The configuration of an encoder's directory: BERT and its kin, ModernBERT, GTE, Nomic BERT, or a decoder.

    Raises:
      ShapeError, UnsupportedError: as the `from_file` of its class, or `read_config`.
    """
    path = directory / "config.json"
    kind = read_json(path).get("model_type")
    if kind == "modernbert":
        return ModernBertConfig.from_file(path)
    if kind in rotary_bert.FAMILIES:
        return RotaryBertConfig.from_file(path)
    return BertConfig.from_file(path) if kind in PREFIXES else DecoderStates(read_config(directory))


def is_encoder(directory: Path) -> bool:
    """Whether a directory holds an encoder: by its `model_type`, or because sentence-transformers wrote it."""
    path = directory / "config.json"
    if (directory / "modules.json").exists():
        return True
    values = read_json(path) if path.exists() else {}
    return values.get("model_type") in (*PREFIXES, *rotary_bert.FAMILIES, "modernbert") or bool(
        values.get("use_bidirectional_attention") is True
    )


def is_cross_encoder(directory: Path) -> bool:
    """Whether a directory holds an encoder with a head that judges pairs of texts."""
    path = directory / "config.json"
    names = read_json(path).get("architectures") if path.exists() else None
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)
