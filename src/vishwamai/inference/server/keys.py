"""Who may use the server: API keys and their budgets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vishwamai.inference.server.budgets import Budget, Key
from vishwamai.inference.server.errors import HttpError
from vishwamai.inference.server.requests_log import record_of
from vishwamai.inference.server.sleep_routes import ROUTES

KEYED = ("/v1/", "/metrics", "/tokenize", "/detokenize", "/score", "/rerank", "/v2/", *ROUTES)
"""Beginnings of the paths that ask for a key."""


class Keys:
    """Asks for an API key, and declines a request beyond its budget; every key is compared, each in constant time.

    Args:
      app: application that serves the other requests.
      keys: keys of clients, or their secrets alone.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[Key | str]):
        self._app = app
        entries = [Key(key) if isinstance(key, str) else key for key in keys]
        self._entries = [(_digest(key.secret.encode()), key, Budget(key.limits)) for key in entries]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(KEYED):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            secret = headers.get(b"x-api-key", b"")  # Anthropic's
        sent = _digest(secret.strip())
        matches = [(key, budget) for digest, key, budget in self._entries if hmac.compare_digest(sent, digest)]
        if not matches:
            error = HttpError(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY`, or `x-api-key: KEY`."
            )
            await error.response()(scope, receive, send)
            return
        (key, budget), *_ = matches
        record = record_of(scope)
        record.key = key.name
        if scope["method"] != "POST" or not key.limits:
            await self._app(scope, receive, send)
            return
        declined = budget.take()
        if declined is not None:
            name, seconds = declined
            text = f"the key's limit of {key.limits[name]} {name.replace('_', ' ')} is reached; wait {seconds} s."
            record.error = text
            response = HttpError(429, text, retry_after=seconds).response()
            response.headers.update(budget.headers())
            await response(scope, receive, send)
            return

        async def limited(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(budget.headers())
            await send(message)

        try:
            await self._app(scope, receive, limited)
        finally:
            budget.spend(record.prompt_tokens + record.new_tokens)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
