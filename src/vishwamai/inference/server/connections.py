"""Connections with limits: how many there are, and how long one may be silent before and between its requests."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""From a connection's start, or the first byte of its next request, to the end of the headers."""

IDLE_SECONDS = 5
"""Between two requests of a connection."""


def most_connections() -> int:
    """How many connections may be open: half of the descriptors that the process may have, at most 1024."""
    try:
        import resource
    except ImportError:
        return 512
    return max(16, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with a limit of time for headers and a limit of connections.

    Where the most connections are open, a new one takes the place of the one that has waited longest for a request. If
    all of them are answered at that time, it is closed.
    """

    most = most_connections()

    def __init__(self, *arguments: Any, **options: object):
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to count the time."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            silent: Any = [
                connection
                for connection in self.connections
                if connection is not self and not getattr(connection, "busy", True)
            ]
            min(silent, key=lambda connection: connection._since, default=self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Ends the time where the headers are complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begins to count anew."""
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the time."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.busy or self.transport.is_closing():
            self._cancel()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self.busy:
            self.transport.abort()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
