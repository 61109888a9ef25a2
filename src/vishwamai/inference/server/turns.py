"""An answer of a chat as it comes: its reasoning, its content and its calls, with the ids that clients refer to."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

from vishwamai.inference.answers import Delta
from vishwamai.inference.server.forms import FORMS
from vishwamai.inference.server.reading import Event, Reader, State, read


@dataclasses.dataclass
class Call:
    """A call: its id, the function's name and the arguments so far, as JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass
class Turn:
    """One answer so far.

    Attributes:
      reader: how its text is read; None: it is content.
      single: no more than one call is answered.
    """

    reader: Reader | None
    single: bool = False
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self._state: State | None = None if self.reader is None else self.reader.start
        self._skips = False  # the arguments of a call that is one too many

    def add(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        if self.reader is None or self._state is None:
            events = [Event("content", delta.text)] if delta.text else []
        else:
            if self._state.reasons:
                self.reasoning_tokens += len(delta.token_ids)
            self._state, events = read(self.reader, self._state, delta.text, delta.finish is not None)
        return [event for event in events if self._take(event)]

    def add_all(self, deltas: Sequence[Delta]) -> Turn:
        """The turn after deltas."""
        for delta in deltas:
            self.add(delta)
        return self

    def _take(self, event: Event) -> bool:
        if event.kind == "call":
            self._skips = self.single and bool(self.calls)
            if not self._skips:
                self.calls.append(Call(self._id(event.text), event.text))
        elif event.kind == "arguments" and not self._skips:
            self.calls[-1].arguments += event.text
        elif event.kind == "reasoning":
            self.reasoning += event.text
        elif event.kind == "content":
            self.content += event.text
        return not (self._skips and event.kind in ("call", "arguments"))

    def _id(self, name: str) -> str:
        form = None if self.reader is None or self.reader.form is None else FORMS[self.reader.form].ids
        if form:
            return form.format(name=name, index=len(self.calls))
        return f"call_{uuid.uuid4().hex[:24]}"
