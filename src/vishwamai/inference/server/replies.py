"""From deltas to OpenAI's objects: whole answers and chunks of a stream. Values in, JSON values out."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Literal

from vishwamai.inference.answers import Delta, Finish, TokenLogprobs
from vishwamai.inference.scoring import Score
from vishwamai.inference.server.pieces import Pieces, Places
from vishwamai.inference.server.reading import Event, Reader
from vishwamai.inference.server.turns import Call, Turn

_FINISH: dict[Finish, str] = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop"}


@dataclasses.dataclass
class Usage:
    """Tokens of prompts and answers, of a prompt those that the prefix cache had, of each choice those of reasoning."""

    prompt_tokens: int
    new_tokens: int = 0
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    reasoning: dict[int, int] = dataclasses.field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Counts a delta."""
        self.new_tokens += len(delta.token_ids)
        self.cached[delta.choice] = max(delta.cached, self.cached.get(delta.choice, 0))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache had."""
        return min(sum(self.cached.values()), self.prompt_tokens)

    @property
    def value(self) -> dict[str, object]:
        """As OpenAI writes it."""
        details = {"completion_tokens_details": {"reasoning_tokens": sum(self.reasoning.values())}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(details if self.reasoning else {}),
        }


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What an answer says of its prompt.

    Attributes:
      ids: its tokens.
      echo: its text, which comes before the answer's; None: the answer's alone.
      scores: log probabilities of its tokens; none where they were not asked for.
    """

    ids: tuple[int, ...]
    echo: str | None = None
    scores: Sequence[Score | None] = ()


@dataclasses.dataclass(frozen=True)
class Reply:
    """What all objects of one answer share.

    Attributes:
      kind: the request's kind.
      model: its name.
      pieces: texts of tokens, for log probabilities.
      prompts: the request's prompts.
      n: answers to each prompt, and how many of them are in the answer (`best`): the most likely ones, by their tokens'
        mean.
      token_ids: choices carry their token ids, an extension.
      logprobs: choices carry log probabilities, those of an echoed prompt too.
      prompt_logprobs: choices carry those of their prompt, an extension.
      reader: how reasoning and calls are read from an answer; None: all is content.
      reasoning: messages have it.
      single: no more than one call is answered.
      legacy: a call is OpenAI's older `function_call`.
      usage_each: each chunk has the usage so far; None: chunks have none at all.
    """

    kind: Literal["completion", "chat"]
    model: str
    pieces: Pieces
    prompts: tuple[Prompt, ...]
    n: int = 1
    best: int | None = None
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    reader: Reader | None = None
    reasoning: bool = True
    single: bool = False
    legacy: bool = False
    usage_each: bool | None = None
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> int:
        """Answers in all."""
        return self.n * len(self.prompts)

    def usage(self) -> Usage:
        """The usage before the first token."""
        return Usage(sum(len(prompt.ids) for prompt in self.prompts))

    def head(self, chunk: bool, usage: Usage | None = None) -> dict[str, object]:
        """The members before the choices."""
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        name = f"cmpl-{self.id}" if self.kind == "completion" else f"chatcmpl-{self.id}"
        kind = "text_completion" if self.kind == "completion" else kind
        shared = {"id": name, "object": kind, "created": self.created, "model": self.model}
        if chunk and self.usage_each is not None:
            shared["usage"] = usage.value if usage is not None and self.usage_each else None
        return shared

    def body(self, deltas: Sequence[Delta]) -> dict[str, object]:
        """The answer that is sent at once."""
        usage = self.usage()
        by_choice: list[list[Delta]] = [[] for _ in range(self.choices)]
        for delta in deltas:
            usage.add(delta)
            by_choice[delta.choice].append(delta)
        if self.best is not None and self.best < self.n:
            return dataclasses.replace(self, n=self.best, best=None)._best(by_choice, usage, self.n)
        return self._object(by_choice, usage)

    def _best(self, by_choice: list[list[Delta]], usage: Usage, n: int) -> dict[str, object]:
        best: list[list[Delta]] = []
        for first in range(0, len(by_choice), n):
            group = sorted(by_choice[first : first + n], key=_likelihood, reverse=True)
            best += group[: self.n]
        return self._object(best, usage)

    def _object(self, by_choice: list[list[Delta]], usage: Usage) -> dict[str, object]:
        choices = [self._choice(i, parts, usage) for i, parts in enumerate(by_choice)]
        reply = {**self.head(False), "choices": choices, "usage": usage.value}
        if self.kind == "chat" and self.prompt_logprobs:
            reply["prompt_logprobs"] = self.pieces.prompt(self.prompts[0].scores)
        return reply

    def turn(self) -> Turn:
        """An answer of a chat before its first token."""
        return Turn(self.reader, self.single)

    def _choice(self, index: int, deltas: list[Delta], usage: Usage) -> dict[str, object]:
        prompt = self.prompts[index // self.n]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        finish = _FINISH[deltas[-1].finish or "stop"]
        choice: dict[str, object] = {"index": index, "finish_reason": finish}
        if self.kind == "completion":
            choice["text"] = (prompt.echo or "") + "".join(delta.text for delta in deltas)
            choice["logprobs"] = self.places(index).joined(entries) if self.logprobs else None
            if self.prompt_logprobs:
                choice["prompt_logprobs"] = self.pieces.prompt(prompt.scores)
        else:
            turn = self.turn().add_all(deltas)
            if turn.reasoning_tokens:
                usage.reasoning[index] = turn.reasoning_tokens
            message: dict[str, object] = {
                "role": "assistant",
                "content": turn.content or (None if turn.calls or turn.reasoning else ""),
                "refusal": None,
            }
            if turn.reasoning and self.reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.calls:
                calls = [{"id": call.id, "type": "function", "function": _function(call)} for call in turn.calls]
                message |= {"function_call": _function(turn.calls[0])} if self.legacy else {"tool_calls": calls}
                choice["finish_reason"] = self._finish(finish)
            choice |= {"message": message, "logprobs": self.pieces.chat(entries)}
        if deltas[-1].stop is not None:
            choice["stop_reason"] = deltas[-1].stop
        if self.token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        return choice

    def places(self, index: int) -> EchoedPlaces:
        """Where the tokens of an answer are in its text, its echoed prompt before them."""
        return EchoedPlaces(self.pieces, self.prompts[index // self.n])

    def chunk(
        self, delta: Delta, events: Sequence[Event], turn: Turn, places: EchoedPlaces, usage: Usage
    ) -> dict[str, object]:
        """One chunk of a stream: a delta, of whose text the events are sent; they are a part of `turn`."""
        finish = None if delta.finish is None else _FINISH[delta.finish]
        choice: dict[str, object] = {"index": delta.choice, "finish_reason": finish}
        if self.kind == "completion":
            choice["text"] = delta.text
            choice["logprobs"] = places.logprobs(delta.logprobs) if self.logprobs else None
        else:
            if turn.calls:
                choice["finish_reason"] = self._finish(finish)
            choice |= {"delta": self._part(events, turn), "logprobs": self.pieces.chat(delta.logprobs)}
        if delta.stop is not None:
            choice["stop_reason"] = delta.stop
        if self.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return {**self.head(True, usage), "choices": [choice]}

    def _part(self, events: Sequence[Event], turn: Turn) -> dict[str, object]:
        """What events add to a message."""
        texts: dict[str, str] = {}
        calls: list[dict[str, object]] = []
        functions: list[dict[str, str]] = []  # of the calls
        index = len(turn.calls) - sum(event.kind == "call" for event in events) - 1
        for event in events:
            if event.kind == "content":
                texts["content"] = texts.get("content", "") + event.text
            elif event.kind == "reasoning":
                if self.reasoning:
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + event.text
            elif event.kind == "call":
                index += 1
                function = {"name": event.text, "arguments": ""}
                functions.append(function)
                calls.append({"index": index, "id": turn.calls[index].id, "type": "function", "function": function})
            elif calls:
                functions[-1]["arguments"] += event.text
            else:
                functions.append({"arguments": event.text})
                calls.append({"index": index, "function": functions[-1]})
        part: dict[str, object] = {**texts}
        if calls and self.legacy:
            part["function_call"] = functions[0]
        elif calls:
            part["tool_calls"] = calls
        return part

    def first_chunk(self, index: int, places: EchoedPlaces, usage: Usage) -> dict[str, object] | None:
        """What comes before an answer's text: the role of a chat, the echoed prompt of a completion."""
        choice: dict[str, object] = {"index": index, "finish_reason": None, "logprobs": None}
        if self.kind == "chat":
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            prompt = self.prompts[index // self.n]
            if prompt.echo is None:
                return None
            choice |= {"text": prompt.echo, "logprobs": places.of_prompt() if self.logprobs else None}
        return {**self.head(True, usage), "choices": [choice]}

    def last_chunk(self, usage: Usage) -> dict[str, object]:
        """The usage, behind all choices."""
        return {**self.head(True), "choices": [], "usage": usage.value}

    def _finish(self, finish: str | None) -> str | None:
        """The reason of the end of an answer that has calls."""
        return finish if finish != "stop" else "function_call" if self.legacy else "tool_calls"


def _likelihood(deltas: Sequence[Delta]) -> float:
    """The mean log probability of an answer's tokens."""
    values = [entry.logprob for delta in deltas for entry in delta.logprobs]
    return sum(values) / len(values) if values else 0.0


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


class EchoedPlaces(Places):
    """Places of the tokens of a prompt that is echoed, and of the answer behind it."""

    def __init__(self, pieces: Pieces, prompt: Prompt):
        super().__init__(pieces)
        self.prompt = prompt
        first = next((pieces.bytes_of(id) for id in prompt.ids if id not in pieces.special), None) or b""
        if prompt.echo and first.startswith(b" ") and not prompt.echo.startswith(" "):
            self.offset = -1  # SentencePiece's blank before a text

    def of_prompt(self) -> dict[str, list[object]] | None:
        """The log probabilities of the prompt."""
        scores = [score for score in self.prompt.scores if score is not None]
        return self.logprobs(scores, self.prompt.ids[0])

    def joined(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[object]] | None:
        """Those of the echoed prompt and of the answer."""
        if self.prompt.echo is None:
            return self.logprobs(entries)
        before, behind = self.of_prompt() or {}, self.logprobs(entries) or {}
        return {name: values + behind.get(name, []) for name, values in before.items()}
