"""/v1/responses, OpenAI's newer interface, by way of chats. Nothing is stored: the client sends the conversation."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
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


class TextFormat(schema.Open):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[schema.JsonObject | None, Field(alias="schema")] = None


class TextOptions(schema.Open):
    format: TextFormat | None = None


class Reasoning(schema.Open):
    effort: str | None = None


class FunctionTool(schema.Function):
    type: Literal["function"]


class NamedTool(schema.Named):
    type: Literal["function"]


class SomeTools(schema.Allowed):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]


class Body(schema.Open):
    """A body of /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[schema.JsonObject], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: str | None = None
    include: list[str] | None = None


def as_chat(body: Body) -> schema.Chat:
    """The same request in the form of chats."""
    messages: list[dict[str, object]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items: list[schema.JsonObject] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    for i, item in enumerate(items):
        _add_item(messages, item, f"input[{i}]")
    chat: dict[str, object] = {"messages": messages, "parallel_tool_calls": body.parallel_tool_calls}
    chat |= {name: getattr(body, name) for name in ("model", "temperature", "top_p", "stream")}
    chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        offers = [tool.model_dump(include={"name", "description", "parameters", "strict"}) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": offer} for offer in offers]
    choice = body.tool_choice
    if isinstance(choice, SomeTools):
        some = {"mode": choice.mode, "tools": [{"name": name} for name in sorted(choice.names)]}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": some}
    else:
        named = isinstance(choice, NamedTool)
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice
    form = None if body.text is None else body.text.format
    if form is not None and form.type != "text":
        chat["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
    return schema.parse(schema.Chat, chat)


def _add_item(messages: list[dict[str, object]], item: schema.JsonObject, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            calls = messages[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "message":
        if item.get("role") == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] = item.get("content")
        else:
            messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind != "reasoning":  # of an earlier answer, which templates leave out
        raise HttpError(
            400, f"`{where}` is of type {str(kind)[:100]!r}; this server reads messages and calls.", "input"
        )


@dataclasses.dataclass
class Writer:
    """One response on its way: its output items so far, and the events of its stream.

    Attributes:
      body: the request.
      model: the name that clients know.
      usage: tokens so far.
    """

    body: Body
    model: str
    usage: Usage
    id: str = dataclasses.field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: float = dataclasses.field(default_factory=lambda: float(int(time.time())))
    output: list[dict[str, object]] = dataclasses.field(default_factory=list)
    number: int = 0

    def response(self, status: str) -> dict[str, object]:
        """The object of the response."""
        body, usage = self.body, self.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": sum(usage.reasoning.values())},
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
        }
        dump = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [] if status == "in_progress" else list(self.output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": dump.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": dump.get("tool_choice", "auto"),
            "tools": [{"strict": False, "parameters": {}, **tool} for tool in dump.get("tools", [])],
            "metadata": {},
            "store": False,
            "usage": None if status == "in_progress" else counts,
        }

    def event(self, kind: str, **members: object) -> dict[str, object]:
        """The next event."""
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **members}

    def add(self, event: Event, turn: Turn) -> Iterator[dict[str, object]]:
        """Events of one more piece of an answer, which is a part of `turn`."""
        kind = "message" if event.kind == "content" else event.kind
        if event.kind == "call" or (kind != "arguments" and kind != self._kind):
            yield from self._close("completed")
            yield from self._open(kind, turn)
        if event.kind == "call":
            return
        item, text = self.output[-1], event.text
        if event.kind == "arguments":
            item["arguments"] = f"{item['arguments']}{text}"
            yield self.event("function_call_arguments.delta", **self._place, delta=text)
            return
        piece = _first_part(item)
        piece["text"] = f"{piece['text']}{text}"
        part = {**self._place, "content_index": 0, "delta": text}
        if event.kind == "reasoning":
            yield self.event("reasoning_text.delta", **part)
        else:
            yield self.event("output_text.delta", **part, logprobs=[])

    @property
    def _kind(self) -> str | None:
        """Of the item that is being written."""
        running = bool(self.output) and self.output[-1]["status"] == "in_progress"
        return str(self.output[-1]["type"]) if running else None

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _open(self, kind: str, turn: Turn) -> Iterator[dict[str, object]]:
        name = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        item: dict[str, object] = {"id": f"{name}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "call":
            call = turn.calls[-1]
            item |= {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        else:
            item |= {"role": "assistant"} if kind == "message" else {"summary": []}
            item["content"] = []
        self.output.append(item)
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=dict(item))
        if kind != "call":
            item["content"] = [_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}]
            part = dict(_first_part(item))
            yield self.event("content_part.added", **self._place, content_index=0, part=part)

    def _close(self, status: str) -> Iterator[dict[str, object]]:
        kind = self._kind
        if kind is None:
            return
        item = self.output[-1]
        item["status"] = status
        if kind == "function_call":
            values = {"name": item["name"], "arguments": item["arguments"]}
            yield self.event("function_call_arguments.done", **self._place, **values)
        else:
            text, name = _first_part(item)["text"], "output_text" if kind == "message" else "reasoning_text"
            part = {**self._place, "content_index": 0}
            yield self.event(f"{name}.done", **part, text=text, **({"logprobs": []} if kind == "message" else {}))
            yield self.event("content_part.done", **part, part=dict(_first_part(item)))
        yield self.event("output_item.done", output_index=len(self.output) - 1, item=item)

    def end(self, turn: Turn, complete: bool) -> Iterator[dict[str, object]]:
        """Events of the end: of the last item, and of the response."""
        if not self.output:
            yield from self._open("message", turn)
        status = "completed" if complete else "incomplete"
        yield from self._close(status)
        yield self.event(status, response=self.response(status))


def _first_part(item: Mapping[str, object]) -> dict[str, object]:
    """The content of an item, which has one part."""
    content = item["content"]
    assert isinstance(content, list)
    return content[0]


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Responses:
    """Responses by the chats of a service."""

    def __init__(self, service: Service):
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        service = self._service
        body = service.checked(Body, await read_json(request, service.settings.max_body))
        job = await service.prepared(request, lambda: service.jobs.chat(as_chat(body)))
        if job is None:
            return Response(status_code=499)  # nobody reads it
        writer = Writer(body, job.reply.model, job.reply.usage())
        events = self._events(job, writer, service.deltas(job, record_of(request.scope)))
        if body.stream:
            return StreamingResponse(event_lines(events), media_type="text/event-stream")
        last = await unless_left(request, _last(events))
        return Response(status_code=499) if last is None else JSONResponse(last["response"])

    async def _events(
        self, job: Job, writer: Writer, deltas: AsyncGenerator[Delta, None]
    ) -> AsyncIterator[dict[str, object]]:
        for kind in ("created", "in_progress"):
            yield writer.event(kind, response=writer.response("in_progress"))
        turn = job.reply.turn()
        delta = Delta(0)
        try:
            async for delta in deltas:
                writer.usage.add(delta)
                for piece in turn.add(delta):
                    for event in writer.add(piece, turn):
                        yield event
        finally:
            await deltas.aclose()
        writer.usage.reasoning[0] = turn.reasoning_tokens
        for event in writer.end(turn, delta.finish == "stop"):
            yield event


async def _last(events: AsyncIterator[dict[str, object]]) -> dict[str, object]:
    return [event async for event in events][-1]
