"""Rows of published datasets as documents: chats in the forms of OpenAI and ShareGPT, prompts with completions, and
instructions with outputs (Alpaca).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]

TEXT = "text"
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system")
"""The columns of a row that has no column `TEXT`."""

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
"""ShareGPT's senders by roles; others have the same name."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """The messages of a chat (`role` and `content`), and the functions that the assistant may call.

    Attributes:
      messages: turns, in order.
      tools: JSON Schemas of the functions, in the form of OpenAI's API; None for a chat without.
      answers: number of the assistant's last turns that count in the loss; None for all.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    answers: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text of which only what follows its prompt counts in the loss."""

    prompt: str
    text: str


Document = str | Chat | Completion


def messages_of(value: object) -> Messages | None:
    """The messages of a column in OpenAI's form; None where it holds none.

    Args:
      value: list of messages, or one: each has a role and a content or calls of functions, or, as in ShareGPT, `from`
        and `value`.

    >>> messages_of([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}])
    [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes?'}]
    """
    values = [value] if isinstance(value, dict) else value
    if not isinstance(values, list) or not values:
        return None
    messages = [_message(entry) for entry in values]
    return None if None in messages else [message for message in messages if message is not None]


def _message(value: object) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    if "role" in value and ("content" in value or "tool_calls" in value):
        return value
    sender, content = value.get("from"), value.get("value")
    if not isinstance(sender, str) or not isinstance(content, str):
        return None
    rest = {key: entry for key, entry in value.items() if key not in ("from", "value")}
    if sender != "function_call":
        return {"role": _ROLES.get(sender, sender), "content": content, **rest}
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return None
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def document(row: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> Document | None:
    """The document of a row that has no column of text; None where its columns have no form of `COLUMNS`.

    Args:
      row: values by column. tools: functions of the row's chat.

    >>> document({"prompt": "1 + 1 = ", "completion": "2"}, None)
    Completion(prompt='1 + 1 = ', text='2')
    >>> document({"instruction": "Add.", "input": "1, 1", "output": "2"}, None).messages[0]["content"]
    'Add.\\n\\n1, 1'
    """
    system = row.get("system")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    for column in ("messages", "conversations"):
        messages = messages_of(row.get(column))
        if messages is not None:
            return Chat(messages if messages[0]["role"] == "system" else [*before, *messages], tools)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str) and completion.strip():
        return Completion(prompt, completion)
    context, answer = messages_of(prompt), messages_of(completion)
    if context is not None and answer is not None:
        return Chat([*context, *answer], tools, _answers(answer))
    instruction, output = row.get("instruction"), row.get("output")
    if isinstance(instruction, str) and isinstance(output, str) and output.strip():
        request = "\n\n".join(
            part for part in (instruction, row.get("input")) if isinstance(part, str) and part.strip()
        )
        return Chat([*before, {"role": "user", "content": request}, {"role": "assistant", "content": output}], tools)
    return None


def _answers(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)
