"""Tool calls: how models write them, and how they are read from an answer.

Which form a model uses is seen in its chat template. The forms: Hermes and Qwen, `<tool_call>{...}</tool_call>`;
Mistral, `[TOOL_CALLS][{...}]`; Llama 3, an answer that is one JSON object. The marks may be special tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vishwamai.core.errors import UnsupportedError

Form = Literal["hermes", "mistral", "llama"]
MARKS: dict[Form, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "{"}
"""What a call begins with."""

FORMS = "Hermes and Qwen, Mistral's `[TOOL_CALLS][{...}]`, and Llama 3"
"""The forms that are read, for people."""

_AROUND: dict[Form, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>",), ("</tool_call>",)),
    "mistral": (("[TOOL_CALLS]", "["), ("]",)),
    "llama": ((), ()),
}
"""What stands before and after one call."""


class Call(NamedTuple):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


def form_of(template: str) -> Form | None:
    """How a model with this chat template writes calls; None if not in a form that is read."""
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"  # Qwen3 Coder writes XML between the same marks
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else "mistral"  # newer ones write name[ARGS]{...}
    return "llama" if re.search(r'"name": function name,\s*"parameters":', template) else None


def marks_of(form: Form, added: Mapping[str, int]) -> dict[str, int]:
    """The marks around calls that are tokens of their own (ids by text): the text of an answer must keep them."""
    return {mark: added[mark] for marks in _AROUND[form] for mark in marks if mark in added}


def split(form: Form, text: str) -> tuple[str, list[Call]]:
    """(the text outside of calls, the calls); what does not read as a call stays text.

    >>> split("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments='{"a": 1}')])
    >>> split("llama", '{"name": "add"')
    ('{"name": "add"', [])
    """
    if form == "hermes":
        values = _between(text, *(marks[0] for marks in _AROUND[form]))
    elif form == "mistral":
        value = _json(text.partition(MARKS[form])[2])
        values = value if isinstance(value, list) else [value]
    else:
        values = [_json(text)]
    calls = [call for value in values if (call := _call(value)) is not None]
    if not values or len(calls) != len(values):
        return text, []
    return text.partition(MARKS[form])[0].strip(), calls


def _between(text: str, mark: str, end_mark: str) -> list[Any]:
    """The JSON values behind each mark, None for what is not one. A text within a value may have a mark in it."""
    values: list[Any] = []
    at = text.find(mark)
    while at >= 0:
        rest = text[at + len(mark) :].lstrip()
        try:
            value, length = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [None]
        text = rest[length:].lstrip()
        if text and not text.startswith(end_mark):
            return [None]
        values.append(value)
        at = text.find(mark)
    return values


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def grammar(
    form: Form,
    tools: Sequence[Mapping[str, Any]],
    added: Mapping[str, int],
    *,
    forced: bool = True,
    content: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """The grammar of an answer with calls: kind and source of `guided.Vocabulary.grammar`.

    Args:
      tools: functions that may be called: `name`, `parameters`, `strict`.
      added: ids of the tokens that are a text of their own, by text; a mark among them is written as that token, which
        no other text matches.
      forced: the answer is one call. Otherwise it is text, and calls whose arguments follow the schema of a tool that
        is `strict`, and are any object of another.
      content: the JSON schema of an answer without calls, if it has one.
    """
    of_tools = [_call_rules(i, form, tool, forced) for i, tool in enumerate(tools)]
    rules = [f"object: {' | '.join(f'object{i}' for i in range(len(tools)))}", *itertools.chain(*of_tools)]
    if form == "llama":
        call = calls = "object"
        rules.append(r"TEXT: /\s*[^\s{](?s:.*)/")
    else:
        before, after = ([_mark(mark, added) for mark in marks] for marks in _AROUND[form])
        mark, behind = before[0], " ".join(["BLANK?", *before[1:], "{}", "BLANK?", *after])
        call = f"{mark} {behind.format('object')}"
        rules.append(r"BLANK: /[ \n]/")
        # Text without the mark, then the mark, as a token or as the end of a text.
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(MARKS[form])}(?s:.*)/")
        objects = 'object (", " object)*' if form == "mistral" else "object"
        lead = f"TEXT? {mark}"
        if MARKS[form] not in added:
            rules.append(f"lead[suffix={json.dumps(MARKS[form])}]: /(?s:.*)/")
            lead = "lead"
        calls = f"({lead} {behind.format(objects)})+ TEXT?"
    if forced:
        start = call
    elif content is not None:
        rules.append("content: %json " + json.dumps(content))
        start = f"content | {call}"
    else:
        start = f"{calls} | TEXT?"
    return "lark", "\n".join([f"start: {start}", *rules])


def _call_rules(i: int, form: Form, tool: Mapping[str, Any], forced: bool) -> tuple[str, str]:
    """The rules of a call of one tool. Its schema is a grammar of its own, for its references count from its root."""
    key = "parameters" if form == "llama" else "arguments"
    schema = (tool.get("parameters") if forced or tool.get("strict") else None) or {"type": "object"}
    # As templates write them, and no room to write blanks for ever.
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    before = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "{key}": ')
    source = json.dumps({"x-guidance": spaces, **schema})
    return f'object{i}: {before} arguments{i} "}}"', f"arguments{i}: %json {source}"


def _mark(text: str, added: Mapping[str, int]) -> str:
    return f"<[{added[text]}]>" if text in added else json.dumps(text)


# The form for a template that does not read `tools`: that of Hermes, written into the messages.

_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""As Qwen 2.5's chat template offers tools."""


def in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], role: str = "system"
) -> list[dict[str, Any]]:
    """Messages that offer tools, and have earlier calls and their results, as texts in the form of Hermes.

    Args:
      messages: as clients send them.
      tools: the values of `tools`.
      role: of the message that offers them, the first of its kind: "system", or "user" for a template that has none.

    >>> chat = in_messages([{"role": "user", "content": "2 + 2?"}], [{"type": "function", "function": {"name": "add"}}])
    >>> [message["role"] for message in chat], '"name": "add"' in chat[0]["content"]
    (['system', 'user'], True)
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if chat and chat[-1].pop("results", None):
                chat[-1] |= {"content": f"{chat[-1]['content']}\n{text}", "results": True}
            else:
                chat.append({"role": "user", "content": text, "results": True})
            continue
        calls = [_written(call) for call in message.get("tool_calls") or ()]
        if calls:
            text = "\n".join(filter(None, [_text(message), *calls]))
            message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        chat.append(dict(message))
    for message in chat:
        message.pop("results", None)
    offer = _OFFER.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    at = next((i for i, message in enumerate(chat) if message["role"] == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": offer}, *chat]
    texts = [_text(chat[at]), offer]
    chat[at]["content"] = "\n\n".join(texts if role == "system" else texts[::-1])
    return chat


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise UnsupportedError(
            f"a message of role {message['role']!r} has a part without a text; this model reads text."
        )
    return "\n".join(texts)


def _written(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    value = dict(function) if isinstance(function, dict) else {}
    if isinstance(value.get("arguments"), str):
        value["arguments"] = _json(value["arguments"]) if value["arguments"] else {}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"
