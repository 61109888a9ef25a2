"""Chat templates: programs in Jinja that come with a model and turn a conversation into its prompt."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence

from vishwamai.core.errors import UnsupportedError
from vishwamai.models import messages as forms
from vishwamai.models import template_sandbox
from vishwamai.models.template_sandbox import Rendering

_RESERVED = ("messages", "self", "raise_exception", "strftime_now", "namespace")
_END = "vq7end"
"""Stands at the end of the message that an answer continues."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
      text: the program.
      source: the file that it comes from, for errors.
      named: further templates of the model, by name. "tool_use" serves chats with tools.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "chat.jinja")
    >>> template.render([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], {})
    '<user>hello'
    """

    text: str
    source: str
    named: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def program(self, tools: bool = False) -> str:
        """The program that renders a chat, with or without tools."""
        return self.named.get("tool_use", self.text) if tools else self.text

    @property
    def reads_tools(self) -> bool:
        """Whether the model sees the tools that a request offers."""
        return forms.reads_tools(self.program(tools=True))

    def render(self, messages: Sequence[Mapping[str, object]], values: Mapping[str, object]) -> str:
        """The prompt; arguments and errors are those of `rendering`."""
        return self.rendering(messages, values).text

    def rendering(self, messages: Sequence[Mapping[str, object]], values: Mapping[str, object]) -> Rendering:
        """The prompt of a chat, and the spans of its `{% generation %}` blocks.

        Args:
          messages: the conversation, as clients of OpenAI's API send it.
          values: further variables of the template, such as `tools` and `add_generation_prompt`. With
            `continue_final_message` the prompt ends in the last message, which the answer continues.

        Raises:
          ShapeError: the template is not a program in Jinja, or a message does not have the form of one.
          UnsupportedError: the template rejects the messages, leaves the text of one out, does what the sandbox
            forbids or exceeds a limit; or a part of a message is not text.
        """
        values = {"tools": None, "documents": None, **values}
        reserved = [name for name in _RESERVED if name in values]
        if reserved:
            raise UnsupportedError(f"{self.source}: `{reserved[0]}` is not a value that a chat may set; leave it out.")
        program = self.program(bool(values["tools"]))
        chat = forms.normalized(messages, program)
        if values.pop("continue_final_message", False):
            return self._continued(program, chat, values)
        result = template_sandbox.render(program, self.source, {**values, "messages": chat})
        self._check_loss(program, chat, values, result.text)
        return result

    def _continued(self, program: str, chat: list[forms.Message], values: Mapping[str, object]) -> Rendering:
        content = chat[-1].get("content") if chat else None
        if isinstance(content, list):
            content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END}]
        elif isinstance(content, str):
            content += _END
        else:
            raise UnsupportedError(f"{self.source}: the last message has no text that an answer could continue.")
        values = {**values, "messages": [*chat[:-1], {**chat[-1], "content": content}], "add_generation_prompt": False}
        result = template_sandbox.render(program, self.source, values)
        end = result.text.rfind(_END)
        if end < 0:
            raise UnsupportedError(f"{self.source}: the chat template leaves the text of the last message out.")
        return Rendering(result.text[:end], tuple((a, min(b, end)) for a, b in result.spans if a < end))

    def _check_loss(self, program: str, chat: list[forms.Message], values: Mapping[str, object], text: str) -> None:
        """Raises an error where the template leaves a text out without a word; of an assistant's it logs a line."""
        marked, marks = forms.marked(chat)
        names = {key: value for key, value in values.items() if key != "documents"}
        missing = _missing(program, json.dumps([marked, names]), tuple(marks))
        if missing is None:  # it rejects the marks: look for the texts themselves
            contents = ((i, message.get("content")) for i, message in enumerate(chat))
            missing = [
                (i, "content") for i, content in contents if isinstance(content, str) and content.strip() not in text
            ]
        for index, part in missing:
            role = chat[index]["role"]
            problem = f"the chat template leaves the {part} of a message of role {role!r} out"
            if role == "assistant":
                _log(f"{self.source}: {problem}")
                continue
            raise UnsupportedError(
                f"{self.source}: {problem}: messages[{index}] would not reach the model. Send its text in a message of "
                "another role, or use another template."
            )


@functools.lru_cache(maxsize=64)
def _missing(program: str, chat: str, marks: tuple[tuple[str, int, str], ...]) -> list[tuple[int, str]] | None:
    """(message, part) of what a template leaves out of a marked chat; None where it rejects the marks."""
    messages, values = json.loads(chat)
    try:
        text = template_sandbox.render(program, "the chat template", {**values, "messages": messages}).text
    except UnsupportedError:
        return None
    return forms.lost(marks, text)


@functools.lru_cache(maxsize=256)
def _log(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)
