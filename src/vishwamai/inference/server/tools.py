"""Tool calls: how models write them, and how they are read from an answer.

Which form a model uses is seen in its chat template. The forms: Hermes and Qwen, `<tool_call>{...}</tool_call>`;
Mistral, `[TOOL_CALLS][{...}]`; Llama 3, an answer that is one JSON object. The marks may be special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

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


def special_marks(form: Form, special: Mapping[str, int]) -> dict[str, int]:
    """The marks around calls that are among the special tokens (ids by text), which an answer's text must keep."""
    return {mark: special[mark] for marks in _AROUND[form] for mark in marks if mark in special}


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


def grammar(form: Form, tools: list[dict[str, Any]], special: Mapping[str, int]) -> tuple[str, Any]:
    """The grammar (kind and source of `guided.Vocabulary.grammar`) of an answer that is one call of one of `tools`,
    its marks among the special tokens (ids by text) written as those, for a text never matches a special token.
    """
    key = "parameters" if form == "llama" else "arguments"
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, key: tool.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # As templates write them, and no room to write blanks for ever.
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.dumps({"anyOf": choices, "x-guidance": spaces})
    before, after = (
        [f"<[{special[mark]}]>" if mark in special else json.dumps(mark) for mark in marks] for marks in _AROUND[form]
    )
    return "lark", "start: " + " ".join([*before, f"%json {schema}", *after])
