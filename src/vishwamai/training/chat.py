"""Chats as text: a Jinja template, and which characters of its text the model has to write itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ConfigError
from vishwamai.models.chat import ChatTemplate
from vishwamai.models.tokenizer import chat_template, special_tokens
from vishwamai.models.values import read_json
from vishwamai.training.config import TrainConfig

CHAT_TEMPLATE = "chat_template.jinja"
"""The file of a chat template, next to weights and next to the tokens of a run."""


@dataclasses.dataclass(frozen=True)
class TrainingTemplate:
    """A chat template in the form of Hugging Face's: it gets `messages` and `add_generation_prompt`.

    Attributes:
      template: the program.
      special: the texts of special tokens, which it may name.

    >>> template = TrainingTemplate(ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
    ...     "{% if add_generation_prompt %}assistant: {% endif %}", "chat.jinja"))
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    >>> text, ((begin, end),) = template.render(chat)
    >>> text[begin:end]
    'hello\\n'
    """

    template: ChatTemplate
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainConfig) -> TrainingTemplate | None:
        """That of `data.chat_template`, else that of the tokenizer that the run takes; None where neither has one.

        Raises:
          ConfigError: the file cannot be read.
          ShapeError: the tokenizer's own file is damaged.
        """
        settings = tokenizer_settings(config)
        special = special_tokens(settings)
        if config.data.chat_template is not None:
            return cls.read(config.data.chat_template, special)
        files = (tokenizer_file(config, name) for name in (CHAT_TEMPLATE, "tokenizer_config.json"))
        first = next(filter(None, files), None)
        found = None if first is None else chat_template(first.parent, settings.get("chat_template"))
        return None if found is None else cls(found, special)

    @classmethod
    def read(cls, path: str | Path, special: Mapping[str, str]) -> TrainingTemplate:
        """The template in a file.

        Raises:
          ConfigError: the file cannot be read.
        """
        return cls(ChatTemplate(read_template(path), str(path)), special)

    def render(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the spans (begin, end) of the assistant's turns, without the prompts before them.

        Raises:
          ConfigError: the text of the first turns is not the beginning of the whole text, so a turn has no place in it.
          ShapeError: the template is not a program in Jinja.
          UnsupportedError: it rejects the messages.
        """
        whole = self._text(messages)
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:i], prompt=True)
            after = self._text(messages[: i + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise ConfigError(
                    f"data.chat_template: the text of the first {i + 1} messages is not the beginning of the text of "
                    f"all {len(messages)}; pass a template that only appends."
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _text(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self.template.render(messages, {**self.special, "add_generation_prompt": prompt})


def read_template(path: str | Path) -> str:
    """The text of `data.chat_template`.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: data.chat_template is {str(path)!r}, which cannot be read: {error}") from error


def tokenizer_settings(config: TrainConfig) -> dict[str, Any]:
    """The values of the exported tokenizer_config.json: those of the tokenizer that the run takes, if it has some.

    Raises:
      ShapeError: the tokenizer's own file is damaged.
    """
    usual = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": config.tokenizer.end_of_text,
        "clean_up_tokenization_spaces": False,
    }
    found = tokenizer_file(config, "tokenizer_config.json")
    values = usual if found is None else usual | read_json(found)
    if config.data.chat_template is not None:
        values.pop("chat_template", None)
    return values


def tokenizer_file(config: TrainConfig, name: str) -> Path | None:
    """A file of the tokenizer that the run takes, in its directory or in that of `model.start_from`; None where neither
    has it, and for a tokenizer that the run trains.
    """
    if config.tokenizer.path is None:
        return None
    path = Path(config.tokenizer.path)
    folders = [path if path.is_dir() else path.parent, *map(Path, filter(None, [config.model.start_from]))]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
