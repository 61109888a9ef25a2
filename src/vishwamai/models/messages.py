"""Messages of chats in the form that a chat template reads: what clients send differs from what templates expect.

A template's form is learned by rendering short chats of marked texts with it. Over some 300 published templates this
form works for most: `arguments` decoded from JSON text, "" for a null content, text parts joined, and ids of nine
letters or digits where a template asks for them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models import template_sandbox

Message = dict[str, object]

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts whose `text` is the text of a message."""

_MARK = "vq7w"
_NAME = "vq7name"
_ARGUMENT = "vq7argument"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "vq7description",
        "parameters": {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT]},
    },
}
_PRINTED_PARTS = re.compile(r"""["']text["']\s*:\s*["']""")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, gpt-oss's the second."""


class CallForm(NamedTuple):
    """How a template reads an earlier call.

    Attributes:
      decoded: `arguments` is an object, not JSON text.
      empty: the content of a message that has calls only: "", None, or `...` for no such key.
      short_ids: ids are nine letters or digits.
    """

    decoded: bool = True
    empty: str | EllipsisType | None = ""
    short_ids: bool = False


_CALL_FORMS = tuple(
    CallForm(decoded, empty, short) for decoded in (True, False) for empty in ("", ..., None) for short in (False, True)
)
"""In the order of how many published templates read them."""


def normalized(messages: Sequence[Mapping[str, object]], template: str) -> list[Message]:
    """Messages in the form that a template reads.

    Args:
      messages: messages in the form of OpenAI's API.
      template: the program of the chat template.

    Raises:
      ShapeError: a message is not an object with a role, or its content is neither text nor parts.
      UnsupportedError: a part is not text; the error names it.
    """
    ids = any(message.get("tool_calls") or "tool_call_id" in message for message in messages)
    form = call_form(template) if ids else CallForm()
    names: dict[str, str] = {}  # of the functions called, by the call's id: clients leave the name of a result out
    return [_message(message, f"messages[{i}]", template, form, names) for i, message in enumerate(messages)]


def _message(
    message: Mapping[str, object], where: str, template: str, form: CallForm, names: dict[str, str]
) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise ShapeError(f'{where}: `role` is {role!r}; expected a text such as "user".')
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not _reads_developer(template):
        result["role"] = role = "system"
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    calls = result.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise ShapeError(f"{where}: `tool_calls` is {calls!r:.200}; expected a list.")
        read = [_call(call, f"{where}.tool_calls[{i}]", form) for i, call in enumerate(calls)]
        result["tool_calls"] = read
        functions = [(call.get("id"), _name(call)) for call in read]
        names |= {key: name for key, name in functions if isinstance(key, str)}
    if isinstance(key := result.get("tool_call_id"), str):
        key = _short(key) if form.short_ids else key
        result = {**({"name": names[key]} if key in names else {}), **result, "tool_call_id": key}
    content = result.pop("content", None)
    if content is None or content == []:
        content = form.empty if calls else ""
    elif isinstance(content, list | tuple):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        reads = reads_content(template, role, as_parts=True)
        content = [{"type": "text", "text": part} for part in parts] if reads else "\n".join(parts)
    elif not isinstance(content, str):
        raise ShapeError(f"{where}: `content` is {content!r:.200}; expected a text or a list of text parts.")
    if isinstance(content, str):
        content = _content(template, role, content)
    return result if content is ... else {**result, "content": content}


def _reads_developer(template: str) -> bool:
    """Whether a template has a form of its own for developers; many write the name of any role."""
    return "developer" in template and any(reads_content(template, "developer", parts) for parts in (False, True))


def _content(template: str, role: str, text: str) -> str | list[dict[str, str]]:
    """A text as the content of a message: as parts where a template reads nothing else."""
    only_parts = not reads_content(template, role) and reads_content(template, role, as_parts=True)
    return [{"type": "text", "text": text}] if only_parts else text


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        described = f"of type {kind!r}" if isinstance(part, Mapping) else repr(part)[:100]
        raise UnsupportedError(f'{where}: the part is {described}; this model reads parts of type "text" only.')
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ShapeError(f"{where}: `text` is {text!r:.200}; expected a text.")
    return text


def _call(call: object, where: str, form: CallForm) -> Message:
    if not isinstance(call, Mapping):
        raise ShapeError(f"{where}: the call is {call!r:.200}; expected an object with a `function`.")
    result = {key: value for key, value in call.items() if value is not None}
    function = result.get("function", result)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ShapeError(f"{where}: the call has no `function` with a `name`.")
    function = {**function, "arguments": _arguments(function.get("arguments"), form.decoded)}
    result = {**result, "function": function} if "function" in result else function
    if form.short_ids and isinstance(id := result.get("id"), str):
        result["id"] = _short(id)
    return result


def _name(call: Message) -> str:
    """The name of the function of a call that `_call` checked."""
    function = call.get("function", call)
    return str(function["name"]) if isinstance(function, Mapping) else ""


def _arguments(value: object, decoded: bool) -> object:
    if value is None or value == "":
        value = {}
    if not decoded:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        try:
            objects = json.loads(value)
        except (ValueError, RecursionError):  # a model wrote it, and the template gets what it wrote
            return value
        return objects if isinstance(objects, dict) else value
    return value


def _short(name: str) -> str:
    """An id of nine letters or digits, the same for the same id."""
    return name if _ID.fullmatch(name) else hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _rendered(template: str, messages: list[Message], tools: list[dict[str, object]] | None = None) -> str | None:
    """A chat of marked texts as a template renders it; None where it raises an error."""
    special = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}
    values = {**special, "tools": tools, "documents": None, "add_generation_prompt": True, "messages": messages}
    try:
        return template_sandbox.render(template, "the chat template", values).text
    except (ShapeError, UnsupportedError):
        return None


@functools.lru_cache(maxsize=256)
def reads_content(template: str, role: str, as_parts: bool = False) -> bool:
    """Whether a template renders the text of a role's message.

    Args:
      as_parts: the content is a list of text parts, which the template loops over.
    """
    content: str | list[dict[str, str]] = [{"type": "text", "text": _MARK}] if as_parts else _MARK
    message: Message = {"role": role, "content": content}
    first = {"role": "user", "content": "a" if role == "user" else _content(template, "user", "a")}
    tools = None
    if role == "user":
        chat = [message]
    elif role == "assistant":
        chat = [first, message, first]
    elif role in ("tool", "function"):
        chat, tools = [first, _example_call(form := call_form(template)), {**_result(form), **message}], [_TOOL]
    else:
        chat = [message, first]
    text = _rendered(template, chat, tools)
    return text is not None and _MARK in text and not _PRINTED_PARTS.search(text)


def _example_call(form: CallForm) -> Message:
    arguments = {_ARGUMENT: _MARK} if form.decoded else json.dumps({_ARGUMENT: _MARK})
    name = "call12345" if form.short_ids else "call_abc123"
    call = {"id": name, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    content = {} if form.empty is ... else {"content": form.empty}
    return {"role": "assistant", **content, "tool_calls": [call]}


def _result(form: CallForm) -> Message:
    return {
        "role": "tool",
        "tool_call_id": "call12345" if form.short_ids else "call_abc123",
        "name": _NAME,
        "content": "vq7result",
    }


@functools.lru_cache(maxsize=64)
def call_form(template: str) -> CallForm:
    """The first form of an earlier call that a template renders with its name and its arguments; of the ways to leave
    the content empty, the one that adds the least text.
    """
    if "tool_calls" not in template:
        return CallForm()
    user = {"role": "user", "content": _content(template, "user", "a")}
    lengths: dict[CallForm, int] = {}
    for form in _CALL_FORMS:
        if any(read[::2] == form[::2] for read in lengths) or not lengths:
            text = _rendered(template, [user, _example_call(form), _result(form)], [_TOOL])
            if text is not None and _calls(text) and (form.empty == "" or "None" in template or "None" not in text):
                lengths[form] = len(text)
    return min(lengths, key=lambda form: lengths[form], default=CallForm())


def _calls(text: str) -> bool:
    """Whether a rendered chat has the example's call, its arguments neither encoded twice nor as Python prints them."""
    return _NAME in text and _MARK in text and f'\\"{_MARK}' not in text and f"'{_ARGUMENT}': '{_MARK}'" not in text


@functools.lru_cache(maxsize=64)
def reads_tools(template: str) -> bool:
    """Whether a template renders the tools that a request offers."""
    user = {"role": "user", "content": _content(template, "user", "a")}
    text = _rendered(template, [user], [_TOOL])
    return text is not None and _NAME in text


def marked(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, int, str]]]:
    """A chat whose texts are marks in place of their words, and for each mark (mark, index of the message, part)."""
    marks: list[tuple[str, int, str]] = []

    def mark(index: int, part: str) -> str:
        marks.append((f"{_MARK}{len(marks)}e", index, part))
        return marks[-1][0]

    result = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            message = {**message, "content": mark(index, "content")}
        elif isinstance(content, list):
            parts = [_marked_part(part, functools.partial(mark, index, "content")) for part in content]
            message = {**message, "content": parts}
        if isinstance(calls := message.get("tool_calls"), list):
            calls = [_marked_call(call, functools.partial(mark, index, "tool_calls")) for call in calls]
            message = {**message, "tool_calls": calls}
        result.append(message)
    return result, marks


def _marked_part(part: Mapping[str, object], mark: Callable[[], str]) -> Mapping[str, object]:
    return {**part, "text": mark()} if str(part["text"]).strip() else part


def _marked_call(call: Mapping[str, object], mark: Callable[[], str]) -> Mapping[str, object]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": {**function, "name": mark()}}
    return {**call, "name": mark()}


def lost(marks: Iterable[tuple[str, int, str]], text: str) -> list[tuple[int, str]]:
    """(index of the message, part) of each mark that a rendered text lacks."""
    return [(index, part) for mark, index, part in marks if mark not in text]
