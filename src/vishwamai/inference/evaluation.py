"""How well a model predicts a text, in the very form in which it is served: packed weights, and pages of keys and
values in their dtype.

A long text is cut into windows that overlap. Each window goes through `Decoder.step` by steps over pages, as a prompt
does in the engine, and every token is scored once: in the first window that has it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import PyTree
from vishwamai.inference.pools import calibration_tokens, kv_dtype_of, make_pools
from vishwamai.models import Decoder, PagedBatch
from vishwamai.parallel.optimization import Optimization

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float

    from vishwamai.models.tokenizer import Tokenizer

_ROWS = 128
"""Rows of logits that are computed at once."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
      tokens: int, number of tokens that were predicted: those after the first of each text.
      loss: float, mean negative log probability of them, in nats.
      reference_loss: float, that of the reference model; None without one, as the next two.
      kl: float, mean Kullback-Leibler divergence from the reference's distribution of the next token, in nats.
      agreement: float, share of the tokens whose most likely prediction is that of the reference.
    """

    tokens: int
    loss: float
    reference_loss: float | None = None
    kl: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return math.exp(min(self.loss, 700.0))

    @property
    def reference_perplexity(self) -> float | None:
        """That of the reference model."""
        return None if self.reference_loss is None else math.exp(min(self.reference_loss, 700.0))


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `[start, end)` of a text, of which those from `first` on are scored."""

    start: int
    first: int
    end: int


def windows(count: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a text of `count` tokens, each of at most `context` tokens, that begin `stride` tokens apart.

    >>> [(w.start, w.first, w.end) for w in windows(count=10, context=6, stride=3)]
    [(0, 1, 6), (3, 6, 9), (6, 9, 10)]
    """
    start, scored = 0, 0
    while scored < count:
        end = min(start + context, count)
        yield Window(start, max(scored, start + 1), end)
        start, scored = start + stride, end


class Passes:
    """A model that computes windows by steps over pages, one window at a time.

    Args:
      model: decoder, packed or not.
      context: int, most tokens of a window.
      kv_dtype: dtype of keys and values, as of `Engine`.
      page_size: int, tokens of a page.
      step_tokens: int, tokens of a step.
      tokenizer: tokenizer of the sample by which the scales of 8-bit pages are measured; None draws random tokens.
      optimization: keys of the kernels.
    """

    def __init__(
        self,
        model: Decoder,
        context: int,
        kv_dtype: DTypeLike | None = None,
        page_size: int = 16,
        step_tokens: int = 512,
        tokenizer: Tokenizer | None = None,
        optimization: Optimization | None = None,
    ):
        self.model, self.step_tokens = model, min(step_tokens, context)
        self.kernels = (optimization or Optimization()).kernels
        stored = kv_dtype_of(model.dtype if kv_dtype is None else kv_dtype)
        pages = -(-context // page_size)
        table = np.arange(pages, dtype=np.int32)[None]
        sample = calibration_tokens(model.config.vocab_size, min(256, model.config.max_positions), tokenizer)
        with self.kernels():
            self._pools: tuple[PyTree, ...] = make_pools(model, page_size, pages, stored, sample, num_states=1)

        def step(
            pools: tuple[PyTree, ...],
            model: Decoder,
            tokens: jax.Array,
            start: jax.Array,
            count: jax.Array,
            length: jax.Array,
        ) -> tuple[jax.Array, tuple[PyTree, ...]]:
            cu_q_lens = jnp.stack([jnp.zeros_like(count), count])
            kv_lens, states = (start + count)[None], jnp.zeros((2, 1), jnp.int32)
            sizes = {"max_q_len": self.step_tokens, "lengths": length[None], "states": states}
            batch = PagedBatch(kv_lens, jnp.asarray(table), cu_q_lens, **sizes)
            with self.kernels():
                return model.step(tokens, pools, batch)

        self._step = jax.jit(step, donate_argnums=0)

    def hidden(self, tokens: Sequence[int], start: int) -> Float[Array, "step_tokens hidden"]:
        """Hidden states of one step of a window, whose earlier tokens are in the pages; rows past its end are padding.

        Args:
          tokens: token ids of the whole window.
          start: int, place of the step's first token.
        """
        part = tokens[start : start + self.step_tokens]
        padded = np.zeros(self.step_tokens, np.int32)
        padded[: len(part)] = part
        sizes = (np.int32(start), np.int32(len(part)), np.int32(len(tokens)))
        hidden, self._pools = self._step(self._pools, self.model, padded, *sizes)
        return hidden


def _scores(
    model: Decoder,
    hidden: jax.Array,
    reference: Decoder | None,
    reference_hidden: jax.Array,
    rows: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, ...]:
    """Losses of the targets `[rows]`; with a reference its losses, the divergences from it, and the agreements, too."""
    logprobs = jax.nn.log_softmax(model.logits(hidden[rows]).astype(jnp.float32))
    losses = -jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    if reference is None:
        return (losses,)
    expected = jax.nn.log_softmax(reference.logits(reference_hidden[rows]).astype(jnp.float32))
    of_reference = -jnp.take_along_axis(expected, targets[:, None], axis=1)[:, 0]
    difference = jnp.where(expected > -jnp.inf, expected - logprobs, 0.0)
    kl = jnp.sum(jnp.exp(expected) * difference, axis=1)
    return losses, of_reference, kl, jnp.argmax(logprobs, axis=1) == jnp.argmax(expected, axis=1)


@checked
def evaluate(
    passes: Passes,
    texts: Sequence[Sequence[int]],
    *,
    context: int,
    stride: int,
    begin: Sequence[int] = (),
    reference: Passes | None = None,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Loss of texts, each on its own, and the distance from a reference model.

    Args:
      passes: model that is evaluated.
      texts: token ids of each text, at least two.
      context: int, most tokens of a window.
      stride: int, tokens from the beginning of a window to that of the next. With less than `context`, every token
        after the first is scored, by at least `context - stride` tokens before it.
      begin: ids with which texts begin, such as BOS; later windows begin with them, too.
      reference: model with the same vocab to compare with, or None.
      on_tokens: function that gets the number of tokens that were scored so far, and of all.

    Raises:
      ShapeError: a text has no token to predict, an option does not fit, or a loss is not finite.

    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64})
    >>> passes = Passes(Decoder(config, rngs=nnx.Rngs(0)), context=8)
    >>> result = evaluate(passes, [[1, 2, 3, 4] * 5], context=8, stride=4)
    >>> result.tokens, 60 < result.perplexity < 68
    (19, True)
    """
    lead = len(begin)
    if context < lead + 2 or not 1 <= stride <= context - lead:
        raise ShapeError(
            f"evaluate: `context` is {context} and `stride` {stride}; pass a context of at least {lead + 2} tokens, "
            f"and a stride of 1 to {max(1, context - lead)}."
        )
    if not texts or any(len(text) < 2 for text in texts):
        raise ShapeError("evaluate: a text has fewer than 2 tokens, and the first is not predicted; pass longer ones.")
    vocab = passes.model.config.vocab_size
    if reference is not None and reference.model.config.vocab_size != vocab:
        raise ShapeError(
            f"evaluate: the model has {vocab} tokens, and the reference {reference.model.config.vocab_size}; pass a "
            "reference with the same vocab."
        )
    score = jax.jit(_scores)
    total = sum(len(text) - 1 for text in texts)
    sums, done = np.zeros(4), 0
    for text in texts:
        body = text[lead:] if tuple(text[:lead]) == tuple(begin) else text
        lead_tokens = list(text[: len(text) - len(body)])
        for window in windows(len(body), context - len(lead_tokens), stride):
            tokens = [*lead_tokens, *body[window.start : window.end]]
            offset = len(lead_tokens) - window.start
            first = 1 if window.start == 0 else window.first + offset
            for values in _window(passes, reference, score, tokens, first):
                sums[: len(values)] += np.sum(values, axis=1, dtype=np.float64)
                done += values.shape[1]
                on_tokens(done, total)
    means = (sums / done).tolist()
    if not np.isfinite(means).all():
        raise ShapeError("evaluate: a loss is not finite; check the weights and the dtype, or evaluate in float32.")
    return Evaluation(done, means[0], *(means[1:] if reference is not None else ()))


def _window(
    passes: Passes,
    reference: Passes | None,
    score: Callable[..., tuple[jax.Array, ...]],
    tokens: Sequence[int],
    first: int,
) -> Iterator[np.ndarray]:
    """The scores `[1 or 4, count]` of a window's tokens from number `first` on, part by part."""
    for start in range(0, len(tokens), passes.step_tokens):
        hidden = passes.hidden(tokens, start)
        reference_hidden = None if reference is None else reference.hidden(tokens, start)
        end = min(start + passes.step_tokens, len(tokens) - 1)  # of the rows that predict a token of the window
        most = min(_ROWS, passes.step_tokens)
        for row in range(max(start, first - 1), end, most):
            count = min(most, end - row)
            rows, targets = np.zeros(most, np.int32), np.zeros(most, np.int32)
            rows[:count] = np.arange(row, row + count) - start
            targets[:count] = tokens[row + 1 : row + count + 1]
            model = None if reference is None else reference.model
            with passes.kernels():
                scores = score(passes.model, hidden, model, reference_hidden, rows, targets)
            yield np.stack([np.asarray(values, np.float64)[:count] for values in scores])
