"""Tool calls of an answer: grammars that force them, and messages that offer tools to a template without them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from vishwamai.core.errors import UnsupportedError
from vishwamai.inference.grammar_forms import plain_schema
from vishwamai.inference.server.arguments import is_text
from vishwamai.inference.server.forms import FORMS, Form


def grammar(
    name: str,
    tools: Sequence[Mapping[str, object]],
    added: Mapping[str, int],
    *,
    forced: bool = True,
    content: Mapping[str, object] | None = None,
) -> tuple[str, str]:
    """The grammar of an answer with calls: kind and source of `guided.Vocabulary.grammar`.

    Args:
      name: key of the form in `forms.FORMS`.
      tools: functions that may be called: `name`, `parameters`, `strict`.
      added: ids of the tokens that are a text of their own, by text; a mark among them is written as that token, which
        no other text matches.
      forced: the answer is one call. Otherwise it is text, and calls whose arguments follow the schema of a tool that
        is `strict`, and are any object of another.
      content: the JSON schema of an answer without calls, if it has one.

    Raises:
      UnsupportedError: the form has no grammar.
    """
    form = FORMS[name]
    if form.template is None:
        raise UnsupportedError(
            f"calls in the form {name!r} have no grammar, so they cannot be forced or strict; leave `tool_choice` and "
            "`strict` out."
        )
    of_tools = [_call_rules(i, form, tool, added, forced) for i, tool in enumerate(tools)]
    rules = [f"object: {' | '.join(f'object{i}' for i in range(len(tools)))}", *itertools.chain(*of_tools)]
    objects, end = "object", ""
    if form.lead:
        call = calls = "object"
        rules.append(r"TEXT: /\s*[^\s{](?s:.*)/")
    else:
        begin, end = form.sections[0]
        blank = "BLANK?" if form.arguments == "object" or form.wrap[0] == "\n" else ""
        before, between, after = (_literal(part.strip("\n"), added) for part in form.wrap)
        behind = " ".join([blank, before, "{}", blank, after, _literal(end, added)])
        call = f"{_literal(begin, added)} {behind.format('object')}"
        rules.append(r"BLANK: /[ \n]/")
        # Text without the mark, then the mark, as a token or as the end of a text.
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(begin)}(?s:.*)/")
        if form.several:
            objects = f"object ({between} object)*"
        lead = f"TEXT? {_literal(begin, added)}"
        if begin not in added:
            rules.append(f"lead[suffix={json.dumps(begin)}]: /(?s:.*)/")
            lead = "lead"
        calls = f"({lead} {behind.format(objects)})+ TEXT?"
    if forced:
        start = call
    elif content is not None:
        rules.append("content: %json " + json.dumps(plain_schema(content)))
        start = f"content | {call}"
    else:
        start = f"{calls} | TEXT?"
    return "lark", "\n".join([f"start: {start}", *rules])


def _call_rules(i: int, form: Form, tool: Mapping[str, object], added: Mapping[str, int], forced: bool) -> list[str]:
    """The rules of a call of one tool. Its schema is a grammar of its own, for its references count from its root."""
    assert form.template is not None
    quoted = form.arguments == "object"
    name = str(tool["name"])
    name = json.dumps(name)[1:-1] if quoted else name
    before, after = (_literal(part.replace("{name}", name), added) for part in form.template)
    schema = tool.get("parameters") if forced or tool.get("strict") else None
    schema = schema if isinstance(schema, Mapping) and schema else {"type": "object"}
    head = f"object{i}: {before} arguments{i} {after}"
    strict = bool(tool.get("strict"))
    if form.pairs is not None:
        return [head, *_pair_rules(i, form, schema, added, strict)]
    return [head, f"arguments{i}: {_json_rule(schema, strict)}"]


def _json_rule(schema: Mapping[str, object], strict: bool) -> str:
    # As templates write them, and no room to write blanks for ever. Of a function that is not `strict`, keywords that
    # grammars cannot express do not hold: OpenAI's servers promise such schemas for strict functions only.
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}
    return "%json " + json.dumps({"x-guidance": options, **plain_schema(schema)})


def _pair_rules(i: int, form: Form, schema: Mapping[str, object], added: Mapping[str, int], strict: bool) -> list[str]:
    """The rules of arguments that are written one by one, in the order of the schema, whose other keywords do not
    hold.
    """
    pairs, properties = form.pairs, schema.get("properties")
    assert pairs is not None
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [], []
    for j, (key, value) in enumerate(properties.items()):
        texts = is_text(schema, key)
        before = pairs.template.replace("{key}", key).replace("{string}", "true" if texts else "false")
        parts.append(f"pair{i}_{j}" + ("" if key in required else "?"))
        end = pairs.pad + pairs.end
        if texts and isinstance(value.get("enum"), list):
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value["enum"])
            rule = f"({choices}) {_literal(end, added)}"
        elif texts and pairs.end in added:
            rules.append(f"TEXT{i}_{j}: /(?s:.*)/ & ~/(?s:.*){re.escape(pairs.end)}(?s:.*)/")
            rule = f"TEXT{i}_{j} {_literal(end, added)}"
        elif texts:
            rules.append(f"text{i}_{j}[suffix={json.dumps(end)}]: /(?s:.*)/")
            rule = f"text{i}_{j}"
        else:
            rules.append(
                f"value{i}_{j}: " + _json_rule({**shared, **value} if isinstance(value, Mapping) else {}, strict)
            )
            rule = f"value{i}_{j} {_literal(end, added)}"
        rules.append(f"pair{i}_{j}: {_literal(before, added)} {rule} {_literal(pairs.gap, added)}")
    return [f"arguments{i}: {' '.join(parts) or json.dumps('')}", *rules]


def _literal(text: str, added: Mapping[str, int]) -> str:
    """A text as a grammar writes it, its marks as tokens; `{index}` is a number."""
    marks = sorted((mark for mark in added if mark and mark in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, [*marks, '{index}']))})", text)
    terms = (
        f"<[{added[piece]}]>" if piece in marks else "/[0-9]{1,3}/" if piece == "{index}" else json.dumps(piece)
        for piece in pieces
        if piece
    )
    return " ".join(terms)


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
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]], role: str = "system"
) -> list[dict[str, object]]:
    """Messages that offer tools, and have earlier calls and their results, as texts in the form of Hermes.

    Args:
      messages: the client's messages.
      tools: the values of `tools`.
      role: role of the message that offers them, the first of its kind: "system", or "user" for a template that has
        none.

    >>> chat = in_messages([{"role": "user", "content": "2 + 2?"}], [{"type": "function", "function": {"name": "add"}}])
    >>> [message["role"] for message in chat], '"name": "add"' in chat[0]["content"]
    (['system', 'user'], True)
    """
    chat: list[dict[str, object]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if chat and chat[-1].pop("results", None):
                chat[-1] |= {"content": f"{chat[-1]['content']}\n{text}", "results": True}
            else:
                chat.append({"role": "user", "content": text, "results": True})
            continue
        calls = message.get("tool_calls")
        calls = [call_text(call) for call in calls] if isinstance(calls, Iterable) else []
        if calls:
            text = "\n".join(filter(None, [_text(message), *calls]))
            message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        chat.append(dict(message))
    for message in chat:
        message.pop("results", None)
    offer = _OFFER.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    index = next((i for i, message in enumerate(chat) if message["role"] == role), None)
    if index is None or (role == "system" and index > 0):
        return [{"role": role, "content": offer}, *chat]
    texts = [_text(chat[index]), offer]
    chat[index]["content"] = "\n\n".join(texts if role == "system" else texts[::-1])
    return chat


def _text(message: Mapping[str, object]) -> str:
    """The text of a message."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise UnsupportedError(
            f"a message of role {message['role']!r} has a part without a text; this model reads text."
        )
    return "\n".join(texts)


def call_text(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    value = dict(function) if isinstance(function, dict) else {}
    if isinstance(value.get("arguments"), str):
        value["arguments"] = _json(value["arguments"]) if value["arguments"] else {}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
