"""Values as models write them in calls, Python's and Gemma's, to JSON; and where such a value ends in a text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = re.compile(r"\s+|[\w$.+-]+|[\[\](){},:=]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(?s:(.)))")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class Place(NamedTuple):
    """Where a scan of a value is: the position, how many brackets are open, and the quote of a text."""

    offset: int = 0
    depth: int = 0
    quote: str = ""


@functools.cache
def _marks(quotes: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"{'|'.join(map(re.escape, quotes))}|[\[\](){{}}]")


@functools.cache
def _ends(quote: str) -> re.Pattern[str]:
    return re.compile(rf"\\(?s:.)|{re.escape(quote)}" if len(quote) == 1 else re.escape(quote))


def scan(text: str, place: Place, quotes: tuple[str, ...] = ('"',)) -> tuple[Place, bool]:
    """(the place up to which a value is read, whether it ends there); the brackets that are open at `place` count.

    >>> scan('{"a": "}"} b', Place())
    (Place(offset=10, depth=0, quote=''), True)
    """
    position, depth, quote = place
    while True:
        if quote:
            mark = _ends(quote).search(text, position)
            if mark is None:
                # Keep what may be the first character of an escape, or a part of a longer quote.
                keep = len(quote) - 1 if len(quote) > 1 else len(text[position:]) - len(text[position:].rstrip("\\"))
                return Place(max(position, len(text) - keep), depth, quote), False
            position = mark.end()
            if mark[0] != quote:
                continue
            quote = ""
            if depth == 0:
                return Place(position), True
            continue
        mark = _marks(quotes).search(text, position)
        if mark is None:
            longest = max(map(len, quotes)) - 1
            return Place(max(position, len(text) - longest), depth), False
        position = mark.end()
        if mark[0] in quotes:
            quote = mark[0]
        elif mark[0] in "[({":
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return Place(position), True


def as_json(text: str, quotes: Sequence[str]) -> str | None:
    """A value as JSON text; None for what is not one.

    >>> as_json("{city='Paris', days=[1, 2,], deep={'a': None}}", ['"', "'"])
    '{"city": "Paris", "days": [1, 2], "deep": {"a": null}}'
    """
    try:
        value = json.loads("".join(_tokens(text, quotes)), parse_constant=_no_constant)
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _tokens(text: str, quotes: Sequence[str]) -> list[str]:
    """The tokens of a value in JSON's form.

    Raises:
      ValueError: a character that no token begins with, or a text without its end.
    """
    tokens: list[str] = []
    position, bare = 0, ""  # the last token, where it is a word without quotes
    while position < len(text):
        quote = next((quote for quote in quotes if text.startswith(quote, position)), None)
        if quote is not None:
            begin = position + len(quote)
            while (end := _ends(quote).search(text, begin)) is not None and end[0] != quote:
                begin = end.end()
            if end is None:
                raise ValueError("a text without its end")
            content = text[position + len(quote) : end.start()]
            content = _ESCAPE.sub(_unescaped, content) if len(quote) == 1 else content
            tokens.append(json.dumps(content, ensure_ascii=False))
            position, bare = end.end(), ""
            continue
        plain = _PLAIN.match(text, position)
        if plain is None:
            raise ValueError("no value")
        position, token = plain.end(), plain[0]
        if token.isspace():
            continue
        if token in (":", "="):
            if bare:
                tokens[-1] = json.dumps(bare)
            tokens.append(":")
        elif token in "])}":
            if tokens and tokens[-1] == ",":
                tokens.pop()
            tokens.append("]" if token == ")" else token)
        else:
            tokens.append("[" if token == "(" else _WORDS.get(token, token))
        bare = token if token not in "[](){},:=" else ""
    return tokens


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code:
        character = chr(int(code, 16))
        return "\ufffd" if "\ud800" <= character <= "\udfff" else character
    return _LETTERS.get(escape[3], escape[3] if escape[3] in "\\'\"/" else escape[0])
