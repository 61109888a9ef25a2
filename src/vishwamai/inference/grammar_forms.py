"""Schemas and grammars in the dialects that clients write, to those that llguidance reads.

OpenAPI has keywords and formats that JSON Schema has not, and many encoders write nulls for absent keys. Grammars of
llama.cpp and of vLLM's clients are GBNF.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

_FORMATS = frozenset(
    "date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)
"""The formats of JSON Schema. It calls any other an annotation: `int32`, `password` and `binary` of OpenAPI, ..."""

_COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
_MAPS = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_LISTS = frozenset("anyOf oneOf allOf prefixItems".split())
_SINGLE = frozenset(
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties contains propertyNames not if "
    "then else".split()
)
_OUTSIDE = frozenset("$schema $id $defs definitions x-guidance".split())
"""Keywords that a schema keeps when the rest of it becomes one of two alternatives."""

_DEEPEST = 128
"""Levels that llguidance reads. It declines a deeper schema, which may stay as it is."""


def plain_schema(schema: Any, level: int = 0) -> Any:
    """A schema by JSON Schema's keywords alone; every other keyword stays, for llguidance to decline or ignore.

    - `nullable` becomes the type null, and a format that is none of JSON Schema's is left out;
    - a keyword whose value is null is left out, except `const`; a count such as 3.0 becomes 3;
    - characters that a URI must not have are escaped in `$ref`.

    Args:
      schema: JSON Schema, an object or a boolean.
      level: how deep in another schema it is.

    >>> plain_schema({"type": "string", "format": "password", "nullable": True, "maxLength": 3.0, "enum": None})
    {'type': ['string', 'null'], 'maxLength': 3}
    """
    if not isinstance(schema, Mapping) or level > _DEEPEST:
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if (value is None and key != "const") or key == "nullable":
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _MAPS and isinstance(value, Mapping):
            value = {name: plain_schema(inner, level + 1) for name, inner in value.items()}
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            value = [plain_schema(inner, level + 1) for inner in value]
        elif key in _SINGLE:
            value = plain_schema(value, level + 1)
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif key == "$ref" and isinstance(value, str):
            value = urllib.parse.quote(value, safe="#%/:?=&~!$'()*+,;@-._")
        plain[key] = value
    if schema.get("nullable") is not True:
        return plain
    kind = plain.get("type")
    if isinstance(kind, str) and not {"enum", "const"} & plain.keys():
        return plain | {"type": [kind, "null"]}
    outside = {key: plain.pop(key) for key in _OUTSIDE & plain.keys()}
    return {**outside, "anyOf": [plain, {"type": "null"}]}


_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_PARTS = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<comment>#[^\n]*)|(?P<newline>\s*\n\s*(?=\|))'
    r"|(?P<any>\.)|(?P<root>(?<![\w-])root(?![\w-]))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY = f"[\\x00-{chr(0x10FFFF)}]"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF, as llama.cpp and vLLM's clients write it, and not Lark's.

    >>> is_gbnf('root ::= "a"'), is_gbnf('start: "a"')
    (True, False)
    """
    return _GBNF.search(text) is not None


def lark_of(text: str) -> str:
    """A grammar of GBNF in Lark's form. A rule without recursion becomes a terminal, which takes as much as it can.

    Raises:
      ValueError: it is not GBNF.

    >>> print(lark_of('root ::= "a" [b-d]+').strip())
    %llguidance {}
    <BLANKLINE>
    start: ROOT_RULE
    ROOT_RULE: "a" /[b-d]/+
    """
    # The rule `root` under another name may become a terminal, too.
    text = "root ::= root-rule\n" + _PARTS.sub(_part, text)
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, IndexError) as error:
        raise ValueError(str(error) or "it ends too early") from error
    except RecursionError:
        raise
    except Exception as error:  # what the library raises for rules that are absent or double has no class of its own
        raise ValueError(str(error)) from error


def _part(match: re.Match[str]) -> str:
    """A part of GBNF as the library's converter reads it: it takes no newline before `|` and cuts zeros of escapes."""
    kind, text = match.lastgroup, match[0]
    if kind == "text":
        return _ESCAPE.sub(_character, text)
    if kind == "set":
        return re.sub("[&~]", lambda mark: f"\\x{ord(mark[0]):02x}", _ESCAPE.sub(_character, text))
    return {"comment": "", "newline": " ", "any": _ANY, "root": "root-rule"}[str(kind)]


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code is None:
        return escape[0]
    value = int(code, 16)
    if value > 0x10FFFF or 0xD800 <= value < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{value:02x}" if value < 0x80 else chr(value)
