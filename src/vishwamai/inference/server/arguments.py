"""The modes of `reading` for the arguments of a call: JSON as it comes, and values that are written one by one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence

from vishwamai.inference.server.forms import Form
from vishwamai.inference.server.literals import Place, as_json, scan
from vishwamai.inference.server.states import LONGEST_HEADER, Event, Move, Reader, State, may_begin


def read_value(reader: Reader, state: State, last: bool) -> Move:
    """Arguments in JSON: an object is sent on as it comes, a text that holds one at its end."""
    form, text = reader.calls, state.rest
    assert form is not None
    if state.place == Place():
        text = text.lstrip()
        if not text and not last:
            return None
        if text[:1] not in ("{", "[", '"') or text[:1] == "":
            word = re.match(r"[\w.+-]*", text)
            assert word is not None
            return end_move(form, state, text[word.end() :], (Event("arguments", "{}"),))
    place, complete = scan(text, state.place)
    if text[:1] == '"' and (state.quoted or state.place == Place()):
        if not complete:
            more = (dataclasses.replace(state, rest=text, quoted=True, place=place), ())
            return more if place != state.place else None
        return end_move(form, state, text[place.offset :], (Event("arguments", _decoded(text[: place.offset])),))
    sent = text[: place.offset] if not last or complete else text
    if complete:
        return end_move(form, state, text[place.offset :], (Event("arguments", sent),))
    if not sent:
        return None
    return dataclasses.replace(state, rest=text[len(sent) :], place=place._replace(offset=0)), (
        Event("arguments", sent),
    )


def _decoded(text: str) -> str:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text


def end_move(form: Form, state: State, rest: str, events: Sequence[Event]) -> Move:
    """Behind arguments."""
    if form.arguments != "object":
        return state.to("calls", rest, quoted=False), events
    return dataclasses.replace(state, mode="tail", rest=rest, place=Place(0, 1), quoted=False), events


def read_tail(reader: Reader, state: State, last: bool) -> Move:
    """What an object has behind its arguments."""
    place, complete = scan(state.rest, state.place)
    if complete:
        return state.to("calls", state.rest[place.offset :]), ()
    if last:
        return state.to("calls", ""), ()
    if not place.offset:
        return None
    return dataclasses.replace(state, rest=state.rest[place.offset :], place=place._replace(offset=0)), ()


def read_pairs(reader: Reader, state: State, last: bool) -> Move:
    """Before an argument that is written on its own, or behind the last."""
    form = reader.calls
    assert form is not None and form.pairs is not None
    begin = re.match(form.pairs.begin, state.rest)
    if begin is not None:
        key = begin["key"].strip()
        texts = begin.groupdict().get("string")
        quoted = texts == "true" if texts is not None else is_text(reader.tools.get(state.name), key)
        name = json.dumps(key, ensure_ascii=False)
        lead = f"{', ' if state.keys else '{'}{name}: " + ('"' if quoted else "")
        rest = state.rest[begin.end() :]
        state = state.to("pair", rest, key=key, keys=state.keys + 1, quoted=quoted, fresh=bool(form.pairs.pad))
        return state, (Event("arguments", lead),)
    text = state.rest.lstrip()
    sign = form.pairs.begin.removeprefix(r"\s*").partition("(")[0]
    if not last and (not text or sign.startswith(text) or (text.startswith(sign) and len(text) < LONGEST_HEADER)):
        return None
    return state.to("calls", state.rest), (Event("arguments", "}" if state.keys else "{}"),)


def is_text(schema: object, key: str) -> bool:
    """Whether an argument is a text by the schema of its function."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kind = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(kind, Mapping):
        return False
    values = kind.get("enum")
    return kind.get("type") == "string" or (isinstance(values, list) and all(isinstance(v, str) for v in values))


def read_pair(reader: Reader, state: State, last: bool) -> Move:
    """The value of an argument that is written on its own: a text is sent on as it comes, another value at its end."""
    form = reader.calls
    assert form is not None and form.pairs is not None
    pad, end = form.pairs.pad, form.pairs.end
    text = state.rest
    if state.fresh:
        if pad.startswith(text) and not last:
            return None
        text = text.removeprefix(pad)
    position = text.find(end)
    if position >= 0 or last:
        value = text if position < 0 else text[:position].removesuffix(pad)
        rest = "" if position < 0 else text[position + len(end) :]
        types = _types_of(reader.tools.get(state.name), state.key)
        event = Event("arguments", _escaped(value) + '"' if state.quoted else _json_of(value, types))
        return state.to("pairs", rest, fresh=False), (event,)
    if not state.quoted:
        return None
    keep = max(may_begin(text, pad + end), may_begin(text, end))
    certain = text[: len(text) - keep]
    if not certain:
        return None
    return dataclasses.replace(state, rest=text[len(certain) :], fresh=False), (Event("arguments", _escaped(certain)),)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, types: frozenset[str]) -> str:
    """A value that is JSON, or else the text that it is.

    Args:
      text: value as the model writes it.
      types: names of its types by the schema of the function. Where a text is among them, JSON of a type that is not
        is a text: 007 of a number or none.
    """
    value = as_json(text, ('"', "'"))
    if value is None or ("string" in types and not _TYPES[type(json.loads(value))] & types):
        return json.dumps(text, ensure_ascii=False)
    return value


_TYPES: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
"""JSON Schema's names of the types of values."""


def _types_of(schema: object, key: str) -> frozenset[str]:
    """The types of an argument, by the names of JSON Schema; none where the schema of its function does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kinds = [properties.get(key)] if isinstance(properties, Mapping) else []
    types: set[str] = set()
    for kind in itertools.islice(kinds, 64):
        if not isinstance(kind, Mapping):
            continue
        named = kind.get("type")
        types.update(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
        types.update(["null"] if kind.get("nullable") is True else ())
        for word in ("anyOf", "oneOf", "allOf"):
            kinds += kind[word] if isinstance(kind.get(word), list) else []
        path = str(kind.get("$ref", "")).removeprefix("#/").split("/")
        if isinstance(schema, Mapping) and len(path) == 2:  # of a definition at the root of the schema
            definitions = schema.get(path[0])
            kinds.append(definitions.get(path[1]) if isinstance(definitions, Mapping) else None)
    return frozenset(types)
