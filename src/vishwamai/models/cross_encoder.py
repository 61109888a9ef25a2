"""Cross-encoders: an encoder reads two texts at once, and a head judges how well they go together.

Nogueira, Cho, "Passage Re-ranking with BERT" (2019).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models import bert
from vishwamai.models.bert import BertConfig
from vishwamai.models.encoder_tensors import Linear, Norm, TensorReader
from vishwamai.models.encoders import EncoderConfig, read_encoder_config
from vishwamai.models.hub import local_model
from vishwamai.models.modernbert import ModernBertConfig
from vishwamai.models.pooling import Pooling
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    import tokenizers
    from jax.typing import DTypeLike
    from jaxtyping import Float

_ACTIVATIONS = ("Sigmoid", "Identity")


class Head(NamedTuple):
    """The judge: a product of the pooled states, an activation, a norm where there is one, and the last product."""

    dense: Linear
    norm: Norm | None
    out: Linear  # [hidden, 1]


@functools.partial(jax.jit, static_argnames=("config", "pooling", "sigmoid"))
def _judged(
    parameters: object,
    head: Head,
    tokens: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray,
    types: jax.Array | np.ndarray,
    *,
    config: Any,
    pooling: Any,
    sigmoid: bool,
) -> Any:
    states = config.encode(parameters, tokens, mask, types, bert.OURS)
    pooled = pooling(states, mask).astype(head.dense.weight.dtype)
    wide = vishwamai.gemm(pooled, head.dense.weight, bias=head.dense.bias)
    if head.norm is None:
        wide = jnp.tanh(wide)
    else:
        wide = jax.nn.gelu(wide, approximate=False)
        wide = vishwamai.layer_norm(wide, head.norm.scale, head.norm.offset, eps=config.norm_eps)
    logits = vishwamai.gemm(wide, head.out.weight, bias=head.out.bias, out_dtype=jnp.float32)
    return jax.nn.sigmoid(logits) if sigmoid else logits


@dataclasses.dataclass(frozen=True)
class CrossEncoder:
    """A cross-encoder with its tokenizer; `from_pretrained` makes it.

    Attributes:
      parameters: the encoder's tree of parameters.
      head: the judge's.
      config: sizes of the encoder.
      tokenizer: a `tokenizers.Tokenizer` that neither cuts nor pads.
      max_tokens: the longest pair, special tokens included.
      pooling: function from the states of a pair to a vector.
      sigmoid: flag, scores are probabilities; False: logits.
    """

    parameters: PyTree
    head: Head
    config: EncoderConfig
    tokenizer: tokenizers.Tokenizer
    max_tokens: int
    pooling: Pooling
    sigmoid: bool

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, dtype: DTypeLike = jnp.float32) -> CrossEncoder:
        """Reads a directory with a model for sequence classification that has one label.

        Args:
          directory: folder of the files, or a name of the Hugging Face Hub, "ORG/NAME@REVISION".
          dtype: dtype of parameters and activations; scores are float32.

        Raises:
          ShapeError: a file or a tensor is missing, damaged, or contradicts `config.json`; the text names it.
          UnsupportedError: the model is not one that is computed.
        """
        from vishwamai.models.embedding import longest_text, read_raw_tokenizer

        directory = local_model(directory)
        config = read_encoder_config(directory)
        values = read_json(directory / "config.json")
        head, pooling = read_head(read_index(directory), config, values, directory / "config.json", dtype)
        tokenizer = read_raw_tokenizer(directory, config.vocab_size)
        length = longest_text(directory, config)
        sigmoid = _activation(values, directory) == "Sigmoid"
        return cls(config.read(directory, dtype), head, config, tokenizer, length, pooling, sigmoid)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of pairs of texts with their special tokens, and which of the two each token is of."""
        encodings = self.tokenizer.encode_batch(list(pairs))
        single = self.config.model_type != "bert"
        types = [[0] * len(encoding.ids) if single else encoding.type_ids for encoding in encodings]
        return [encoding.ids for encoding in encodings], types

    def cut(self, pairs: Sequence[tuple[str, str]], most: int) -> tuple[list[list[int]], list[list[int]]]:
        """The same of at most so many tokens: the longer text of a pair is cut first, as transformers does it."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())  # a copy, which other threads do not read
        tokenizer.enable_truncation(most)
        return dataclasses.replace(self, tokenizer=tokenizer).pairs(pairs)

    @property
    def special_tokens(self) -> int:
        """Special tokens of a pair."""
        return self.tokenizer.num_special_tokens_to_add(True)

    def __call__(
        self, tokens: jax.Array | np.ndarray, mask: jax.Array | np.ndarray, types: jax.Array | np.ndarray
    ) -> Any:
        """Scores `[batch, 1]` of tokenized pairs."""
        return _judged(
            self.parameters,
            self.head,
            tokens,
            mask,
            types,
            config=self.config,
            pooling=self.pooling,
            sigmoid=self.sigmoid,
        )

    def score(self, pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " pairs"]:
        """Scores of pairs of texts, float32, in their order; a pair that is too long is cut."""
        from vishwamai.models.embedding import padded

        ids, types = self.cut(pairs, self.max_tokens)
        length = max(map(len, ids))
        tokens, mask = padded(ids, len(ids), length)
        return np.asarray(self(tokens, mask, padded(types, len(ids), length)[0])[:, 0], np.float32)


def read_head(
    tensors: Mapping[str, Stored], config: EncoderConfig, values: Mapping[str, object], path: Path, dtype: DTypeLike
) -> tuple[Head, Pooling]:
    """The judge of a checkpoint for sequence classification, and the pooling before it.

    Raises:
      ShapeError: a tensor is missing or of another shape.
      UnsupportedError: there are more labels than one, or the encoder has no such judge.
    """
    reader, hidden = TensorReader(tensors, "", dtype), config.hidden_size
    if isinstance(config, ModernBertConfig):
        names, mode = ("head.dense", "classifier"), values.get("classifier_pooling", "cls")
        if mode not in ("cls", "mean") or values.get("classifier_activation", "gelu") != "gelu":
            raise UnsupportedError(
                f"{path}: `classifier_pooling` is {mode!r} and `classifier_activation` "
                f"{values.get('classifier_activation', 'gelu')!r}; 'cls' or 'mean', and 'gelu', are computed."
            )
    elif isinstance(config, BertConfig):
        bare = config.model_type == "bert"
        names = ("bert.pooler.dense", "classifier") if bare else ("classifier.dense", "classifier.out_proj")
        mode = "cls"
    else:
        raise UnsupportedError(
            f"{path}: a {config.model_type} model for sequence classification is not computed; BERT, XLM-R and "
            "ModernBERT are, and decoders that answer yes or no."
        )
    last = tensors.get(f"{names[1]}.weight")
    if last is not None and last.shape[0] != 1:
        raise UnsupportedError(f"{path}: the model has {last.shape[0]} labels; a model that judges pairs has 1.")
    bias = config.classifier_bias if isinstance(config, ModernBertConfig) else True
    norm = reader.norm("head.norm", hidden, config.norm_bias) if isinstance(config, ModernBertConfig) else None
    head = Head(reader.linear(hidden, hidden, names[0], bias=bias), norm, reader.linear(hidden, 1, names[1]))
    return head, Pooling(mode, normalize=False)


def _activation(values: Mapping[str, object], directory: Path) -> str:
    """The function of the logit, as sentence-transformers names it; by default the sigmoid."""
    settings, path = values.get("sentence_transformers"), directory / "config_sentence_transformers.json"
    name = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    name = name or values.get("sbert_ce_default_activation_function")
    if name is None and path.exists():
        name = read_json(path).get("activation_fn")
    kind = "Sigmoid" if name is None else str(name).rsplit(".", 1)[-1]
    if kind not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{directory}: the activation of scores is {name!r:.100}; {' or '.join(_ACTIVATIONS)} is computed."
        )
    return kind
