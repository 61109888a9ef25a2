"""How the tokens of log probabilities are written: their texts, their bytes, and where they are in a text."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence

from vishwamai.inference.answers import TokenLogprobs
from vishwamai.inference.scoring import Score
from vishwamai.models.tokenizer import Tokenizer

_LEAST = -9999.0
"""In place of the log probability of an impossible token, which JSON cannot hold; vLLM writes the same number."""


class Pieces:
    """Texts and bytes of tokens.

    Args:
      tokenizer: None where the model has none: tokens are written as their ids.
      as_ids: write every token as `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False):
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self.special = frozenset() if tokenizer is None else frozenset(tokenizer.special_ids.values())

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text; None where it has none."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token) or None

    def name(self, token: int) -> str:
        """The text of a token; `bytes:\\xe2\\x80` of a part of a character, as OpenAI writes it."""
        if self._tokenizer is None:
            return str(token)
        data = None if self._as_ids else self.bytes_of(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token: int, logprob: float) -> dict[str, object]:
        """A token of a chat's log probabilities."""
        data = self.bytes_of(token)
        return {"token": self.name(token), "logprob": finite(logprob), "bytes": None if data is None else list(data)}

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        """Log probabilities in the form of chats."""
        content = [
            {**self.entry(e.token, e.logprob), "top_logprobs": [self.entry(token, value) for token, value in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None} if content else None

    def by_name(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens by text, and the token itself: one entry of each, equal texts or not."""
        names: dict[str, float] = {}
        for token, value in dict([*entry.top, (entry.token, entry.logprob)]).items():
            name = self.name(token)
            names[f"token_id:{token}" if name in names else name] = finite(value)
        return names

    def prompt(self, scores: Sequence[Score | None]) -> list[dict[str, object] | None]:
        """Log probabilities of a prompt, as vLLM writes them: by token id, the token itself among them."""

        def place(score: Score | None) -> dict[str, object] | None:
            if score is None:
                return None
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(score.top, 1)}
            ranked[score.token] = (score.logprob, score.rank)
            return {
                str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self.name(token)}
                for token, (value, rank) in ranked.items()
            }

        return [place(score) for score in scores]


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return max(logprob, _LEAST)


@dataclasses.dataclass
class Places:
    """Log probabilities in the form of completions, with the places of the tokens in one text, piece by piece.

    Attributes:
      pieces: texts of tokens.
      offset: characters so far.
    """

    pieces: Pieces
    offset: int = 0

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip(self, token: int) -> int:
        """Where a token begins; the text goes on behind it."""
        start = max(self.offset, 0)
        if token not in self.pieces.special:
            self.offset += len(self._decoder.decode(self.pieces.bytes_of(token) or b""))
        return start

    def logprobs(self, entries: Sequence[TokenLogprobs], first: int | None = None) -> dict[str, list[object]] | None:
        """The log probabilities of the next tokens.

        Args:
          entries: entries of the tokens.
          first: a token before them, which has none: the first of a prompt.
        """
        if not entries and first is None:
            return None
        lead = [] if first is None else [first]
        nulls: list[None] = [None] * len(lead)
        tokens = [*lead, *(entry.token for entry in entries)]
        return {
            "tokens": [self.pieces.name(token) for token in tokens],
            "token_logprobs": [*nulls, *(finite(entry.logprob) for entry in entries)],
            "top_logprobs": [*nulls, *(self.pieces.by_name(entry) for entry in entries)],
            "text_offset": [self.skip(token) for token in tokens],
        }
