"""Preferences: of two answers to a prompt, the one that people chose becomes likelier than the other.

Rafailov et al., "Direct Preference Optimization" (2023). The model at the start is the reference; what it thinks of the
answers is computed once, before the first step, so it takes no memory later. A row holds both answers with their
prompts, as segments 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import caches
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import ModelConfig
from vishwamai.training.data import Batch, Corpus, PackedRows
from vishwamai.training.head import cross_entropy
from vishwamai.training.sharding import Layout
from vishwamai.training.together import as_first, first_alone, on_host
from vishwamai.training.tokens import as_npy


def answer_logprobs(
    config: ModelConfig, head: AnyArray, hidden: AnyArray, batch: dict[str, PyTree], axes: MeshAxes = ONE_DEVICE
) -> AnyArray:
    """The log-probability of each answer, the sum over its tokens: float32 `[rows, 2]`.

    Args:
      config: configuration of the model. head: weight that makes logits, `[vocab, hidden]`.
      hidden: `[rows, seq, hidden]`, of the model after its last norm.
      batch: `labels` and `segment_ids`, `[rows, seq]`.
      axes: inside `shard_map`, the mesh axes over which the model and its rows are split.
    """
    losses = cross_entropy(config, hidden, head, batch["labels"], axes, reduction="none")
    totals = [jnp.sum(jnp.where(batch["segment_ids"] == s, losses, 0.0), axis=1) for s in (1, 2)]
    return -axes.row_total(jnp.stack(totals, axis=1))


def preference_loss(logprobs: jax.Array, reference: jax.Array, beta: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-log sigmoid of beta times how much more the model prefers the chosen answer than the reference does.

    Args:
      logprobs: `[rows, 2]` of the model: the chosen answer, the rejected one.
      reference: the same of the reference.
      beta: factor of the margin; a larger one stays closer to the reference.

    Returns:
      The sum over rows, and sums to report: `loss`, `accuracy` (rows whose margin is above 0) and `margin`.

    >>> total, sums = preference_loss(jnp.array([[-1.0, -4.0]]), jnp.array([[-2.0, -3.0]]), 0.5)
    >>> round(float(total), 3), float(sums["accuracy"]), float(sums["margin"])
    (0.313, 1.0, 1.0)
    """
    margin = beta * ((logprobs[:, 0] - reference[:, 0]) - (logprobs[:, 1] - reference[:, 1]))
    total = jnp.sum(-jax.nn.log_sigmoid(margin))
    return total, {"loss": total, "accuracy": jnp.sum((margin > 0).astype(jnp.float32)), "margin": jnp.sum(margin)}


def with_reference(
    corpus: Corpus, score: Callable[[Batch], object], layout: Layout, batch_size: int, folder: Path
) -> Corpus:
    """The corpus with what the reference thinks of every pair, computed once into `folder`. Every process calls it, and
    process 0 writes.

    Args:
      corpus: result of `data.prepare`.
      score: a batch to `[rows, 2]`, `answer_logprobs` of the reference.
      layout: the devices.
      batch_size: rows of a batch.
      folder: directory of the run's data.
    """

    process, processes = layout.reader
    mine = range(batch_size * process // processes, batch_size * (process + 1) // processes)

    def write(path: Path, parts: list[np.ndarray], count: int) -> None:
        scores = np.concatenate([np.asarray(part, np.float32) for part in parts])[:count]
        with caches.writing(path, "train"):
            caches.write(path, as_npy(scores))

    def filled(kind: str, number: int, rows: PackedRows) -> PackedRows:
        path = folder / f"reference-{kind}-{number}.npy"
        if not as_first(path.exists()):
            parts = []
            for start in range(0, len(rows), batch_size):
                # The last batch is filled up with the first rows, so that all have one shape.
                entries = [rows[(start + i) % len(rows)] for i in mine]
                batch = {name: np.stack([entry[name] for entry in entries]) for name in entries[0]}
                parts.append(on_host(score(layout.put_batch(batch))))
            first_alone(lambda: write(path, parts, len(rows)))
        return PackedRows(rows.tokens, rows.plan, rows.length, np.load(path))

    training = tuple(filled("training", i, rows) for i, rows in enumerate(corpus.training))
    held_out = tuple(filled("held-out", i, rows) for i, rows in enumerate(corpus.held_out))
    return Corpus(training, held_out, corpus.weights, corpus.bad)
