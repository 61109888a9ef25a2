"""The handlers: a checked request goes to the engine, its deltas come back as one object or as a stream of events."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.inference.answers import Delta
from vishwamai.inference.engine import Engine
from vishwamai.inference.guided import Grammar, Vocabulary
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.server import schema, tools
from vishwamai.inference.server.errors import HttpError, read_json
from vishwamai.inference.server.metrics import Metrics
from vishwamai.inference.server.replies import CallText, Reply


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and names of a server.

    Args:
      name: what clients call the model.
      keys: API keys; none: no key is asked for.
      max_queue: answers that may wait; beyond it a request is declined (429).
      max_body: bytes of a request's body.
      max_new_tokens: of an answer; None: as many as a sequence has room for.
      defaults: options of sampling where a request has none.
      encoder: what clients call the encoder of /v1/embeddings; None: as the model.
    """

    name: str
    keys: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 4 * 2**20
    max_new_tokens: int | None = None
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    encoder: str | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request."""

    prompts: tuple[tuple[int, ...], ...]
    options: Sampling
    reply: Reply
    priority: float
    deadline: float | None
    grammar: Grammar | None
    keep_special: frozenset[int]
    stream: bool
    usage: bool

    @property
    def choices(self) -> int:
        """Answers in all."""
        return self.options.n * len(self.prompts)


class Service:
    """The engine behind HTTP.

    Args:
      engine: whose loop runs.
      settings: limits and names.
      metrics: what is counted.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics):
        self.engine, self.settings, self.metrics = engine, settings, metrics

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        self._check_room()
        body = schema.parse(schema.Completion, await read_json(request, self.settings.max_body))
        self._check_model(body.model)
        with _declined(None):
            options = body.sampling(self.settings.defaults, self.settings.max_new_tokens)
        job = await run_in_threadpool(self._completion_job, body, options)
        return await self._answer(request, job)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self._check_room()
        body = schema.parse(schema.Chat, await read_json(request, self.settings.max_body))
        self._check_model(body.model)
        with _declined(None):
            options = body.sampling(self.settings.defaults, self.settings.max_new_tokens)
        job = await run_in_threadpool(self._chat_job, body, options)
        return await self._answer(request, job)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            raise HttpError(
                404, f"the model {name[:200]!r} is not served; this server has {self.settings.name!r}.", "model"
            )

    def _check_room(self, answers: int = 1) -> None:
        """Declines what would make the queue too long."""
        if self.engine.failure is not None:
            raise HttpError(503, f"the engine has stopped: {self.engine.failure}.", retry_after=30)
        most = self.settings.max_queue
        if answers > most + self.engine.limits.max_sequences:
            raise HttpError(400, f"the request asks for {answers} answers, more than run and wait at once.", "n")
        if self.engine.unfinished + answers > most + self.engine.limits.max_sequences:
            raise HttpError(429, f"{most} answers wait already; try again later.", retry_after=1)

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.engine.tokenizer, self.engine.programs.vocab, sorted(self.engine.end_tokens))

    def _completion_job(self, body: Any, options: Sampling) -> Job:
        prompt = body.prompt
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        grammar = self._grammar(body, None)
        with _declined("prompt"):
            prompts = tuple(self.engine.encode(one) for one in (prompt if many else [prompt]))
        return self._job(body, options, "completion", prompts, grammar)

    def _chat_job(self, body: Any, options: Sampling) -> Job:
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.template is None:
            lacks = "tokenizer" if tokenizer is None else "chat template"
            raise HttpError(400, f"the model has no {lacks}; use /v1/completions.", "messages")
        offered = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice or "auto"
        form = tools.form_of(tokenizer.template.text) if offered and choice != "none" else None
        special = tokenizer.special_ids
        wanted = [tool["function"] for tool in offered]
        if not isinstance(choice, str):
            wanted = [function for function in wanted if function["name"] == choice.function.name]
        if (not isinstance(choice, str) or choice == "required") and not wanted:
            raise HttpError(400, "`tool_choice` asks for a call of a tool that `tools` lacks.", "tool_choice")
        forced = None
        if choice not in ("auto", "none"):
            if form is None:
                raise HttpError(
                    400,
                    "`tool_choice` asks for a call, but the model's chat template writes calls in a form that the "
                    f"server does not read; it reads {tools.FORMS}. Leave `tool_choice` out to get the model's text.",
                    "tool_choice",
                )
            forced = tools.grammar(form, wanted, special)
        grammar = self._grammar(body, forced)
        values = {} if not offered or choice == "none" else {"tools": offered}
        with _declined("messages"):
            messages = [message.model_dump(exclude_unset=True) for message in body.messages]
            prompts = (tuple(tokenizer.chat(messages, **{**(body.chat_template_kwargs or {}), **values})),)
        keep = frozenset() if form is None else frozenset(tools.special_marks(form, special).values())
        return self._job(body, options, "chat", prompts, grammar, form, keep)

    def _grammar(self, body: Any, forced: tuple[str, Any] | None) -> Grammar | None:
        kinds: list[tuple[str, Any]] = [] if forced is None else [forced]
        kinds += [(kind, value) for kind, value in (("regex", body.regex), ("lark", body.grammar)) if value is not None]
        form = getattr(body, "response_format", None)
        if form is not None and form.type == "json_object":
            kinds.append(("json_schema", {"type": "object"}))
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise HttpError(400, "`response_format` lacks `json_schema`.", "response_format")
            kinds.append(("json_schema", form.json_schema.schema_))
        if len(kinds) > 1:
            raise HttpError(
                400, "an answer follows one of `response_format`, `regex`, `grammar` and a forced tool call."
            )
        if not kinds:
            return None
        with _declined("response_format" if form is not None else None):
            return self._vocabulary.grammar(*kinds[0])

    def _job(
        self,
        body: Any,
        options: Sampling,
        kind: Any,
        prompts: Any,
        grammar: Grammar | None,
        form: tools.Form | None = None,
        keep: frozenset[int] = frozenset(),
    ) -> Job:
        with _declined(None):
            for prompt in prompts:
                self.engine.check(prompt, options)
        tokenizer = self.engine.tokenizer
        told = tokenizer is None if body.return_token_ids is None else body.return_token_ids
        reply = Reply(kind, self.settings.name, tokenizer, sum(map(len, prompts)), told, form)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return Job(prompts, options, reply, body.priority or 0.0, body.timeout, grammar, keep, bool(body.stream), usage)

    async def _answer(self, request: Request, job: Job) -> Response:
        self._check_room(job.choices)
        deltas = self._deltas(job)
        if job.stream:
            return StreamingResponse(self._events(job, deltas), media_type="text/event-stream")
        found = await _unless_left(request, _all(deltas))
        if found is None:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(job.reply.whole(found, job.choices))

    async def _deltas(self, job: Job) -> AsyncGenerator[Delta, None]:
        """The engine's deltas, counted; an error of the engine is an `HttpError`."""
        arrived = time.monotonic()
        last: dict[int, float] = {}
        stream = self.engine.stream(
            job.prompts,
            job.options,
            priority=job.priority,
            deadline=job.deadline,
            grammar=job.grammar,
            keep_special=job.keep_special,
        )
        try:
            async for delta in stream:
                if delta.finish == "error":
                    raise HttpError(500, f"the engine could not go on: {delta.error}")
                now = time.monotonic()
                if delta.choice in last:
                    self.metrics.between_tokens.observe(now - last[delta.choice])
                elif delta.token_ids:
                    self.metrics.first_token.observe(now - arrived)
                last[delta.choice] = now
                yield delta
        except DeviceError as error:
            raise HttpError(503, str(error), retry_after=30) from error
        finally:
            await stream.aclose()

    async def _events(self, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncIterator[str]:
        counted: list[Delta] = []
        begun: set[int] = set()
        held = {} if job.reply.calls is None else {i: CallText(job.reply.calls) for i in range(job.choices)}
        try:
            async for delta in deltas:
                if job.reply.kind == "chat" and delta.choice not in begun:
                    begun.add(delta.choice)
                    yield _event(job.reply.first_chunk(delta.choice))
                text, calls = delta.text, []
                if delta.choice in held:
                    text, calls = held[delta.choice].add(delta.text, delta.finish is not None)
                counted.append(dataclasses.replace(delta, text="", logprobs=()))
                if text or calls or delta.finish is not None or delta.logprobs or job.reply.token_ids:
                    yield _event(job.reply.chunk(delta, text, calls))
            if job.usage:
                yield _event({**job.reply.head(True), "choices": [], "usage": job.reply.usage(counted)})
        except HttpError as error:  # the status is sent already
            yield _event(error.body)
        finally:
            await deltas.aclose()
        yield "data: [DONE]\n\n"


class _declined:
    """Errors of ours about what the client sent become answers of status 400."""

    def __init__(self, param: str | None):
        self._param = param

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ShapeError | UnsupportedError):
            raise HttpError(400, str(error), self._param) from error


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def _unless_left(request: Request, answer: Any) -> Any:
    """What `answer` gives, or None if the client leaves before; then it is cancelled."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
