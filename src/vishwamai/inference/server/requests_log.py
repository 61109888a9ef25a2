"""A line of the log for each request, and the id that client and server know it by."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("vishwamai.server.requests")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


QUIET = ("/health", "/ready", "/metrics")
"""Paths of probes, whose requests are not worth a line or a trace."""


@dataclasses.dataclass
class Record:
    """What the line of a request says.

    Attributes:
      id: the client's `X-Request-Id`, or a random one.
      method, path: the request's method and path.
      status: the answer's status code; 499 where the client left before it.
      prompt_tokens, new_tokens: computed for it.
      error: the text of an answer that is an error.
      key: the name of the client's key, where the file of keys gives it one.
    """

    id: str
    method: str = ""
    path: str = ""
    status: int = 499
    prompt_tokens: int = 0
    new_tokens: int = 0
    milliseconds: float = 0.0
    error: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        tokens = f" {self.prompt_tokens} + {self.new_tokens} tokens" if self.prompt_tokens else ""
        error = f" {self.error}" if self.error else ""
        client = f" {self.key}" if self.key else ""
        return f"{self.id} {self.method} {self.path} {self.status}{tokens} {self.milliseconds:.0f} ms{client}{error}"


def record_of(scope: Scope) -> Record:
    """The record of a request; one that nobody writes where the log is not in place."""
    return scope.setdefault("vishwamai.record", Record(""))


class RequestLog:
    """Writes the line of each request when its answer has ended, and answers with its id."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = sent if _ID.fullmatch(sent) else uuid.uuid4().hex
        record = scope["vishwamai.record"] = Record(name, scope["method"], scope["path"])
        started = time.monotonic()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            record.status = 500
            raise
        finally:
            record.milliseconds = 1e3 * (time.monotonic() - started)
            quiet = record.path in QUIET and record.status < 400
            level = logging.DEBUG if quiet else logging.ERROR if record.status >= 500 else logging.INFO
            LOG.log(level, "%s", record, extra={"record": dataclasses.asdict(record)})
