"""What reads an answer, where it is, and what it gives; see `reading`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from vishwamai.inference.server.forms import FORMS, THINKING, Form, Thinking, opened
from vishwamai.inference.server.literals import Place

LONGEST_HEADER = 400
"""Characters of what comes before a call's arguments."""


class Event(NamedTuple):
    """A piece of an answer. "call" begins one, by its function's name; "arguments" are JSON text, in pieces."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


@dataclasses.dataclass(frozen=True)
class Reader:
    """How an answer is read.

    Attributes:
      form: format of calls, a name of `forms.FORMS`; None: calls are content.
      thinking: the marks of reasoning, a name of `forms.THINKING`; None: reasoning is content.
      inside: the answer begins inside of reasoning.
      tools: the schemas of the arguments of the functions that may be called, by name.
    """

    form: str | None = None
    thinking: str | None = None
    inside: bool = False
    tools: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, form: str | None, thinking: str | None, prompt: str, offers: Iterable[Mapping[str, object]]) -> Reader:
        """The reader of the answer to a prompt, whose last part is given, and that offers functions."""
        inside = thinking is not None and opened(THINKING[thinking], prompt)
        return cls(form, thinking, inside, {str(offer["name"]): offer.get("parameters") or {} for offer in offers})

    @property
    def plain(self) -> bool:
        """Whether all of an answer is content."""
        return self.form is None and self.thinking is None

    @property
    def calls(self) -> Form | None:
        """How calls are written."""
        return None if self.form is None else FORMS[self.form]

    @property
    def marks(self) -> Thinking | None:
        """The marks around reasoning."""
        return None if self.thinking is None else THINKING[self.thinking]

    @property
    def start(self) -> State:
        """The state before an answer."""
        if self.form == "gpt_oss" or self.thinking == "gpt_oss":
            return State("channel")
        return State("reasoning", fresh=True) if self.inside else State("start")


Mode = Literal["start", "reasoning", "text", "calls", "value", "tail", "pairs", "pair", "channel", "message"]


@dataclasses.dataclass(frozen=True)
class State:
    """Where the reading of an answer is.

    Attributes:
      mode: kind of text that is read next.
      rest: text that is not read yet.
      mark: text that began the section of calls.
      end: the mark of the section's end.
      calls: number of calls of the section.
      name: the called function's or the channel's name.
      keys: arguments so far.
      place: position in a value.
      quoted: the value is a text, sent on as it comes.
      fresh: no text came yet of what is read; blanks before it are dropped.
    """

    mode: Mode
    rest: str = ""
    mark: str = ""
    end: str = ""
    calls: int = 0
    name: str = ""
    keys: int = 0
    key: str = ""
    place: Place = Place()
    quoted: bool = False
    fresh: bool = False

    @property
    def reasons(self) -> bool:
        """Whether reasoning is read."""
        return self.mode == "reasoning" or (self.mode == "message" and self.name == "reasoning")

    def to(self, mode: Mode, rest: str, **changes: object) -> State:
        """The state of another mode."""
        return dataclasses.replace(self, mode=mode, rest=rest, place=Place(), **changes)


Move = tuple[State, Sequence[Event]] | None


def may_begin(text: str, mark: str) -> int:
    """The longest end of a text that a mark begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
