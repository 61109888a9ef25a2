"""The program of the process that renders chat templates, which `template_sandbox` starts.

It reads one JSON object a line and answers each with one. It imports jinja2 and the standard library alone, so that it
starts in a tenth of a second and needs little of the address space that it may have.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_TEXT_LIMIT = 1 << 26
"""Characters of a rendered text at most."""


class _Output:
    """How far the text of the template that runs has come, and its `{% generation %}` spans."""

    def __init__(self) -> None:
        self.length = 0
        self.spans: list[tuple[int, int]] = []


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's own text for training; the text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        output = self.environment.output  # type: ignore[attr-defined]
        output.spans.append((output.length, output.length + len(text)))
        return text


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, as that of transformers."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace's attribute may not be named {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | str | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    options = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.cache
def _environment() -> Any:
    """The environment that templates are written for: that of `apply_chat_template` of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["namespace"] = _Namespace
    environment.extend(output=_Output())
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def render(text: str, values: dict[str, object], now: str) -> dict[str, object]:
    """The answer to one request: `text` and `spans`, or an `error` of a `kind`: "syntax", "rejects" or "limit"."""
    try:
        template = _compiled(text)
    except MemoryError:
        return {"kind": "limit", "error": "it needs too much memory"}
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError, ValueError, OverflowError) as error:
        return {"kind": "syntax", "error": str(error)}
    output = _environment().output = _Output()
    time = datetime.datetime.fromisoformat(now)
    pieces = []
    try:
        for piece in template.generate({**values, "strftime_now": time.strftime}):
            pieces.append(piece)
            output.length += len(piece)
            if output.length > _TEXT_LIMIT:
                return {"kind": "limit", "error": f"its text has more than {_TEXT_LIMIT} characters"}
    except MemoryError:
        return {"kind": "limit", "error": "it needs too much memory"}
    except Exception as error:
        return {"kind": "rejects", "error": str(error) or type(error).__name__}
    return {"text": "".join(pieces), "spans": output.spans}


def main(memory: int) -> None:
    """Answers requests until the input ends.

    Args:
      memory: bytes of address space that the process may have.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input ends it
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ImportError, ValueError, OSError):  # a system without such limits; the time is limited all the same
        pass
    for line in sys.stdin.buffer:
        request = None
        try:
            request = json.loads(line)
            answer = json.dumps(render(**request)).encode()
        except MemoryError:
            answer = json.dumps({"kind": "limit", "error": "it needs too much memory"}).encode()
        del request, line
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
        del answer


if __name__ == "__main__":
    main(int(sys.argv[1]))
