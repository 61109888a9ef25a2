"""Errors in OpenAI's form, and the reading of a body within its limit."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.inference.server.requests_log import record_of

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}


_LONGEST = 2000
"""Characters of an error's text."""


class HttpError(Exception):
    """An answer that is an error: its status, text, and the argument that is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None):
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."  # it may have what was sent
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @property
    def body(self) -> dict[str, object]:
        """The object that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, where that is known."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def error_response(request: Request, error: HttpError) -> JSONResponse:
    """The answer of an error, whose text the log of the request has too."""
    record = record_of(request.scope)
    record.error = error.message
    response = error.response()
    if request.url.path.startswith("/v1/messages"):  # Anthropic's errors say that they are one
        response = JSONResponse({"type": "error", **error.body}, error.status, error.headers)
    response.headers["X-Request-Id"] = record.id
    return response


async def read_json(request: Request, limit: int) -> object:
    """The JSON value of a body of at most `limit` bytes.

    Raises:
      HttpError: 413 where it is longer, 400 where it is not JSON.
    """
    too_long = HttpError(413, f"the body is longer than {limit} bytes; send less.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_long
    return _value(body) if len(body) < _SMALL else await run_in_threadpool(_value, body)


_SMALL = 1 << 16
"""Bytes of a body that is read in less time than a thread takes to begin."""


def _value(body: bytearray) -> object:
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}.") from error
    if _ESCAPED.search(text) is not None:
        try:
            _check_text(value, "")
        except RecursionError as error:
            raise HttpError(400, "the body is nested too deeply.") from error
    return value


_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def _check_text(value: object, path: str) -> None:
    """Raises an error for a text with half of a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            _check_text(entry, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            _check_text(key, f"{path} (a key)".strip())
            _check_text(entry, f"{path}.{key}" if path else key)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            where = path or "the body"
            raise HttpError(
                400,
                f"`{where[:200]}` has a lone surrogate at character {error.start}, which is not text; send whole "
                "characters.",
                where.split(".")[0].split("[")[0][:200],
            ) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_MODEL_FILE = re.compile(r"(?<![\w/.:])/(?:[^\s/]+/)*([^\s/]+\.(?:jinja|json|safetensors|gguf|model|txt)\b)")
"""The absolute path of a file, of which clients see the name."""


class declined:
    """Errors of ours about what the client sent become answers of status 400."""

    def __init__(self, param: str | None):
        self._param = param

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ShapeError | UnsupportedError):
            raise HttpError(400, _MODEL_FILE.sub(r"\1", str(error)), self._param) from error
