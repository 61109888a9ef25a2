"""What a request must satisfy before a handler sees it: its Host, Origin and Content-Type, and the time and size of its
body.

A browser sends requests of any page to a server on the same machine. A page cannot choose the Host, the Origin, or a
Content-Type of JSON without the server's consent (CORS), so these tell such requests from those of clients.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vishwamai.inference.server.errors import HttpError
from vishwamai.inference.server.settings import Settings
from vishwamai.inference.server.sleep_routes import ROUTES

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine."""


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_of(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names under which a server answers; none: any.

    Args:
      host: the address to listen on.
      allowed: names that the operator adds; "*" is any.

    >>> hosts_of("127.0.0.1", ["proxy.example"]), hosts_of("0.0.0.0", [])
    (('localhost', '127.0.0.1', '::1', 'proxy.example'), ())
    """
    if "*" in allowed:
        return ()
    names = (*LOOPBACK, host) if is_loopback(host) else () if not allowed else (host,)
    return tuple(dict.fromkeys((*names, *(name.lower() for name in allowed))))


class Guards:
    """Declines requests of strangers and of pages; see the module.

    Args:
      app: application that serves the other requests.
      settings: `allowed_hosts`, `allowed_origins` and the limits of bodies.
    """

    def __init__(self, app: ASGIApp, settings: Settings):
        self._app, self._settings = app, settings
        self._bytes = 0  # of bodies that arrive or are read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
            await send(message)

        error = self._fault(scope)
        if error is not None:
            response = error.response()
            response.headers["Connection"] = "close"
            await response(scope, receive, guarded)
            return
        await self._bounded(scope, receive, guarded)

    def _fault(self, scope: Scope) -> HttpError | None:
        names = [name for name, _ in scope["headers"]]
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if b"content-length" in names and b"transfer-encoding" in names:
            return HttpError(400, "the request has both Content-Length and Transfer-Encoding; send one of them.")
        host = headers.get(b"host", "")
        name = _name(host)
        allowed = self._settings.allowed_hosts
        if allowed and name not in allowed:
            return HttpError(403, f"the host {name[:200]!r} is not served; the operator adds it by --allowed-host.")
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._settings.allowed_origins:
            if origin.partition("://")[2].lower() != host.lower():
                return HttpError(
                    403, f"pages of {origin[:200]!r} may not use this server; the operator allows it by --allow-origin."
                )
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        # A page that sends a POST without a body cannot leave out its Origin, which is checked above.
        bodiless = not kind and scope["path"] in ROUTES
        if scope["method"] == "POST" and kind != "application/json" and not bodiless:
            return HttpError(415, f"the Content-Type is {kind[:200]!r}; send application/json.")
        return None

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request whose body comes within the limits."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.body_seconds
        in_flight, complete = 0, False

        def release() -> None:
            nonlocal in_flight
            self._bytes -= in_flight
            in_flight = 0

        async def body() -> Message:
            nonlocal in_flight, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                seconds = self._settings.body_seconds
                raise HttpError(408, f"the body did not arrive within {seconds:g} s; send it at once.") from None
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            in_flight, self._bytes = in_flight + size, self._bytes + size
            if self._bytes > self._settings.max_bytes:
                raise HttpError(503, "too many bodies arrive at once; try again later.", retry_after=1)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                release()
                if not complete and scope["method"] == "POST":
                    MutableHeaders(scope=message)["Connection"] = "close"  # the rest of the body is not read
            await send(message)

        try:
            await self._app(scope, body, answer)
        finally:
            release()


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
