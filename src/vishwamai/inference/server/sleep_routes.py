"""Sleep and wake by HTTP, as vLLM's development endpoints have them: for operators, where the server is started so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vishwamai.core.errors import DeviceError
from vishwamai.inference.engine import Engine
from vishwamai.inference.memory_release import LEVELS
from vishwamai.inference.server.errors import HttpError, declined, error_response
from vishwamai.inference.server.openapi import Endpoint, fields

ROUTES = ("/sleep", "/wake_up", "/is_sleeping")
RETRY_SECONDS = 30


class Sleep:
    """The state of one server: every POST of clients is counted, for each may use the model's weights.

    Args:
      engine: engine of the server.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._turns = asyncio.Lock()  # of `sleep` and `wake`
        self._closed = False  # new requests are declined
        self._requests = 0
        self._empty = asyncio.Event()

    @property
    def endpoints(self) -> list[Endpoint]:
        """The three routes."""
        level = {"name": "level", "in": "query", "schema": {"type": "integer", "enum": [*LEVELS], "default": 1}}
        text = "frees the memory of the model; 1 holds the weights in host memory"
        return [
            Endpoint("/sleep", self.sleep, text, answer=fields(), post=True, parameters=(level,)),
            Endpoint("/wake_up", self.wake, "brings the model back", answer=fields(), post=True),
            Endpoint("/is_sleeping", self.state, "whether it sleeps", answer=fields(is_sleeping="boolean")),
        ]

    async def sleep(self, request: Request) -> Response:
        """POST /sleep: declines new requests, waits for those that run, and frees the memory."""
        text = request.query_params.get("level", "1")
        if text not in map(str, LEVELS):
            raise HttpError(400, f"`level` is {text[:200]!r}; pass 1 or 2.", "level")
        async with self._turns:
            self._closed = True
            try:
                while self._requests:
                    self._empty.clear()
                    await self._empty.wait()
                await self._run(self._engine.sleep, int(text))
            finally:
                self._closed = bool(self._engine.sleeping)
        return JSONResponse({})

    async def wake(self, request: Request) -> Response:
        """POST /wake_up: brings the memory back; a server that is awake stays so."""
        async with self._turns:
            try:
                await self._run(self._engine.wake)
            finally:
                self._closed = bool(self._engine.sleeping)
        return JSONResponse({})

    async def state(self, request: Request) -> Response:
        """GET /is_sleeping."""
        return JSONResponse({"is_sleeping": bool(self._engine.sleeping)})

    async def _run(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            with declined("level"):
                await run_in_threadpool(work, *arguments)
        except DeviceError as error:
            raise HttpError(503, str(error), retry_after=RETRY_SECONDS) from error

    def guard(self, app: ASGIApp) -> ASGIApp:
        """The middleware: an application that serves requests by `app`, unless the server sleeps or is about to."""
        return partial(self._serve, app)

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in ROUTES:
            await app(scope, receive, send)
            return
        if self._closed:
            text = "the server sleeps; try again later. Its operator wakes it by POST /wake_up."
            error = HttpError(503, text, retry_after=RETRY_SECONDS)
            await error_response(Request(scope), error)(scope, receive, send)
            return
        self._requests += 1
        try:
            await app(scope, receive, send)
        finally:
            self._requests -= 1
            if not self._requests:
                self._empty.set()
