"""Sentence encoders: a BERT encoder with its tokenizer and its pooling, from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.pallas import round_up
from vishwamai.models import bert
from vishwamai.models.hub import local_model
from vishwamai.models.pooling import Pooling, read_pooling
from vishwamai.models.shards import read_index
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_STEP = 16
"""Sentences are padded to a multiple of this, so that a text needs few compilations."""


@functools.partial(jax.jit, static_argnames=("config", "pooling", "operations"))
def _embed(parameters: bert.Parameters, tokens: Any, mask: Any, *, config: Any, pooling: Any, operations: Any) -> Any:
    return pooling(bert.encode(parameters, config, tokens, mask, operations), mask)


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """An encoder with its tokenizer; `from_pretrained` makes it.

    Attributes:
      parameters: the encoder's tree of parameters.
      config: its sizes.
      tokenizer: a `tokenizers.Tokenizer` that neither cuts nor pads.
      max_tokens: the longest text, special tokens included.
      pooling: function from the states of a text to a vector.
      operations: functions that the encoder calls: `bert.OURS`, or `bert.PLAIN`.
    """

    parameters: bert.Parameters
    config: bert.BertConfig
    tokenizer: Any
    max_tokens: int
    pooling: Pooling = Pooling()
    operations: bert.Operations = bert.OURS

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: Any = jnp.float32, operations: bert.Operations = bert.OURS
    ) -> SentenceEncoder:
        """Reads a directory: `config.json`, safetensors, `tokenizer.json`, and the files of sentence-transformers
        (`modules.json`, `sentence_bert_config.json`) where they exist. Without `modules.json` a vector is the mean of
        its tokens and is not normalized, as sentence-transformers does it.

        Args:
          directory: folder of the files, or a name of the Hugging Face Hub, "ORG/NAME@REVISION".
          dtype: dtype of parameters and activations; vectors are float32 or wider.
          operations: functions that the encoder calls.

        Raises:
          ShapeError: a file or a tensor is missing, damaged, or contradicts `config.json`; the text names it.
          UnsupportedError: the model is not one that the encoder computes.
        """
        from tokenizers import Tokenizer

        directory = local_model(directory)
        config = bert.BertConfig.from_file(directory / "config.json")
        pooling = read_pooling(directory) or Pooling(normalize=False)
        parameters = bert.from_hugging_face(read_index(directory), config, dtype)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ShapeError(f"{path}: the file is missing; the encoder needs the tokenizer. Download it again.")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ShapeError(f"{path}: the file is not a tokenizer ({error}); download it again.") from error
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise ShapeError(
                f"{path}: the tokenizer has {tokenizer.get_vocab_size()} tokens, but config.json says `vocab_size` = "
                f"{config.vocab_size}; the two do not belong together."
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(parameters, config, tokenizer, longest_text(directory, config), pooling, operations)

    def ids(self, texts: Sequence[str], *, cut: bool = True) -> list[list[int]]:
        """Token ids of texts with their special tokens, the text's end cut to `max_tokens` in all if `cut`."""
        if not cut:
            return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        # Special tokens stay at a text's end when it is cut: the tokenizer does it, not a slice.
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        room = self.max_tokens - self.tokenizer.num_special_tokens_to_add(False)
        for encoding in encodings:
            encoding.truncate(room)
        return [self.tokenizer.post_process(encoding).ids for encoding in encodings]

    def tokenize(
        self, texts: Sequence[str], step: int = _STEP
    ) -> tuple[Int[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
        """Token ids and their mask, padded to the longest text rounded up to a multiple of `step`."""
        ids = self.ids(texts)
        length = min(self.max_tokens, round_up(max(map(len, ids)), step))
        return padded(ids, len(ids), length)

    def __call__(self, tokens: Any, mask: Any) -> Any:
        """Vectors `[batch, hidden]` of tokenized sentences."""
        return _embed(
            self.parameters, tokens, mask, config=self.config, pooling=self.pooling, operations=self.operations
        )

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> Float[np.ndarray, "texts hidden"]:
        """Vectors of sentences, in their order; sentences of like length share a batch.

        Args:
          texts: the sentences.
          batch_size: number of sentences in a batch.

        Returns:
          float32 `[len(texts), hidden]`; where vectors are normalized, the dot product of two rows is their cosine.
        """
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.zeros((len(texts), self.config.hidden_size), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            tokens, mask = self.tokenize([texts[i] for i in rows])
            out[rows] = np.asarray(self(tokens, mask), np.float32)
        return out


def padded(
    ids: Sequence[Sequence[int]], rows: int, length: int
) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
    """Token ids in an array of zeros, int32 `[rows, length]`, and where they are."""
    tokens, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, sentence in enumerate(ids):
        tokens[row, : len(sentence)] = sentence
        mask[row, : len(sentence)] = True
    return tokens, mask


def longest_text(directory: Path, config: bert.BertConfig) -> int:
    """Tokens of the longest text that an encoder's directory allows.

    Raises:
      ShapeError: `sentence_bert_config.json` is damaged, or allows more than the model has positions for.
    """
    path = directory / "sentence_bert_config.json"
    length = read_json(path).get("max_seq_length") if path.exists() else None
    if length is None:
        return config.max_position_embeddings
    if not isinstance(length, int) or not 0 < length <= config.max_position_embeddings:
        raise ShapeError(
            f"{path}: `max_seq_length` is {length!r}; expected 1 to {config.max_position_embeddings}, config.json's "
            "`max_position_embeddings`."
        )
    return length
