"""Chats as text: a Jinja template, and which characters of its text the model has to write itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TrainingTemplate:
    """A chat template in the form of Hugging Face's: it gets `messages` and `add_generation_prompt`.

    >>> template = TrainingTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
    ...     "{% if add_generation_prompt %}assistant: {% endif %}")
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    >>> text, ((begin, end),) = template.render(chat)
    >>> text[begin:end]
    'hello\\n'
    """

    source: str

    @classmethod
    def read(cls, path: str | Path) -> TrainingTemplate:
        """The template in a file.

        Raises:
          ConfigError: the file cannot be read.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config: data.chat_template is {str(path)!r}, which cannot be read: {error}") from error

    def render(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the spans (begin, end) of the assistant's turns, without the prompts before them.

        Raises:
          ConfigError: the text of the first turns is not the beginning of the whole text, so a turn has no place in it.
        """
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.source)
        whole = template.render(messages=messages, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template.render(messages=messages[:i], add_generation_prompt=True)
            after = template.render(messages=messages[: i + 1], add_generation_prompt=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ConfigError(
                    f"data.chat_template: the text of the first {i + 1} messages is not the beginning of the text of "
                    f"all {len(messages)}; pass a template that only appends."
                )
            spans.append((len(before), len(after)))
        return whole, spans
