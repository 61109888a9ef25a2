"""/v1/embeddings."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vishwamai.core.errors import ShapeError
from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError, read_json
from vishwamai.inference.server.requests_log import record_of
from vishwamai.inference.server.service import check_keys
from vishwamai.inference.server.settings import Settings

Embed = Callable[[Sequence[str | Sequence[int]], int | None], tuple[np.ndarray, int]]
"""Texts or token ids, and how many tokens of each to keep, to vectors `[texts, features]` float32 and how many tokens
they have; `vishwamai.inference.Embedder` is one.
"""


class Vectors:
    """An encoder behind HTTP.

    Args:
      embed: the encoder; None: every request is an error that says that there is none.
      name: its name for clients.
      settings: limits; `max_queue` requests compute or wait at once.
    """

    def __init__(self, embed: Embed | None, name: str, settings: Settings):
        self.embed, self.name, self.settings, self.max_queue = embed, name, settings, settings.max_queue
        self.pending = 0

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body = schema.parse(schema.Embedding, await read_json(request, self.settings.max_body))
        with self.room():
            return await self._answer(request, body)

    def prompted(self, inputs: Sequence[str | Sequence[int]], name: str | None) -> list[str | Sequence[int]]:
        """The inputs, each text behind the encoder's prompt of that name, or the default one.

        Raises:
          HttpError: 400, there is no such prompt.
        """
        prompts: Mapping[str, str] = getattr(self.embed, "prompts", {})
        if name is None:
            name = getattr(self.embed, "default_prompt", None)
        elif name not in prompts:
            names = ", ".join(map(repr, prompts)) or "none"
            raise HttpError(400, f"`prompt_name` is {name!r}; the prompts of the encoder are {names}.", "prompt_name")
        prompt = "" if name is None else prompts[name]
        return [prompt + text if isinstance(text, str) else text for text in inputs]

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """A place among the requests that compute or wait.

        Raises:
          HttpError: 429, there is none.
        """
        if self.pending >= self.max_queue:
            raise HttpError(429, f"{self.pending} requests wait already; try again later.", retry_after=1)
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    async def _answer(self, request: Request, body: schema.Embedding) -> Response:
        check_keys(body, self.settings)
        if self.embed is None:
            raise HttpError(400, "this server has no encoder; start it with --encoder DIR or --pooling.", "model")
        if body.model is not None and body.model != self.name:
            raise HttpError(404, f"the encoder {body.model[:200]!r} is not served; {self.name!r} is.", "model")
        inputs: Any = body.input
        if isinstance(inputs, str) or isinstance(inputs[0], int):
            inputs = [inputs]
        inputs = self.prompted(inputs, body.prompt_name)
        if getattr(self.embed, "cross", None) is not None:
            raise HttpError(400, f"{self.name!r} is a cross-encoder, which answers /v1/score and /v1/rerank.", "model")
        try:
            task = {"task": body.prompt_name} if getattr(self.embed, "tasks", None) else {}
            vectors, tokens = await run_in_threadpool(self.embed, inputs, body.truncate_prompt_tokens, **task)
        except ShapeError as error:
            raise HttpError(400, str(error), "input") from error
        record_of(request.scope).prompt_tokens = tokens
        if body.dimensions is not None:
            vectors = shortened(vectors, body.dimensions)
        encoded = [encoded_vector(vector, body.encoding_format == "base64") for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})


def shortened(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """The first features of vectors, of length 1 again, as OpenAI's `dimensions` asks for.

    Raises:
      HttpError: 400, there are fewer.
    """
    if dimensions > vectors.shape[1]:
        raise HttpError(400, f"`dimensions` is {dimensions}; the vectors have {vectors.shape[1]}.", "dimensions")
    first = vectors[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1e-12)


def encoded_vector(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    vector = vector.astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
