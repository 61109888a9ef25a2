"""/v1/messages, Anthropic's interface, by way of chats; and the number of tokens of such a request."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Annotated, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vishwamai.inference.answers import Delta
from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError, read_json
from vishwamai.inference.server.job import Job
from vishwamai.inference.server.reading import Event
from vishwamai.inference.server.replies import Usage
from vishwamai.inference.server.requests_log import record_of
from vishwamai.inference.server.service import Service, event_lines, unless_left
from vishwamai.inference.server.turns import Turn

Blocks = Annotated[list[schema.JsonObject], Field(fail_fast=True, max_length=4096)]


class Message(schema.Open):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(schema.Open):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: schema.JsonObject


class Choice(schema.Open):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(schema.Open):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: schema.Tokens | None = None


class Format(schema.Open):
    type: Literal["json_schema"]
    schema_: Annotated[schema.JsonObject, Field(alias="schema")]


class OutputConfig(schema.Open):
    effort: Annotated[str, Field(max_length=64)] | None = None
    format: Format | None = None


class Count(schema.Open):
    """A body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=16_384)]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class Body(Count):
    """A body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[schema.Short], Field(fail_fast=True, max_length=16)] | None = None
    stream: bool | None = None


def as_chat(body: Count) -> schema.Chat:
    """The same request in the form of chats."""
    messages: list[dict[str, object]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    chat: dict[str, object] = {"messages": messages, "model": body.model}
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, Body):
        names = {"max_tokens": "max_tokens", "stop": "stop_sequences", "stream": "stream"}
        names |= {name: name for name in ("temperature", "top_p", "top_k")}
        chat |= {name: getattr(body, of) for name, of in names.items()}
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.type != "disabled"
        chat["thinking_budget"] = body.thinking.budget_tokens
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            form = {"name": "answer", "schema": body.output_config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": form}
    return schema.parse(schema.Chat, chat)


def _messages(message: Message, where: str) -> Iterator[dict[str, object]]:
    """A message of Anthropic's as one of OpenAI's, or as several: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[str] = []
    calls: list[dict[str, object]] = []
    reasoning: list[str] = []
    for i, block in enumerate(message.content):
        kind, place = block.get("type"), f"{where}.content[{i}]"
        if kind == "text":
            parts.append(_text([block], where, i))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = _text(block.get("content") or "", place)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":  # of another model
            raise _unread(place, kind)
    if parts or calls or reasoning:
        extra: dict[str, object] = {"tool_calls": calls} if calls else {}
        extra |= {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
        yield {"role": message.role, "content": "\n".join(parts), **extra}


def _text(content: object, where: str, first: int = 0) -> str:
    """The text of a text, or of blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content if isinstance(content, list) else [content], first):
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            name = where if where == "system" or ".content" in where else f"{where}.content"
            raise _unread(f"{name}[{i}]", block.get("type") if isinstance(block, dict) else block)
        texts.append(text)
    return "\n".join(texts)


def _unread(where: str, kind: object) -> HttpError:
    return HttpError(
        400,
        f"`{where}`: the block is of type {str(kind)[:100]!r}; this model reads text, and calls of tools.",
        "messages",
    )


@dataclasses.dataclass
class Writer:
    """One answer on its way: its blocks so far, and the events of its stream.

    Attributes:
      model: the name that clients know.
      usage: tokens so far.
    """

    model: str
    usage: Usage
    id: str = dataclasses.field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    content: list[dict[str, object]] = dataclasses.field(default_factory=list)

    def message(self, stop: str | None = None, sequence: str | None = None) -> dict[str, object]:
        """The object of the answer."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_closed(block) for block in self.content],
            "stop_reason": stop,
            "stop_sequence": sequence,
            "usage": self._counts(),
        }

    def _counts(self) -> dict[str, object]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.new_tokens,
        }

    def add(self, event: Event) -> Iterator[dict[str, object]]:
        """Events of one more piece of an answer."""
        kind = {"reasoning": "thinking", "content": "text"}.get(event.kind, "tool_use")
        if event.kind == "call" or (
            event.kind != "arguments" and (not self.content or self.content[-1]["type"] != kind)
        ):
            yield from self._close()
            begin: dict[str, object] = {"type": kind}
            begin |= {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}.get(kind, {})
            if kind == "tool_use":
                begin |= {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": event.text, "input": {}}
            self.content.append({**begin, "arguments": ""} if kind == "tool_use" else begin)
            yield self._event("content_block_start", content_block=dict(begin))
        block = self.content[-1]
        if event.kind == "call":
            return
        if event.kind == "arguments":
            block["arguments"] = f"{block['arguments']}{event.text}"
            delta = {"type": "input_json_delta", "partial_json": event.text}
        else:
            block[kind] = f"{block[kind]}{event.text}"
            delta = {"type": f"{kind}_delta", kind: event.text}
        yield self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[dict[str, object]]:
        if self.content:
            yield self._event("content_block_stop")

    def _event(self, kind: str, **members: object) -> dict[str, object]:
        return {"type": kind, "index": len(self.content) - 1, **members}

    def end(self, stop: str, sequence: str | None) -> Iterator[dict[str, object]]:
        """Events of the end; the last has the whole message, which the stream leaves out."""
        yield from self._close()
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self._counts()}
        yield {"type": "message_stop"}


def _closed(block: dict[str, object]) -> dict[str, object]:
    """A block as it is in a whole message: the arguments of a call as an object."""
    if block["type"] != "tool_use":
        return block
    try:
        value = json.loads(str(block["arguments"]))
    except ValueError:  # the answer ended before them
        value = None
    block = {name: member for name, member in block.items() if name != "arguments"}
    return {**block, "input": value if isinstance(value, dict) else {}}


class Messages:
    """Anthropic's messages by the chats of a service."""

    def __init__(self, service: Service):
        self._service = service

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        service = self._service
        body = service.checked(Count, await read_json(request, service.settings.max_body))
        chat = await run_in_threadpool(lambda: service.jobs.chat_prompt(as_chat(body)))
        return JSONResponse({"input_tokens": len(chat.ids)})

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        service = self._service
        service.check_room()
        body = service.checked(Body, await read_json(request, service.settings.max_body))
        job = await service.prepared(request, lambda: service.jobs.chat(as_chat(body)))
        if job is None:
            return Response(status_code=499)  # nobody reads it
        writer = Writer(job.reply.model, job.reply.usage())
        events = self._events(job, writer, service.deltas(job, record_of(request.scope)))
        if body.stream:
            return StreamingResponse(event_lines(events, _error), media_type="text/event-stream")
        last = await unless_left(request, _last(events))
        if last is None:
            return Response(status_code=499)
        return JSONResponse(writer.message(**last))

    async def _events(
        self, job: Job, writer: Writer, deltas: AsyncGenerator[Delta, None]
    ) -> AsyncIterator[dict[str, object]]:
        yield {"type": "message_start", "message": writer.message()}
        turn: Turn = job.reply.turn()
        delta = Delta(0)
        try:
            async for delta in deltas:
                writer.usage.add(delta)
                for piece in turn.add(delta):
                    for event in writer.add(piece):
                        yield event
        finally:
            await deltas.aclose()
        sequence = delta.stop if isinstance(delta.stop, str) else None
        stop = "max_tokens" if delta.finish in ("length", "deadline") else "end_turn"
        if delta.finish == "stop" and (turn.calls or sequence is not None):
            stop = "tool_use" if turn.calls else "stop_sequence"
        for event in writer.end(stop, sequence if stop == "stop_sequence" else None):
            yield event


def _error(error: HttpError) -> dict[str, object]:
    return {"type": "error", "error": error.body["error"]}


async def _last(events: AsyncIterator[dict[str, object]]) -> dict[str, str | None]:
    """The reason of the end, once all events came."""
    every = [event async for event in events]
    delta = every[-2]["delta"]  # of `Writer.end`
    assert isinstance(delta, dict)
    return {"stop": delta["stop_reason"], "sequence": delta["stop_sequence"]}
