"""transformers with torch as a contestant of `serve.py`: `python benchmarks/serve.py DIR --contestant
engines.torch_transformers`. Needs `torch` and `transformers`, and nothing of this package.

Sequences that decode at once are one batch, and have the same length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

FORMATS = ("bf16", "f32")
SETTINGS = ("sdpa", "eager")
"""Ways of attention."""


class Transformers:
    """A model, and keys and values by the sequences that they belong to."""

    def __init__(self, folder: str, dtype: torch.dtype, attention: str):
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self._model.eval()
        self._caches: dict[tuple[int, ...], Any] = {}

    @torch.inference_mode()
    def _logits(self, sequences: tuple[int, ...], tokens: Sequence[Sequence[int]], keep: int = 1) -> np.ndarray:
        """Logits `[sequences, keep, vocab]` after the last `keep` tokens of each; 0 stands for all."""
        cache = self._caches.get(sequences)
        out = self._model(torch.tensor(tokens), past_key_values=cache, use_cache=True, logits_to_keep=keep)
        self._caches[sequences] = out.past_key_values
        return out.logits.float().numpy()

    def prefill(self, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """The logits after a prompt."""
        return self._logits((sequence,), [list(tokens)])[0, 0]

    def decode(self, tokens: dict[int, int]) -> dict[int, int]:
        """One more token of each sequence, the largest logit."""
        sequences = tuple(tokens)
        if sequences not in self._caches:
            self._caches[sequences] = _batched([self._caches.pop((sequence,)) for sequence in sequences])
        logits = self._logits(sequences, [[token] for token in tokens.values()])
        return dict(zip(sequences, logits[:, 0].argmax(axis=1).tolist()))

    def loss(self, tokens: Sequence[int]) -> float:
        """Mean negative log probability of the tokens after the first, in nats."""
        logits = self._logits((0,), [list(tokens)], keep=0)[0, :-1].astype(np.float64)
        self.reset()
        targets = logits[np.arange(len(logits)), list(tokens[1:])]
        return float(np.mean(np.logaddexp.reduce(logits, axis=1) - targets))

    def reset(self) -> None:
        """Forgets all sequences."""
        self._caches.clear()


def _batched(caches: Sequence[Any]) -> Any:
    """The keys and values of several sequences of one length as those of a batch."""
    batch = copy.copy(caches[0])
    batch.layers = [copy.copy(layer) for layer in batch.layers]
    for i, layer in enumerate(batch.layers):
        layer.keys = torch.cat([cache.layers[i].keys for cache in caches])
        layer.values = torch.cat([cache.layers[i].values for cache in caches])
    return batch


def load(
    folder: str, format: str, threads: int, max_sequences: int, max_tokens: int, setting: str = "sdpa"
) -> Transformers:
    """transformers on a directory as Hugging Face writes it."""
    del max_sequences, max_tokens
    torch.set_num_threads(threads)
    return Transformers(folder, torch.bfloat16 if format == "bf16" else torch.float32, setting)
