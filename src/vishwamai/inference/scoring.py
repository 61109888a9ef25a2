"""Log probabilities of the tokens of prompts: one pass over each, next to the engine's steps."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.inference.answers import TokenLogprobs
from vishwamai.inference.sampling import MAX_LOGPROBS
from vishwamai.models.embedding import padded
from vishwamai.parallel.optimization import Optimization

if TYPE_CHECKING:
    from vishwamai.models import Decoder

_SHORTEST, _TOKENS = 32, 4096
"""Least length and tokens of a pass."""

_ROWS = 32
"""Rows of logits at once. Steps of the engine go on between two such parts, so they are not large."""


@dataclasses.dataclass(frozen=True)
class Score(TokenLogprobs):
    """Log probabilities at one place of a prompt; `rank` is 1 where the token is the most likely one."""

    rank: int = 0


class Scorer:
    """Scores the tokens of prompts; any thread may call it.

    Args:
      model: the engine's model.
      max_length: tokens of a prompt.
      optimization: keys of the kernels.
      split: the model lies on several devices, where prompts are not scored.
    """

    def __init__(self, model: Decoder, max_length: int, optimization: Optimization | None = None, split: bool = False):
        keys = optimization or Optimization()
        self._model, self._split, self._lock = model, split, threading.Lock()
        self._lengths = [_SHORTEST]
        while self._lengths[-1] < max_length:
            self._lengths.append(min(2 * self._lengths[-1], max_length))

        def scored(model: Decoder, hidden: jax.Array, rows: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
            with keys.kernels():
                logits = model.logits(hidden.reshape(-1, hidden.shape[-1])[rows]).astype(jnp.float32)
            logprobs = jax.nn.log_softmax(logits, axis=1)
            values, top = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
            chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=1)
            return chosen[:, 0], 1 + jnp.sum(logprobs > chosen, axis=1), top, values

        def hidden(model: Decoder, tokens: jax.Array) -> jax.Array:
            with keys.kernels():
                return model(tokens)

        self._hidden, self._scored = jax.jit(hidden), jax.jit(scored)

    def __call__(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[Score | None]]:
        """The scores of each prompt's tokens, None for its first.

        Args:
          prompts: token ids.
          count: most likely tokens of each place.

        Raises:
          UnsupportedError: the model is split over devices.
        """
        if self._split:
            raise UnsupportedError(
                "log probabilities of prompts are not computed where --mesh splits the model; leave out `echo` with "
                "`logprobs`, and `prompt_logprobs`."
            )
        scores: list[list[Score | None]] = [[None] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        while order:
            length = next(n for n in self._lengths if n >= len(prompts[order[0]]))
            most = max(1, _TOKENS // length)
            group = [i for i in order[:most] if len(prompts[i]) <= length]
            order = order[len(group) :]
            with self._lock:  # the memory of one pass
                self._score([prompts[i] for i in group], [scores[i] for i in group], length, count)
        return scores

    def _score(self, prompts: list[Sequence[int]], scores: list[list[Score | None]], length: int, count: int) -> None:
        tokens, _ = padded(prompts, 1 if len(prompts) == 1 else max(1, _TOKENS // length), length)
        hidden = self._hidden(self._model, jnp.asarray(tokens))
        places = [(row, position) for row, prompt in enumerate(prompts) for position in range(1, len(prompt))]
        for first in range(0, len(places), _ROWS):
            part = places[first : first + _ROWS]
            rows, targets = np.zeros(_ROWS, np.int32), np.zeros(_ROWS, np.int32)
            rows[: len(part)] = [row * length + position - 1 for row, position in part]
            targets[: len(part)] = [prompts[row][position] for row, position in part]
            chosen, rank, top, values = map(np.asarray, self._scored(self._model, hidden, rows, targets))
            for i, (row, position) in enumerate(part):
                best = tuple(zip(top[i, :count].tolist(), values[i, :count].tolist()))
                scores[row].append(Score(prompts[row][position], float(chosen[i]), best, int(rank[i])))
