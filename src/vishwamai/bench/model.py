"""The real model: all-MiniLM-L6-v2 on our operations, its embeddings held against other programs, its speed against
plain jax.nn.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.bench.numbers import with_float64
from vishwamai.measure.timing import Timing, side_by_side
from vishwamai.models import bert, minilm

NAME = "all-MiniLM-L6-v2"
COSINE = 0.9999
"""Least cosine between our embedding of a sentence and another program's."""
_EXACT = 32
"""Sentences that are embedded in float64 too."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near our embeddings are to another program's: over `sentences` of them, the least cosine and the largest
    difference of any number.
    """

    peer: str
    sentences: int
    cosine: float
    error: float

    @property
    def right(self) -> bool:
        return self.cosine > COSINE


@dataclasses.dataclass(frozen=True)
class ModelSpeed:
    """Seconds for a batch of `batch` sentences padded to `tokens` each, by who computes it."""

    batch: int
    tokens: int
    timings: dict[str, Timing]

    @property
    def sentences_per_second(self) -> dict[str, float]:
        return {name: self.batch / timing.median for name, timing in self.timings.items()}


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """The model's part of a report; `speeds` is empty where an agreement is not right."""

    agreements: tuple[Agreement, ...]
    speeds: tuple[ModelSpeed, ...]
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return all(agreement.right for agreement in self.agreements)


def _agreement(peer: str, ours: np.ndarray, theirs: np.ndarray) -> Agreement:
    theirs = theirs.astype(np.float64)
    cosine = (ours * theirs).sum(-1) / (np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1))
    return Agreement(peer, len(ours), float(cosine.min()), float(np.abs(ours - theirs).max()))


def _float64(texts: Sequence[str]) -> np.ndarray:
    """Embeddings by plain jax.nn in float64, on the CPU."""
    with with_float64(), jax.enable_x64(True):
        exact = minilm.load(jnp.float64, bert.PLAIN)
        return np.asarray(exact(*exact.tokenize(texts)))


def torch_why_not() -> str | None:
    """None where transformers and torch can run the same model, else what is missing."""
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"not compared with transformers: {' and '.join(lacking)} not installed" if lacking else None


@functools.cache
def _torch_model() -> tuple[object, Callable[..., np.ndarray]]:
    """(tokenizer, embed(batch)) of transformers, with the mean pooling of the model's own card."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = str(minilm.directory())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def embed(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
            weights = batch["attention_mask"][:, :, None].to(hidden.dtype)
            mean = (hidden * weights).sum(1) / weights.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1).numpy()

    return tokenizer, embed


def torch_embeddings(texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
    """Embeddings of sentences by transformers and torch: the tokenizer, the model and the pooling are all theirs."""
    tokenizer, embed = _torch_model()
    parts = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(  # type: ignore[operator]
            list(texts[start : start + batch_size]),
            padding=True,
            truncation=True,
            max_length=minilm.MAX_TOKENS,
            return_tensors="pt",
        )
        parts.append(embed(dict(batch)))
    return np.concatenate(parts)


def _torch_call(tokens: np.ndarray, mask: np.ndarray) -> Callable[[], object]:
    import torch

    _, embed = _torch_model()
    batch = {
        "input_ids": torch.from_numpy(tokens).long(),
        "attention_mask": torch.from_numpy(mask).long(),
        "token_type_ids": torch.zeros(tokens.shape, dtype=torch.long),
    }
    return lambda: embed(batch)


def run(batches: Sequence[int] = (1, 32), seconds: float = 20.0) -> ModelResult:
    """Embeds the sentences that ship with the package, compares, and times.

    Args:
      batches: batch sizes to time.
      seconds: bound of the timing.

    Raises:
      DeviceError: the model is not installed; `minilm.why_not` asks without raising.
    """
    texts = minilm.sentences()
    ours, plain = minilm.load(), minilm.load(operations=bert.PLAIN)
    embedded = ours.embed(texts)
    agreements = [_agreement("plain jax.nn in float64", embedded[:_EXACT], _float64(texts[:_EXACT]))]
    reason = torch_why_not()
    if reason is None:
        agreements.append(_agreement("transformers and torch", embedded, torch_embeddings(texts)))
    notes = () if reason is None else (reason,)
    if not all(agreement.right for agreement in agreements):
        return ModelResult(tuple(agreements), (), notes)
    ordered = sorted(texts, key=len)
    speeds = []
    for batch in batches:
        start = (len(ordered) - min(batch, len(ordered))) // 2
        tokens, mask = ours.tokenize(ordered[start : start + batch])
        placed = jax.device_put((tokens, mask))
        calls: dict[str, Callable[[], object]] = {
            "vishwamai": lambda placed=placed: ours(*placed).block_until_ready(),
            "jax.nn": lambda placed=placed: plain(*placed).block_until_ready(),
        }
        if reason is None and jax.default_backend() == "cpu":
            calls["torch"] = _torch_call(tokens, mask)
        for call in calls.values():
            call()
        timings = side_by_side(calls, seconds / len(batches), rounds=60)
        speeds.append(ModelSpeed(tokens.shape[0], tokens.shape[1], timings))
    return ModelResult(tuple(agreements), tuple(speeds), notes)
