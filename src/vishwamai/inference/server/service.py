"""The handlers: a checked request goes to the engine, its deltas come back as one object or as a stream of events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.inference.answers import Delta
from vishwamai.inference.engine import Engine
from vishwamai.inference.server import schema
from vishwamai.inference.server.beam_answers import beam_deltas
from vishwamai.inference.server.compilation import Compilation
from vishwamai.inference.server.errors import HttpError, declined, read_json
from vishwamai.inference.server.job import Job
from vishwamai.inference.server.jobs import Jobs, once
from vishwamai.inference.server.metrics import Metrics
from vishwamai.inference.server.requests_log import Record, record_of
from vishwamai.inference.server.settings import Settings

__all__ = ["Service", "Settings"]

Sent = TypeVar("Sent", bound=BaseModel)
Answer = TypeVar("Answer")


class Service:
    """The engine behind HTTP.

    Args:
      engine: whose loop runs.
      settings: limits and names.
      metrics: counters of the service.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics):
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.jobs = Jobs(engine, settings)
        self.grammars = Compilation(engine.tokenizer, engine.programs.vocab, sorted(engine.end_tokens))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return () if self.engine.adapters is None else self.engine.adapters.names

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._serve(request, schema.Completion, self.jobs.completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._serve(request, schema.Chat, self.jobs.chat)

    async def _serve(self, request: Request, kind: type[Sent], make: Callable[[Sent], Job]) -> Response:
        self.check_room()
        body = self.checked(kind, await read_json(request, self.settings.max_body))
        job = await self.prepared(request, lambda: make(body))
        return Response(status_code=499) if job is None else await self._answer(request, job)

    async def prepared(self, request: Request, make: Callable[[], Job]) -> Job | None:
        """The job that `make` gives in a thread, its grammar compiled, once there is room for its answers; None where
        the client left before.
        """
        job = await self._compiled(request, await run_in_threadpool(make))
        if job is not None:
            self.check_room(job.reply.choices)
            record_of(request.scope).prompt_tokens = sum(map(len, job.prompts))
        return job

    async def _compiled(self, request: Request, job: Job) -> Job | None:
        """The job with its grammar compiled; None where the client left before."""
        if job.grammar is None:
            return job.with_grammar(None)
        with declined(job.grammar.param):
            grammar = await unless_left(request, self.grammars.grammar(job.grammar.kind, job.grammar.source))
        return None if grammar is None else job.with_grammar(grammar)

    def checked(self, kind: type[Sent], value: object) -> Sent:
        """The request of a JSON value, whose model is this server's."""
        body = schema.parse(kind, value)
        check_keys(body, self.settings)
        self._check_model(getattr(body, "model", None))
        return body

    def _check_model(self, name: str | None) -> None:
        names = (*self.settings.names, *self.adapters)
        if name is not None and name not in names:
            raise HttpError(
                404, f"the model {name[:200]!r} is not served; this server has {', '.join(map(repr, names))}.", "model"
            )

    def check_room(self, answers: int = 1) -> None:
        """Declines what would make the queue too long."""
        if self.engine.failure is not None:
            raise HttpError(503, f"the engine has stopped: {self.engine.failure}.", retry_after=30)
        most = self.settings.max_queue
        if answers > most + self.engine.limits.max_sequences:
            raise HttpError(400, f"the request asks for {answers} answers, more than run and wait at once.", "n")
        if self.engine.unfinished + answers > most + self.engine.limits.max_sequences:
            raise HttpError(429, f"{most} answers wait already; try again later.", retry_after=1)

    async def _answer(self, request: Request, job: Job) -> Response:
        if job.scored is not None:
            job = await run_in_threadpool(self._scored, job)
        deltas = self.deltas(job, record_of(request.scope))
        if job.stream:
            return StreamingResponse(self._events(job, deltas), media_type="text/event-stream")
        parts = await unless_left(request, _all(deltas))
        if parts is None:
            return Response(status_code=499)  # nobody reads it
        # Log probabilities of long answers take their time, which the event loop has not.
        text = await run_in_threadpool(lambda: _json(job.reply.body(parts)))
        return Response(text, media_type="application/json")

    def _scored(self, job: Job) -> Job:
        """The job with the log probabilities of its prompts."""
        assert job.scored is not None
        with declined("prompt_logprobs" if job.reply.prompt_logprobs else "echo"):
            scores = self.jobs.scorer(job.prompts, job.scored)
        prompts = (dataclasses.replace(prompt, scores=score) for prompt, score in zip(job.reply.prompts, scores))
        return dataclasses.replace(job, reply=dataclasses.replace(job.reply, prompts=tuple(prompts)))

    async def deltas(self, job: Job, record: Record) -> AsyncGenerator[Delta, None]:
        """The engine's deltas, counted; an error of the engine is an `HttpError`."""
        if job.options is None:
            for choice in range(job.reply.choices):
                yield Delta(choice, finish="length")
            return
        arrived = time.monotonic()
        first: dict[int, float] = {}  # times by choice
        last: dict[int, float] = {}
        lengths: dict[int, int] = {}
        if job.length_penalty is None:
            stream = self.engine.stream(
                job.prompts,
                job.options,
                priority=job.priority,
                deadline=job.deadline,
                grammar=job.compiled,
                keep_special=job.keep_special,
                adapter=job.adapter,
                shared=job.shared,
            )
        else:
            stream = beam_deltas(self.engine, job)
        try:
            async for delta in stream:
                if delta.finish == "error":
                    if delta.declined:
                        raise HttpError(400, f"the answer could not go on: {delta.error}")
                    raise HttpError(500, f"the engine could not go on: {delta.error}")
                now = time.monotonic()
                if delta.choice in last:
                    self.metrics.between_tokens.observe(now - last[delta.choice])
                elif delta.token_ids:
                    self.metrics.first_token.observe(now - arrived)
                if delta.token_ids:
                    first.setdefault(delta.choice, now)
                last[delta.choice] = now
                lengths[delta.choice] = lengths.get(delta.choice, 0) + len(delta.token_ids)
                if delta.finish is not None:
                    self.metrics.answer.observe(now - arrived)
                    self.metrics.decode.observe(now - first.get(delta.choice, now))
                    self.metrics.answer_prompt.observe(len(job.prompts[delta.choice // job.options.n]))
                    self.metrics.answer_new.observe(lengths[delta.choice])
                record.new_tokens += len(delta.token_ids)
                yield delta
        except ShapeError as error:  # its adapter was unloaded meanwhile
            raise HttpError(404, str(error), "model") from error
        except DeviceError as error:
            raise HttpError(503, str(error), retry_after=30) from error
        finally:
            await stream.aclose()

    async def _events(self, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncIterator[str]:
        reply, usage = job.reply, job.reply.usage()
        places = {i: reply.places(i) for i in range(reply.choices)}
        started: set[int] = set()
        turns = [reply.turn() for _ in range(reply.choices)]
        try:
            async for delta in deltas:
                usage.add(delta)
                if delta.choice not in started:
                    started.add(delta.choice)
                    first = reply.first_chunk(delta.choice, places[delta.choice], usage)
                    if first is not None:
                        yield _event(first)
                turn = turns[delta.choice]
                events = turn.add(delta)
                if turn.reasoning_tokens:
                    usage.reasoning[delta.choice] = turn.reasoning_tokens
                if events or delta.finish is not None or delta.logprobs or reply.token_ids:
                    yield _event(reply.chunk(delta, events, turn, places[delta.choice], usage))
            if job.usage:
                yield _event(reply.last_chunk(usage))
        except HttpError as error:  # the status is sent already
            yield _event(error.body)
        finally:
            await deltas.aclose()
        yield "data: [DONE]\n\n"


def check_keys(body: object, settings: Settings) -> None:
    """Names the keys of a request that have no effect: in the log, once each, or those that no interface documents in
    an error.
    """
    for path, name in schema.unknown_keys(body):
        if name in schema.NO_EFFECT:
            once(f"the key `{name}` of requests has no effect")
        elif settings.decline_unknown_keys:
            raise HttpError(400, f"`{path[:200]}` is not a key of this request; leave it out.", path[:200])
        else:
            once(f"the key {name[:200]!r} of requests is not documented and has no effect")


def _typed_error(error: HttpError) -> dict[str, object]:
    details = {"message": error.message, "code": str(error.status), "param": error.param}
    return {"type": "error", "sequence_number": 0, **details}


async def event_lines(
    events: AsyncIterator[dict[str, object]], failed: Callable[[HttpError], dict[str, object]] = _typed_error
) -> AsyncIterator[str]:
    """The lines of a stream of typed events, an error as the last of them, in the form of `failed`."""
    try:
        async for event in events:
            yield f"event: {event['type']}\n{_event(event)}"
    except HttpError as error:  # the status is sent already
        yield f"event: error\n{_event(failed(error))}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _event(value: object) -> str:
    return f"data: {_json(value)}\n\n"


async def _all(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def unless_left(request: Request, answer: Awaitable[Answer]) -> Answer | None:
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
