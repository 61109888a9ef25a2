"""Chat templates: programs in Jinja that come with a model, run in a sandbox that cannot change what it is given."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from vishwamai.core.errors import ShapeError, UnsupportedError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's own text for training; the text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _stop(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that templates are written for: that of `apply_chat_template` of transformers."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _stop
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
      text: the program.
      source: the file that it comes from, for errors.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "chat.jinja")
    >>> template.render([{"role": "user", "content": "hello"}], {})
    '<user>hello'
    """

    text: str
    source: str

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The prompt.

        Args:
          messages: the conversation, as JSON values.
          values: what else the template may read.

        Raises:
          ShapeError: the template is not a program in Jinja.
          UnsupportedError: the template rejects the messages, or does what the sandbox forbids.
        """
        try:
            template = _compiled(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise ShapeError(f"{self.source}: the chat template is not valid Jinja: {error}.") from error
        plain = json.loads(json.dumps({"tools": None, "documents": None, **values, "messages": list(messages)}))
        try:
            return template.render(plain)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
            raise UnsupportedError(f"{self.source}: the chat template rejects these messages: {error}") from error
