"""Vectors of texts for a server: few shapes, compiled ahead, one batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.models.cross_encoder import CrossEncoder
from vishwamai.models.embedding import SentenceEncoder, padded
from vishwamai.models.pooling import Pooling
from vishwamai.parallel.optimization import Optimization

if TYPE_CHECKING:
    from jaxtyping import Float

    from vishwamai.models import Decoder, Tokenizer

_ROWS = 8  # of a batch, where it has no more than _TOKENS tokens in all
_TOKENS = 4096
_SHORTEST = 16


class Embedder:
    """Vectors of texts or token ids; any thread may call it.

    Args:
      forward: function of tokens and mask, both `[rows, length]`, to vectors `[rows, features]`, which is called with
        few shapes only; that of a cross-encoder takes the types of tokens too.
      encode: texts to token ids, whole; None: texts are declined.
      max_tokens: bound of one text's tokens.
      vocab: token ids are below it.

    Attributes:
      prompts: texts that come before an input, by name.
      default_prompt: name of the prompt where none is asked for, or None.
      tasks: functions in place of `forward`, by the prompt's name.
      cross: the cross-encoder that judges pairs, in place of vectors; or None.
    """

    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    tasks: Mapping[str, Callable[..., object]] = {}
    cross: CrossEncoder | None = None

    def __init__(
        self,
        forward: Callable[..., object],
        encode: Callable[[Sequence[str]], list[list[int]]] | None,
        max_tokens: int,
        vocab: int,
    ):
        self.max_tokens, self.vocab = max_tokens, vocab
        self._forward, self._encode = forward, encode
        self._lock = threading.Lock()
        lengths = [_SHORTEST]
        while lengths[-1] < max_tokens:
            lengths.append(2 * lengths[-1])
        self.lengths = tuple(min(length, max_tokens) for length in lengths)

    @classmethod
    def of_encoder(cls, encoder: SentenceEncoder) -> Embedder:
        """Of a sentence encoder, with its own pooling and prompts."""
        embedder = cls(encoder, partial(encoder.ids, cut=False), encoder.max_tokens, encoder.config.vocab_size)
        embedder.prompts, embedder.default_prompt = encoder.prompts, encoder.default_prompt
        embedder.tasks = {name: partial(encoder, task=name) for name in encoder.tasks}
        return embedder

    @classmethod
    def of_cross_encoder(cls, encoder: CrossEncoder) -> Embedder:
        """Of a cross-encoder: `scores` judges pairs of texts."""
        embedder = cls(encoder, None, encoder.max_tokens, encoder.config.vocab_size)
        embedder.cross = encoder
        return embedder

    @classmethod
    def of_decoder(
        cls,
        model: Decoder,
        tokenizer: Tokenizer | None,
        pooling: Pooling,
        max_tokens: int,
        optimization: Optimization | None = None,
    ) -> Embedder:
        """Of a decoder's hidden states after its last norm; `optimization`: the keys of its kernels."""
        keys = optimization or Optimization()

        @jax.jit
        def forward(model: Decoder, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            with keys.kernels():
                return pooling(model(tokens), mask)

        encode = None if tokenizer is None else lambda texts: [tokenizer.encode(text) for text in texts]
        return cls(partial(forward, model), encode, max_tokens, model.config.vocab_size)

    @classmethod
    def of_judgement(
        cls,
        model: Decoder,
        tokenizer: Tokenizer,
        words: Sequence[int],
        max_tokens: int,
        optimization: Optimization | None = None,
    ) -> Embedder:
        """Of a decoder's answer: the probabilities of `words`, token ids, among themselves, behind each text; texts get
        no special tokens.
        """
        keys = optimization or Optimization()
        chosen = jnp.asarray(words, jnp.int32)

        @jax.jit
        def forward(model: Decoder, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            with keys.kernels():
                hidden = model(tokens)
                last = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32) - 1, 0)
                logits = model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
            return jax.nn.softmax(logits[:, chosen].astype(jnp.float32), axis=1)

        def encode(texts: Sequence[str]) -> list[list[int]]:
            return [tokenizer.encode(text, add_special=False) for text in texts]

        return cls(partial(forward, model), encode, max_tokens, model.config.vocab_size)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, length) of every batch."""
        pairs = {(rows, length) for length in self.lengths for rows in (1, max(1, min(_ROWS, _TOKENS // length)))}
        return tuple(sorted(pairs))

    def compile(self, on_program: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles the programs of all shapes.

        Args:
          on_program: called with (how many programs are compiled, of how many, the next one's name).
        """
        total = len(self.shapes)
        for i, (rows, length) in enumerate(self.shapes):
            if on_program is not None:
                on_program(i, total, f"embeddings of {rows} texts, {length} tokens")
            arrays = padded([[0]], rows, length)
            types = () if self.cross is None else (np.zeros_like(arrays[0]),)
            for forward in (self._forward, *self.tasks.values()):  # tasks of one rank share a program
                jax.block_until_ready(forward(*map(jnp.asarray, (*arrays, *types))))
        if on_program is not None:
            on_program(total, total, "")

    def __call__(
        self, inputs: Sequence[str | Sequence[int]], truncate: int | None = None, task: str | None = None
    ) -> tuple[Float[np.ndarray, "inputs features"], int]:
        """The vectors of texts or token ids, float32, in their order, and how many tokens were computed.

        Args:
          inputs: texts, which get the tokenizer's special tokens, or token ids, which are taken as they are.
          truncate: keep so many tokens of each at most; -1: as many as the model takes; None: a longer one is an error.
          task: name of the prompt, whose adapter computes them if there is one; None: that of `default_prompt`.

        Raises:
          ShapeError: an input is empty, too long, a text without a tokenizer, or has an id that is not of the vocab.
        """
        ids = self.ids(inputs, truncate)
        return self._computed(ids, task=task or self.default_prompt), sum(map(len, ids))

    def scores(
        self, pairs: Sequence[tuple[str, str]], truncate: int | None = None
    ) -> tuple[Float[np.ndarray, " pairs"], int]:
        """How well the texts of pairs go together, by the cross-encoder, and how many tokens were computed.

        Args:
          pairs: texts.
          truncate: keep so many tokens of a pair at most; -1: as many as the model takes; None: more are an error.

        Raises:
          ShapeError: a pair is too long, or there is no cross-encoder.
        """
        if self.cross is None:
            raise ShapeError("the encoder makes vectors; pairs are judged by a cross-encoder.")
        if truncate is None:
            ids, types = self.cross.pairs(pairs)
            longest = max(range(len(ids)), key=lambda i: len(ids[i]))
            if len(ids[longest]) > self.max_tokens:
                raise ShapeError(
                    f"pair {longest} has {len(ids[longest])} tokens, but the model takes {self.max_tokens}; shorten "
                    "it, or pass `truncate_prompt_tokens` = -1 to cut it."
                )
        else:
            most = self.max_tokens if truncate == -1 else min(truncate, self.max_tokens)
            ids, types = self.cross.cut(pairs, max(most, self.cross.special_tokens))
        return self._computed(ids, types)[:, 0], sum(map(len, ids))

    def _computed(
        self, ids: Sequence[list[int]], types: Sequence[list[int]] | None = None, task: str | None = None
    ) -> Any:
        """What the model computes of each text, float32; texts of like length share a batch."""
        forward = self.tasks.get(task or "", self._forward)
        out: list[Any] = [None] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        while order:
            length = next(n for n in self.lengths if n >= len(ids[order[0]]))
            most = max(1, min(_ROWS, _TOKENS // length))
            group = [i for i in order[:most] if len(ids[i]) <= length]
            order = order[len(group) :]
            rows = 1 if len(group) == 1 else most
            arrays: Any = padded([ids[i] for i in group], rows, length)
            if types is not None:
                arrays = (*arrays, padded([types[i] for i in group], rows, length)[0])
            with self._lock:
                vectors = np.asarray(forward(*map(jnp.asarray, arrays)), np.float32)
            for row, i in enumerate(group):
                out[i] = vectors[row]
        return np.stack(out)

    def ids(self, inputs: Sequence[str | Sequence[int]], truncate: int | None = None) -> list[list[int]]:
        """Token ids of inputs; see `__call__`."""
        texts = [text for text in inputs if isinstance(text, str)]
        if texts and self._encode is None:
            raise ShapeError("the input is a text, but the model has no tokenizer; pass token ids.")
        encoded = iter(self._encode(texts)) if self._encode is not None and texts else iter(())
        most = self.max_tokens if truncate is None or truncate == -1 else min(truncate, self.max_tokens)
        ids_of_texts = []
        for i, text in enumerate(inputs):
            ids = next(encoded) if isinstance(text, str) else list(text)
            if not ids:
                raise ShapeError(f"input {i} has no tokens; pass at least one.")
            for token in ids:
                if not 0 <= token < self.vocab:
                    raise ShapeError(f"input {i} has token id {token}; ids are 0 to {self.vocab - 1}.")
            if truncate is None and len(ids) > most:
                raise ShapeError(
                    f"input {i} has {len(ids)} tokens, but the model takes {most}; shorten it, or pass "
                    "`truncate_prompt_tokens` = -1 to cut it."
                )
            ids_of_texts.append(ids[:most])
        return ids_of_texts
