"""Chats as text: a Jinja template, and which characters of its text the model has to write itself."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.models import template_sandbox
from vishwamai.models.chat import ChatTemplate
from vishwamai.models.messages import Message, normalized, reads_tools
from vishwamai.models.tokenizer import chat_template, special_tokens
from vishwamai.models.values import read_json
from vishwamai.training.config import TrainConfig

Span = tuple[int, int]
"""Characters of a text, from the first up to the one after the last."""

END_OF_TEXT = "<|endoftext|>"
"""The end token of a tokenizer that a run trains, and of those that name none."""

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
        template = None if first is None else chat_template(first.parent, settings.get("chat_template"))
        return None if template is None else cls(template, special)

    @classmethod
    def read(cls, path: str | Path, special: Mapping[str, str]) -> TrainingTemplate:
        """The template in a file.

        Raises:
          ConfigError: the file cannot be read.
        """
        return cls(ChatTemplate(read_template(path), str(path)), special)

    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a chat, and the spans (begin, end) of the assistant's turns, without the prompts before them.

        The template's `{% generation %}` blocks are the turns. Without such blocks, a turn goes from the generation
        prompt to the end of the turn. A turn whose text the template leaves out has no span.

        Raises:
          ShapeError: the template is not a program in Jinja, or a message does not have the form of one.
          UnsupportedError: it rejects the messages, leaves the text of one out that is not the assistant's, or does not
            show the model its tools.
        """
        program = self.template.program(bool(tools))
        if tools and not reads_tools(program):
            raise UnsupportedError(
                f"{self.template.source}: the chat template leaves out the tools of a chat; leave out the column of "
                "tools (data.sources.tools), or set data.chat_template to a template that has them."
            )
        values = {**self.special, "tools": tools or None}
        rendering = self.template.rendering(messages, {**values, "add_generation_prompt": False})
        if _GENERATION.search(program):
            return rendering.text, list(rendering.spans)
        turns = _Turns(self.template, program, values)
        chat = normalized(messages, program)
        spans: list[Span] = []
        for index, message in enumerate(chat):
            if message["role"] == "assistant":
                span = turns.span(rendering.text, chat, index, spans[-1][1] if spans else 0)
                spans += [] if span is None else [span]
        return rendering.text, spans


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Finds turns in the text of a chat.

    Attributes:
      template: the template that wrote the text.
      program: its program for the chat, with or without tools.
      values: variables of the program in addition to the messages.
    """

    template: ChatTemplate
    program: str
    values: Mapping[str, object]

    def span(self, full_text: str, chat: list[Message], index: int, least: int) -> Span | None:
        """The span of a message in the text of a chat; None where the template leaves it out.

        Args:
          full_text: the text of all messages.
          chat: the messages, in the form that the template reads.
          index: number of an assistant's message.
          least: first position at which the turn may begin.
        """
        before, after = self._text(chat[:index], prompt=True), self._text(chat[: index + 1])
        if before and after and after.startswith(before) and full_text.startswith(after):
            return len(before), len(after)
        # The text of earlier messages depends on later ones, such as where a template drops earlier reasoning.
        place = self._difference(full_text, chat, index)
        if place is None:
            return None
        begin, end = place
        prompt = (before or "").removeprefix(self._text(chat[:index]) or "")
        header = next((n for n in range(len(prompt), 0, -1) if prompt[:n] in full_text[least:begin]), 0)
        if prompt.rfind("<", 0, header) > prompt.rfind(">", 0, header):  # within a token, such as <think> for </think>
            header = prompt.rfind("<", 0, header)
        if prompt[:header].strip():
            begin = full_text.rindex(prompt[:header], least, begin) + header
        last = None if after is None else self._difference(after, chat[: index + 1], index)
        rest = "" if after is None or last is None else after[last[1] :]  # what follows the message's last word
        if full_text.startswith(rest, end):
            return begin, end + len(rest)
        closing = _SPECIAL.match(full_text, end)
        following = self._difference(full_text, chat, index + 1)
        if closing is None or following is None or closing.end() >= following[0]:  # it opens the next turn
            return begin, end
        return begin, closing.end()

    def _difference(self, text: str, chat: list[Message], index: int) -> Span | None:
        """Where the text of a chat changes with the words of a message; None where it does not."""
        if index == len(chat):
            return None
        replaced_text = self._text([*chat[:index], _replaced(chat[index]), *chat[index + 1 :]])
        if replaced_text is None or replaced_text == text:
            return None
        begin = len(os.path.commonprefix([text, replaced_text]))
        tail = len(os.path.commonprefix([text[begin:][::-1], replaced_text[begin:][::-1]]))
        return begin, len(text) - tail

    def _text(self, chat: list[Message], prompt: bool = False) -> str | None:
        """The text of messages in the form that the template reads; None where it rejects them."""
        values = {"documents": None, **self.values, "add_generation_prompt": prompt, "messages": chat}
        try:
            return template_sandbox.render(self.program, self.template.source, values).text
        except UnsupportedError:
            return None


_GENERATION = re.compile(r"{%-?\s*generation\b")
_SPECIAL = re.compile(r"\s*<[^<>\s]+>\n?")
"""An end of a turn in the notation of most vocabularies, such as `<|im_end|>` or `</s>`."""
_WORDS = "\u241f"
"""In place of a message's words: a symbol that texts do not begin or end with."""


def _replaced(message: Message) -> Message:
    """A message with other words, and other names of the functions that it calls."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        message = {**message, "content": _WORDS}
    elif isinstance(content, list):
        message = {**message, "content": [{**part, "text": _WORDS} for part in content]}
    calls, earlier = [], message.get("tool_calls")
    for call in earlier if isinstance(earlier, Iterable) else ():
        named = call.get("function", call) | {"name": _WORDS}
        calls.append({**call, "function": named} if "function" in call else named)
    return {**message, "tool_calls": calls} if calls else message


def read_template(path: str | Path) -> str:
    """The text of `data.chat_template`.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: data.chat_template is {str(path)!r}, which cannot be read: {error}") from error


def tokenizer_path(config: TrainConfig) -> Path | None:
    """The file or directory of the tokenizer that a run takes: that of `model.start_from` unless `tokenizer.path` names
    another; None where the run trains one.
    """
    path = config.tokenizer.path or config.model.start_from
    return None if path is None else Path(path)


def end_of_text(config: TrainConfig) -> str:
    """The token after each document: the tokenizer's own end, unless `tokenizer.end_of_text` names another."""
    if config.tokenizer.end_of_text is not None:
        return config.tokenizer.end_of_text
    settings = tokenizer_file(config, "tokenizer_config.json")
    return END_OF_TEXT if settings is None else special_tokens(read_json(settings)).get("eos_token", END_OF_TEXT)


def tokenizer_settings(config: TrainConfig) -> dict[str, object]:
    """The values of the exported tokenizer_config.json: those of the tokenizer that the run takes, if it has some.

    Raises:
      ShapeError: the tokenizer's own file is damaged.
    """
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_text(config),
        "clean_up_tokenization_spaces": False,
    }
    settings = tokenizer_file(config, "tokenizer_config.json")
    if settings is not None:
        values |= read_json(settings)
    if config.data.chat_template is not None:
        values.pop("chat_template", None)
    return values


def tokenizer_file(config: TrainConfig, name: str) -> Path | None:
    """A file of the tokenizer that the run takes, in its directory or in that of `model.start_from`; None where neither
    has it, and for a tokenizer that the run trains.
    """
    path = tokenizer_path(config)
    if path is None:
        return None
    folders = [path if path.is_dir() else path.parent, *map(Path, filter(None, [config.model.start_from]))]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
