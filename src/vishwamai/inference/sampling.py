"""How the next token is chosen: the options of a request, and their arithmetic on the device.

The order is that of Hugging Face's processors: logit bias, penalties, the grammar's mask, temperature, top-k, top-p,
min-p (`logits.py`), a draw. The draw is Gumbel-max (argmax of logits plus Gumbel noise) with the key
`fold_in(fold_in(key(seed), choice), position)`, so it depends on the request alone and on nothing else in the batch.

An accelerator computes all rows at once, and what one row needs is computed for all. A CPU computes one row after
another, each with what it needs alone.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.inference.logits import argmax, penalized, shaped

if TYPE_CHECKING:
    from jax import Array

MAX_BIASES = 300  # of OpenAI's interface, as MAX_LOGPROBS
MAX_LOGPROBS = 20
NO_TOKEN = -1  # drawn from logits that have no finite maximum


@checked
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen, and when they end.

    Args:
      max_new_tokens: how many at most; None: as many as the sequence has room for.
      temperature: logits are divided by it; 0 takes the largest.
      top_k: only the k largest logits; 0 means all. Equal ones at the border all stay.
      top_p: only the fewest tokens whose probabilities sum to at least this; 1 means all.
      min_p: only tokens of at least this part of the largest probability.
      repetition_penalty: positive logits of tokens seen, in prompt or answer, are divided by it, negative ones
        multiplied (Keskar et al., 2019); 1 means none.
      presence_penalty: subtracted once from the logit of each token of the answer so far.
      frequency_penalty: subtracted as often as the token occurs in the answer so far.
      logit_bias: token id -> what is added to its logit.
      stop: texts that end the answer; they are not part of it.
      stop_token_ids: tokens that end the answer, besides the model's own; they are not part of its text.
      ignore_eos: the model's own end tokens do not end the answer.
      min_new_tokens: so many tokens come before one that would end the answer can be drawn; stop texts end it earlier.
      n: how many answers.
      logprobs: log probabilities, before all of the above, of so many most likely tokens at each place; None: none
        at all, 0: the chosen token's alone.
      seed: makes the draw repeatable; None draws another each time.

    Raises:
      ShapeError: a value is outside its range; the text names it and the range.

    >>> Sampling(temperature=0.7, top_p=0.9).greedy, Sampling().greedy
    (False, True)
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (1, float("inf")),
            "min_new_tokens": (0, float("inf")),
            "temperature": (0.0, 100.0),
            "top_k": (0, float("inf")),
            "top_p": (1e-6, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (1e-2, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "n": (1, 128),
            "logprobs": (0, MAX_LOGPROBS),
            "seed": (-(2**63), 2**63 - 1),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ShapeError(f"Sampling: `{name}` is {value}; pass a number from {least} to {most}.")
        if len(self.logit_bias) > MAX_BIASES:
            raise ShapeError(
                f"Sampling: `logit_bias` names {len(self.logit_bias)} tokens; pass at most {MAX_BIASES} of them."
            )
        barred = len(self.logit_bias) + len(self.stop_token_ids) + 32  # 32: the model's own end tokens
        if self.min_new_tokens and barred > MAX_BIASES:
            raise ShapeError(
                f"Sampling: `logit_bias` and `stop_token_ids` name {barred - 32} tokens; with `min_new_tokens`, "
                f"pass at most {MAX_BIASES - 32}."
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ShapeError(
                f"Sampling: `min_new_tokens` is {self.min_new_tokens}; pass at most `max_new_tokens`, "
                f"{self.max_new_tokens}."
            )
        for token, bias in self.logit_bias.items():
            if not isinstance(token, numbers.Integral):
                raise ShapeError(f"Sampling: `logit_bias` has {described(token)}; pass token ids, which are integers.")
            if not isinstance(bias, numbers.Real) or not -1e4 <= bias <= 1e4:
                raise ShapeError(f"Sampling: `logit_bias` of token {token} is {bias}; pass a number from -1e4 to 1e4.")
        if any(not text for text in self.stop):
            raise ShapeError("Sampling: `stop` contains an empty text; pass texts of at least one character.")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0

    def check_tokens(self, vocab: int) -> None:
        """Raises `ShapeError` if a token id that an option names is not of the vocab."""
        for label, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise ShapeError(f"Sampling: `{label}` names token {token}; ids are 0 to {vocab - 1}.")


class Rows(NamedTuple):
    """What `sample` needs of each row of logits; arrays `[rows]` unless another shape is given."""

    slot: AnyArray  # int32, the row of the history; out of range for a row that does not count
    position: AnyArray  # int32, of the token that is drawn, in its sequence
    prompt_length: AnyArray  # int32
    seed: AnyArray  # uint32
    choice: AnyArray  # uint32, which of a request's n answers
    temperature: AnyArray  # float32, as all below
    top_k: AnyArray  # int32, 0: all
    top_p: AnyArray
    min_p: AnyArray
    repetition: AnyArray
    presence: AnyArray
    frequency: AnyArray
    logprobs: AnyArray  # bool
    bias_tokens: AnyArray  # int32 [rows, MAX_BIASES], out of range where there is none
    bias_values: AnyArray  # float32 [rows, MAX_BIASES]
    proposal: AnyArray  # int32, the entry of `Proposals` that is checked here; -1: none
    rejects: AnyArray  # bool, proposals are checked by their probability, not by the noise of the draw (`drafting`)


class Proposals(NamedTuple):
    """Tokens that a draft model drew, and from what."""

    tokens: AnyArray  # int32 [proposals]
    logits: AnyArray  # float32 [proposals, vocab], of the distribution of each


class Sampled(NamedTuple):
    """What was drawn."""

    tokens: AnyArray  # int32 [rows]; `NO_TOKEN` where the logits are not numbers
    logprobs: AnyArray  # float32 [rows], of the tokens
    top_tokens: AnyArray  # int32 [rows, MAX_LOGPROBS], the most likely first; 0 where no row asked
    top_logprobs: AnyArray  # float32 [rows, MAX_LOGPROBS]


def empty_rows(rows: int, slots: int, vocab: int) -> Rows:
    """Rows, as numpy arrays, that draw the largest logit and count for nothing; the caller fills in those that do."""
    return Rows(
        slot=np.full(rows, slots, np.int32),
        position=np.zeros(rows, np.int32),
        prompt_length=np.zeros(rows, np.int32),
        seed=np.zeros(rows, np.uint32),
        choice=np.zeros(rows, np.uint32),
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition=np.ones(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        logprobs=np.zeros(rows, bool),
        bias_tokens=np.full((rows, MAX_BIASES), vocab, np.int32),
        bias_values=np.zeros((rows, MAX_BIASES), np.float32),
        proposal=np.full(rows, -1, np.int32),
        rejects=np.zeros(rows, bool),
    )


def set_row(rows: Rows, row: int, options: Sampling) -> None:
    """Writes a request's options to one row."""
    rows.rejects[row] = options.seed is None and not options.greedy
    # A device may count a denormal as zero in one place and not in another.
    rows.temperature[row] = options.temperature if options.temperature >= np.finfo(np.float32).tiny else 0.0
    rows.top_k[row] = options.top_k
    rows.top_p[row] = options.top_p
    rows.min_p[row] = options.min_p
    rows.repetition[row] = options.repetition_penalty
    rows.presence[row] = options.presence_penalty
    rows.frequency[row] = options.frequency_penalty
    rows.logprobs[row] = options.logprobs is not None
    if options.logit_bias:
        rows.bias_tokens[row, : len(options.logit_bias)] = list(options.logit_bias)
        rows.bias_values[row, : len(options.logit_bias)] = list(options.logit_bias.values())


def bar_tokens(rows: Rows, row: int, tokens: Collection[int], first: int) -> None:
    """Bars tokens from one row, by biases from entry `first` on."""
    rows.bias_tokens[row, first : first + len(tokens)] = list(tokens)
    rows.bias_values[row, first : first + len(tokens)] = -np.inf


def all_allowed(rows: int, vocab: int) -> np.ndarray:
    """The mask that forbids no token: int32 `[rows, ceil(vocab / 32)]`, bit t % 32 of word t // 32 for token t."""
    return np.full((rows, -(-vocab // 32)), -1, np.int32)


def sample(logits: Array, rows: Rows, history: Array, allowed: Array, proposals: Proposals | None = None) -> Sampled:
    """Draws a token for each row.

    Args:
      logits: `[rows, vocab]` float32.
      rows: the options of each row.
      history: `[slots, length]` int32, the tokens of each slot's sequence, as far as `rows.position`.
      allowed: `[rows, ceil(vocab / 32)]` int32, the bits of the tokens that a grammar allows; see `all_allowed`.
      proposals: proposals that `rows.proposal` indexes; a row that `rejects` gives its proposal or, where it is
        rejected, another.

    Returns:
      The tokens, and the log probabilities of those rows that ask for them. A row of logits with a NaN, or without a
      finite maximum, has the token `NO_TOKEN`.

    >>> logits = jnp.array([[0.0, 5.0, 1.0]])
    >>> one = empty_rows(1, slots=1, vocab=3)
    >>> sample(logits, one, jnp.zeros((1, 4), jnp.int32), all_allowed(1, 3)).tokens.tolist()
    [1]
    >>> set_row(one, 0, Sampling(logit_bias={1: -100.0}))
    >>> sample(logits, one, jnp.zeros((1, 4), jnp.int32), all_allowed(1, 3)).tokens.tolist()
    [2]
    """
    logits = logits.astype(jnp.float32)

    def sampled(logits: Array, rows: Rows, allowed: Array) -> Sampled:
        return _sampled(logits, rows, history, allowed, proposals)

    return _by_row(sampled, logits, rows, allowed)


def _by_row(function: Callable[[Array, Rows, Array], object], logits: Array, rows: Rows, allowed: Array) -> PyTree:
    """What a function of rows computes: of one after another on a CPU, of all at once elsewhere."""

    def in_turn(*arrays: PyTree) -> PyTree:
        def single(row: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x[0], function(*jax.tree.map(lambda x: x[None], row)))

        return lax.map(single, arrays)

    arrays = jax.tree.map(jnp.asarray, (logits, rows, allowed))
    return lax.platform_dependent(*arrays, cpu=in_turn, default=function)


def _sampled(logits: Array, rows: Rows, history: Array, allowed: Array, proposals: Proposals | None) -> Sampled:
    """`sample` of rows at once: what one of them needs is computed for all."""

    def draw(x: Array) -> Array:
        x = shaped(x, rows)
        sampled = argmax(x + _noise(rows, x.shape[1]))
        guesses = proposals
        if guesses is None:
            return sampled
        checks = rows.rejects & (rows.proposal >= 0)
        checked = lax.cond(jnp.any(checks), lambda: _checked(x, rows, guesses), lambda: sampled)
        return jnp.where(checks, checked, sampled)

    changed = _changed(logits, rows, history, allowed)
    tokens = _chosen(changed, rows, draw)
    finite = jnp.isfinite(jnp.max(logits, axis=1)) & jnp.isfinite(jnp.max(changed, axis=1))
    logprobs = lax.cond(jnp.any(rows.logprobs), _logprobs, _no_logprobs, logits, tokens)
    return Sampled(jnp.where(finite, tokens, NO_TOKEN), *logprobs)


def propose(logits: Array, rows: Rows, history: Array, allowed: Array) -> Proposals:
    """Draws a token for each row of a draft model's logits; the arguments are those of `sample`.

    A row with a seed draws with the noise that the model's own draw has at that place, so both often draw the same
    (Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2025). A row that
    `rejects` draws with noise of its own.
    """
    rows = rows._replace(choice=jnp.where(rows.rejects, rows.choice + _DRAFT, rows.choice))

    def proposed(logits: Array, rows: Rows, allowed: Array) -> Proposals:
        changed = _changed(logits, rows, history, allowed)
        scores = lax.cond(jnp.any(rows.temperature > 0), lambda x: shaped(x, rows), lambda x: x, changed)

        def draw(_: Array) -> Array:
            return argmax(scores + _noise(rows, scores.shape[1]))

        return Proposals(_chosen(changed, rows, draw), scores)

    return _by_row(proposed, logits.astype(jnp.float32), rows, allowed)


_DRAFT, _ACCEPT = np.uint32(1 << 30), np.uint32(1 << 31)
"""Added to the number of an answer, for noise that is independent of its own draws."""


def _changed(logits: Array, rows: Rows, history: Array, allowed: Array) -> Array:
    """Logits after bias, penalties and the grammar's mask."""
    vocab = logits.shape[1]

    def changed(x: Array) -> Array:
        index = jnp.arange(x.shape[0])[:, None]
        x = x.at[index, rows.bias_tokens].add(rows.bias_values, mode="drop")
        x = lax.cond(
            jnp.any((rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)),
            lambda x: penalized(x, rows, history),
            lambda x: x,
            x,
        )
        bits = (allowed[:, :, None] >> jnp.arange(32)) & 1  # [rows, words, 32]
        return jnp.where(bits.reshape(x.shape[0], -1)[:, :vocab] == 1, x, -jnp.inf)

    plain = (
        jnp.all(rows.bias_tokens >= vocab)
        & jnp.all(rows.repetition == 1)
        & jnp.all((rows.presence == 0) & (rows.frequency == 0))
        & jnp.all(allowed == -1)
    )
    return lax.cond(plain, lambda x: x, changed, logits)


def _chosen(logits: Array, rows: Rows, draw: Callable[[Array], Array]) -> Array:
    """The largest logit of greedy rows, and what `draw` gives of the others."""
    best = argmax(logits)
    chosen = lax.cond(jnp.any(rows.temperature > 0), draw, lambda x: best, logits)
    return jnp.where(rows.temperature > 0, chosen, best)


def _key(seed: Array, choice: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)


def _noise(rows: Rows, vocab: int) -> Array:
    """Gumbel noise `[rows, vocab]` of each row's key."""

    def noise(*of: Array) -> Array:
        return jax.random.gumbel(_key(*of), (vocab,), jnp.float32)

    return jax.vmap(noise)(rows.seed, rows.choice, rows.position)


def _checked(x: Array, rows: Rows, proposals: Proposals) -> Array:
    """Each row's proposal with probability min(1, p / q), otherwise a draw from max(p - q, 0): together a draw from p.

    Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
    """
    index = jnp.maximum(rows.proposal, 0)
    guess = proposals.tokens[index]
    p, q = jax.nn.softmax(x, axis=1), jax.nn.softmax(proposals.logits[index], axis=1)
    p_guess, q_guess = (jnp.take_along_axis(of, guess[:, None], axis=1)[:, 0] for of in (p, q))
    uniform = jax.vmap(lambda *of: jax.random.uniform(_key(*of)))(rows.seed, rows.choice + _ACCEPT, rows.position)
    rest = jnp.maximum(p - q, 0.0)
    # Rounding may leave nothing of two distributions that are nearly the same.
    rest = jnp.where(jnp.any(rest > 0, axis=1, keepdims=True), jnp.log(rest), x)
    replacement = argmax(rest + _noise(rows, x.shape[1]))
    return jnp.where(uniform * q_guess < p_guess, guess, replacement)


def _logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    logprobs = jax.nn.log_softmax(logits, axis=1)
    values, top = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    room = ((0, 0), (0, MAX_LOGPROBS - values.shape[1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return chosen, jnp.pad(top.astype(jnp.int32), room), jnp.pad(values, room, constant_values=-jnp.inf)


def _no_logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    rows = logits.shape[0]
    none = jnp.zeros((rows, MAX_LOGPROBS), jnp.int32), jnp.zeros((rows, MAX_LOGPROBS), jnp.float32)
    return jnp.zeros(rows, jnp.float32), *none
