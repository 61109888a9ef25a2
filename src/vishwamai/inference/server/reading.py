"""An answer's text, piece by piece, to reasoning, content and tool calls: one pure function over the data of `forms`.

    state, events = read(reader, state, text)

The state has what was not read yet. Each mode is a function from a state to the next one and its events, or None where
it needs more text. What begins like a call and is none stays content.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping

from vishwamai.inference.server import arguments
from vishwamai.inference.server.forms import Form
from vishwamai.inference.server.literals import as_json, scan
from vishwamai.inference.server.states import LONGEST_HEADER, Event, Mode, Move, Reader, State, may_begin

__all__ = ["Event", "Reader", "State", "read"]


def read(reader: Reader, state: State, text: str, last: bool = False) -> tuple[State, list[Event]]:
    """The state after one more piece of an answer, and what the piece made certain.

    >>> reader = Reader("hermes", "think", inside=True)
    >>> text = 'I add.</think>Now: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> for event in read(reader, reader.start, text, last=True)[1]:
    ...     print(event.kind, repr(event.text))
    reasoning 'I add.'
    content 'Now:'
    call 'add'
    arguments '{"a": 1}'
    """
    state = dataclasses.replace(state, rest=state.rest + text)
    events: list[Event] = []
    while (move := _MODES[state.mode](reader, state, last)) is not None:
        state = move[0]
        for event in move[1]:
            if events and event.kind == events[-1].kind != "call":
                events[-1] = Event(event.kind, events[-1].text + event.text)
            elif event.text:
                events.append(event)
    return state, events


def _start(reader: Reader, state: State, last: bool) -> Move:
    text, marks = state.rest.lstrip(), reader.marks
    if marks is not None and not state.fresh:
        if text.startswith(marks.begin):
            return state.to("reasoning", text[len(marks.begin) :], fresh=True), ()
        if marks.begin.startswith(text) and not last:
            return None
    form = reader.calls
    if form is not None and form.lead and any(begin == "" for begin, _ in form.sections):
        if not text and not last:
            return None
        if text[:1] == form.lead:
            return state.to("calls", state.rest, mark="", end="", calls=0), ()
    return state.to("text", state.rest), ()


def _reasoning(reader: Reader, state: State, last: bool) -> Move:
    marks = reader.marks
    assert marks is not None
    text, mark, rest = _until(state, (marks.end, *marks.ends), last)
    if not text and mark is None:
        return None
    events = (Event("reasoning", text),)
    if mark is None:
        return dataclasses.replace(state, rest=rest, fresh=state.fresh and not text), events
    return state.to("start", rest if mark == marks.end else mark + rest, fresh=True), events


def _text(reader: Reader, state: State, last: bool) -> Move:
    form = reader.calls
    sections = {} if form is None else {begin: end for begin, end in form.sections if begin}
    text, mark, rest = _until(state, tuple(sections), last)
    if not text and mark is None:
        return None
    fresh = state.fresh and not text
    if mark is None:
        return dataclasses.replace(state, rest=rest, fresh=fresh), (Event("content", text),)
    return state.to("calls", rest, mark=mark, end=sections[mark], calls=0, fresh=fresh), (Event("content", text),)


def _until(state: State, marks: tuple[str, ...], last: bool) -> tuple[str, str | None, str]:
    """(text that is certain, the mark behind it, the rest); blanks before a mark are no part of the text."""
    text = state.rest.lstrip() if state.fresh else state.rest
    position, mark = min(((position, mark) for mark in marks if (position := text.find(mark)) >= 0), default=(-1, None))
    if mark is not None:
        return text[:position].rstrip(), mark, text[position + len(mark) :]
    if last or not marks:
        return text, None, ""
    keep = max(may_begin(text, mark) for mark in marks)
    certain = text[: len(text) - keep].rstrip()
    return certain, None, text[len(certain) :]


def _calls(reader: Reader, state: State, last: bool) -> Move:
    """Before a call, or behind the last."""
    form = reader.calls
    assert form is not None
    skipped = re.match(form.between, state.rest) if form.arguments != "python" or state.calls else None
    skipped = skipped or re.match(r"\s*", state.rest)
    text = state.rest if skipped is None else state.rest[skipped.end() :]
    if state.calls and state.end and text.startswith(state.end):
        return state.to("text", text[len(state.end) :], fresh=True), ()
    header = re.match(form.header, text)
    if header is not None and (state.mark or not reader.tools or header["name"] in reader.tools):
        name, behind = header["name"], text[header.end() :]
        if form.arguments in ("json", "object"):
            return state.to("value", behind, calls=state.calls + 1, name=name, quoted=False), (Event("call", name),)
        if form.arguments == "pairs":
            return state.to("pairs", behind, calls=state.calls + 1, name=name, keys=0), (Event("call", name),)
    begins = header.end() - (form.arguments == "python") if header is not None else 0
    is_value = form.arguments == "object" and text[:1] == "{"
    if is_value or (header is not None and form.arguments in ("python", "braces")):
        skipped = len(state.rest) - len(text)
        place = state.place._replace(offset=max(state.place.offset - skipped, begins))
        place, complete = scan(text, place, form.quotes)
        call = _buffered(reader, form, state, text[: place.offset], begins, header) if complete else None
        if call is not None:
            return state.to("calls", text[place.offset :], calls=state.calls + 1), call
        if not complete and not last:
            changed = dataclasses.replace(state, place=place._replace(offset=place.offset + skipped))
            return None if changed == state else (changed, ())
    elif not last and _may_be_call(form, state, text):
        return None
    if state.calls:
        return state.to("text", text, fresh=True), ()
    return state.to("text", state.rest, fresh=False), (Event("content", state.mark),)


def _may_be_call(form: Form, state: State, text: str) -> bool:
    """Whether more text may make a call, or the end of a section, of a text that is neither."""
    if not text:
        return True
    if state.calls and not state.end and form.arguments in ("json", "object"):
        return False
    return len(text) < LONGEST_HEADER and not (state.end and state.end in text)


def _buffered(
    reader: Reader, form: Form, state: State, text: str, begins: int, header: re.Match[str] | None
) -> tuple[Event, Event] | None:
    """The events of a call that was read at once; None where it is none."""
    if form.arguments == "object":
        return _object_call(reader, state, text)
    assert header is not None
    value = text[begins:]
    value = f"{{{value[1:-1]}}}" if form.arguments == "python" else value
    arguments = as_json(value, form.quotes)
    if arguments is None or not arguments.startswith("{"):
        return None
    return Event("call", header["name"]), Event("arguments", arguments)


def _object_call(reader: Reader, state: State, text: str) -> tuple[Event, Event] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or (not state.mark and reader.tools and name not in reader.tools):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Event("call", name), Event(
        "arguments", arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


_END_OF_MESSAGE = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def _channel(reader: Reader, state: State, last: bool) -> Move:
    """Harmony's header: whom a message is for, and its channel."""
    header, mark, rest = state.rest.partition("<|message|>")
    if not mark:
        text = header.strip()
        if any(lead.startswith(text[: len(lead)]) for lead in ("<|", "assistant", "to=")):
            return None
        return state.to("message", state.rest, name="content"), ()
    recipient = re.search(r"to=([\w.\-]+)", header)
    if recipient is not None and reader.form is not None and recipient[1] not in ("user", "assistant"):
        name = recipient[1].removeprefix("functions.")
        return state.to("message", rest, name="arguments"), (Event("call", name),)
    analysis = re.search(r"<\|channel\|>\s*analysis", header) is not None and reader.thinking is not None
    return state.to("message", rest, name="reasoning" if analysis else "content"), ()


def _message(reader: Reader, state: State, last: bool) -> Move:
    text, mark, rest = _until(state, _END_OF_MESSAGE, last)
    if not text and mark is None:
        return None
    assert state.name in ("reasoning", "content", "arguments")
    events = (Event(state.name, text),)
    if mark is None:
        return dataclasses.replace(state, rest=rest), events
    return state.to("channel", rest), events


_MODES: Mapping[Mode, Callable[[Reader, State, bool], Move]] = {
    "start": _start,
    "reasoning": _reasoning,
    "text": _text,
    "calls": _calls,
    "value": arguments.read_value,
    "tail": arguments.read_tail,
    "pairs": arguments.read_pairs,
    "pair": arguments.read_pair,
    "channel": _channel,
    "message": _message,
}
