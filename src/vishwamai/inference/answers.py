"""From tokens to answers: text as it becomes certain, stop texts, log probabilities and the reason of the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from vishwamai.inference.sampling import Sampling

if TYPE_CHECKING:
    from vishwamai.models.tokenizer import Detokenizer

Finish = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one place: of the token drawn, and of the most likely ones, by token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new of one answer.

    Attributes:
      choice: which of a request's n answers.
      token_ids: new tokens; their text may follow later, whole characters at a time.
      text: new text.
      logprobs: one entry for each of `token_ids`, if they were asked for.
      finish: why it ended, in its last delta: "stop" (an end token or a stop text), "length", "cancelled", "deadline",
        "error".
      stop: the stop text, or the id among `stop_token_ids`, that ended it; None: the model did.
      error: text of the failure, where `finish` is "error".
      declined: the request is at fault for the error, not the server.
      cached: prompt tokens that were in the prefix cache.
    """

    choice: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    error: str | None = None
    declined: bool = False
    cached: int = 0
    stop: str | int | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """One whole answer.

    Attributes:
      prompt_ids: the prompt.
      token_ids: the new tokens, the end token included if there was one.
      text: their text without end tokens and stop texts; empty without a tokenizer.
      finish, error, logprobs, cached: fields of `Delta`.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    cached: int = 0


def joined(prompt_ids: Sequence[int], deltas: Iterable[Delta]) -> Answer:
    """The answer that its deltas, of one choice, make up."""
    deltas = list(deltas)
    last = deltas[-1]
    assert last.finish is not None
    return Answer(
        tuple(prompt_ids),
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish,
        tuple(entry for delta in deltas for entry in delta.logprobs),
        last.error,
        last.cached,
    )


class StopTexts:
    """Holds text back while it may be the start of a stop text.

    >>> stops = StopTexts(("END",))
    >>> stops.add("one E"), stops.add("N"), stops.add("t. EN"), stops.add("D two")
    (('one ', False), ('', False), ('ENt. ', False), ('', True))
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._buffer = ""
        self.met: str | None = None

    def add(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop text was met, before which the text ends)."""
        text_so_far = self._buffer + text
        place, met = min(
            ((position, stop) for stop in self._stops if (position := text_so_far.find(stop)) >= 0), default=(-1, None)
        )
        if met is not None:
            self._buffer, self.met = "", met
            return text_so_far[:place], True
        keep = max((_overlap(text_so_far, stop) for stop in self._stops), default=0)
        self._buffer = text_so_far[len(text_so_far) - keep :]
        return text_so_far[: len(text_so_far) - keep], False

    def rest(self) -> str:
        """What is held back, now that nothing follows."""
        remainder, self._buffer = self._buffer, ""
        return remainder


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` starts with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)


class Writer:
    """Turns one answer's tokens into deltas.

    Args:
      options: the request's options.
      end_tokens: the model's own.
      detokenizer: the tokenizer's detokenizer, or None: deltas have no text.
    """

    def __init__(self, options: Sampling, end_tokens: frozenset[int], detokenizer: Detokenizer | None, choice: int):
        ends = frozenset() if options.ignore_eos else end_tokens
        self.ends = ends | set(options.stop_token_ids)
        self._own_ends = ends
        self._stops = StopTexts(options.stop)
        self._detokenizer = detokenizer
        self._choice = choice

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], room: int, cached: int) -> Delta:
        """The delta of new tokens; those after an end are dropped.

        Args:
          room: how many tokens the answer has room for.
        """
        text, accepted = "", []
        finish: Finish | None = None
        stop: int | None = None
        for token in tokens[:room]:
            accepted.append(token)
            if token in self.ends:
                finish, stop = "stop", None if token in self._own_ends else token
            elif self._detokenizer is not None:
                certain, stopped = self._stops.add(self._detokenizer.add(token))
                text += certain
                finish = "stop" if stopped else None
                if stopped:
                    break
            if finish is not None:
                text += self._rest()
                break
        if finish is None and len(accepted) >= room:
            finish = "length"
            text += self._rest()
        met = self._stops.met if stop is None else stop
        return Delta(
            self._choice, tuple(accepted), text, tuple(logprobs[: len(accepted)]), finish, cached=cached, stop=met
        )

    def end(self, delta: Delta) -> Delta:
        """The same delta as the last one: a grammar has no more to say."""
        return dataclasses.replace(delta, text=delta.text + self._rest(), finish="stop")

    def _rest(self) -> str:
        if self._detokenizer is None:
            return ""
        certain, stopped = self._stops.add(self._detokenizer.finish())
        return certain if stopped else certain + self._stops.rest()
