"""Sentence encoders: an encoder or a decoder with its tokenizer and its pooling, from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.pallas import round_up
from vishwamai.core.types import PyTree
from vishwamai.models import bert
from vishwamai.models.adapters import read_modules
from vishwamai.models.encoders import EncoderConfig, read_encoder_config
from vishwamai.models.hub import local_model
from vishwamai.models.pooling import Pooling
from vishwamai.models.rotary_bert import RotaryBertConfig
from vishwamai.models.sentence_files import Dense, Normalize, read_sentence_files
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    import tokenizers
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Float, Int

_STEP = 16
"""Sentences are padded to a multiple of this, so that a text needs few compilations."""


@functools.partial(jax.jit, static_argnames=("config", "pooling", "operations"))
def _embed(
    parameters: PyTree,
    head: tuple[Dense | Normalize, ...],
    tokens: jax.Array,
    mask: jax.Array,
    *,
    config: Any,
    pooling: Pooling,
    operations: bert.Operations,
) -> jax.Array:
    vectors = pooling(config.encode(parameters, tokens, mask, None, operations), mask)
    for module in head:
        vectors = module(vectors)
    return vectors


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """An encoder with its tokenizer; `from_pretrained` makes it.

    Attributes:
      parameters: the encoder's tree of parameters, or the decoder.
      config: sizes of it.
      tokenizer: a `tokenizers.Tokenizer` that neither cuts nor pads.
      max_tokens: the longest text, special tokens included.
      pooling: function from the states of a text to a vector.
      operations: functions that BERT calls: `bert.OURS`, or `bert.PLAIN`.
      head: modules behind the pooling, in their order.
      prompts: texts that come before an input, by name.
      default_prompt: name of the prompt where none is asked for, or None.
      tasks: parameters with the adapter of a task, by the prompt's name.
    """

    parameters: PyTree
    config: EncoderConfig
    tokenizer: tokenizers.Tokenizer
    max_tokens: int
    pooling: Pooling = Pooling()
    operations: bert.Operations = bert.OURS
    head: tuple[Dense | Normalize, ...] = ()
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    tasks: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: DTypeLike = jnp.float32, operations: bert.Operations = bert.OURS
    ) -> SentenceEncoder:
        """Reads a directory: `config.json`, safetensors, `tokenizer.json`, and the files of sentence-transformers
        (`modules.json`, `sentence_bert_config.json`, prompts) where they exist. Without `modules.json` a vector is the
        mean of its tokens and is not normalized, as sentence-transformers does it.

        BERT, RoBERTa, XLM-R, ModernBERT, GTE, Nomic BERT and Jina Embeddings v3 are read, and decoders, such as Qwen3
        and Gemma 3 with attention in both directions. Folders with adapters of peft are those of tasks: a text whose
        prompt has the folder's name is computed with its adapter (`retrieval_query` is that of "retrieval.query").

        Args:
          directory: folder of the files, or a name of the Hugging Face Hub, "ORG/NAME@REVISION".
          dtype: dtype of parameters and activations; vectors are float32 or wider.
          operations: functions that the encoder calls.

        Raises:
          ShapeError: a file or a tensor is missing, damaged, or contradicts `config.json`; the text names it.
          UnsupportedError: the model is not one that the encoder computes.
        """
        directory = local_model(directory)
        files = read_sentence_files(directory, dtype)
        config = read_encoder_config(files.folder)
        tokenizer = read_raw_tokenizer(files.folder, config.vocab_size)
        length = longest_text(files.folder, config)
        parameters: PyTree = config.read(files.folder, dtype)
        prompts, default, tasks = dict(files.prompts), files.default_prompt, {}
        folders = {path.parent.name: path.parent for path in files.folder.glob("*/adapter_config.json")}
        if folders and not isinstance(config, RotaryBertConfig):
            raise UnsupportedError(
                f"{files.folder}: {config.model_type} has no adapters by task; Jina Embeddings v3 has."
            )
        for name in {*folders, *files.names}:
            folder = folders.get(name.replace(".", "_").replace("-", "_"))
            if folder is not None and isinstance(config, RotaryBertConfig):
                prompts.setdefault(name, "")
                tasks[name] = config.adapted(parameters, read_modules(folder), folder)
        default = files.default_name if files.default_name in tasks else default
        behind: Any = (files.pooling, operations, files.head, prompts, default, tasks)
        return cls(parameters, config, tokenizer, length, *behind)

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

    def __call__(self, tokens: Any, mask: Any, task: str | None = None) -> Any:
        """Vectors `[batch, hidden]` of tokenized sentences, by the adapter of a task if there is one of that name."""
        options: Any = {"config": self.config, "pooling": self.pooling, "operations": self.operations}
        parameters = self.tasks.get(task or "", self.parameters)
        return _embed(parameters, self.head, tokens, mask, **options)

    def prompt(self, name: str | None = None) -> str:
        """The text that comes before an input.

        Args:
          name: a name of `prompts`; None: that of `default_prompt`, if there is one.

        Raises:
          ShapeError: there is no prompt of that name.
        """
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            raise ShapeError(f"the model has no prompt {name[:100]!r}; its prompts are {names}.")
        return "" if name is None else self.prompts[name]

    def embed(
        self, texts: Sequence[str], batch_size: int = 32, prompt_name: str | None = None
    ) -> Float[np.ndarray, "texts hidden"]:
        """Vectors of sentences, in their order; sentences of like length share a batch.

        Args:
          texts: the sentences.
          batch_size: number of sentences in a batch.
          prompt_name: argument of `prompt`.

        Returns:
          float32 `[len(texts), hidden]`; where vectors are normalized, the dot product of two rows is their cosine.
        """
        prompt = self.prompt(prompt_name)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.zeros((len(texts), self.features), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            tokens, mask = self.tokenize([prompt + texts[i] for i in rows])
            out[rows] = np.asarray(self(tokens, mask, prompt_name or self.default_prompt), np.float32)
        return out

    @property
    def features(self) -> int:
        """Features of a vector."""
        sizes = [module.linear.weight.shape[1] for module in self.head if isinstance(module, Dense)]
        return sizes[-1] if sizes else self.config.hidden_size


def padded(
    ids: Sequence[Sequence[int]], rows: int, length: int
) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
    """Token ids in an array of zeros, int32 `[rows, length]`, and where they are."""
    tokens, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, sentence in enumerate(ids):
        tokens[row, : len(sentence)] = sentence
        mask[row, : len(sentence)] = True
    return tokens, mask


def read_raw_tokenizer(directory: Path, vocab: int) -> tokenizers.Tokenizer:
    """The `tokenizers.Tokenizer` of a directory, which neither cuts nor pads.

    Args:
      directory: folder of `tokenizer.json`.
      vocab: tokens of the model.

    Raises:
      ShapeError: the file is missing or damaged, or has more tokens than the model.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise ShapeError(f"{path}: the file is missing; the encoder needs the tokenizer. Download it again.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ShapeError(f"{path}: the file is not a tokenizer ({error}); download it again.") from error
    if tokenizer.get_vocab_size() > vocab:
        raise ShapeError(
            f"{path}: the tokenizer has {tokenizer.get_vocab_size()} tokens, but config.json says `vocab_size` = "
            f"{vocab}; the two do not belong together."
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def longest_text(directory: Path, config: EncoderConfig) -> int:
    """Tokens of the longest text that an encoder's directory allows.

    Raises:
      ShapeError: `sentence_bert_config.json` is damaged, or allows more than the model has positions for.
    """
    path, most = directory / "sentence_bert_config.json", config.max_tokens
    length = read_json(path).get("max_seq_length") if path.exists() else None
    if length is None:
        settings = directory / "tokenizer_config.json"
        length = read_json(settings).get("model_max_length") if settings.exists() else None
        return min(most, length) if isinstance(length, int) and length > 0 else most
    positions = getattr(config, "max_position_embeddings", most)
    if not isinstance(length, int) or not 0 < length <= positions:
        raise ShapeError(
            f"{path}: `max_seq_length` is {length!r}; expected 1 to {positions}, config.json's "
            "`max_position_embeddings`."
        )
    return min(length, most)
