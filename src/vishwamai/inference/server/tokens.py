"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError, read_json
from vishwamai.inference.server.service import Service
from vishwamai.models.tokenizer import Tokenizer


class Prompt(schema.Open):
    """A body of /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Chat(schema.Chat):
    """A body of /tokenize with a conversation."""

    return_token_strs: bool | None = None


class Ids(schema.Open):
    """A body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[schema.TokenId], Field(max_length=2**20)]


class Tokens:
    """Texts to token ids, and back.

    Args:
      service: service of the model whose tokenizer it is.
    """

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        value = await read_json(request, self._service.settings.max_body)
        kind = Chat if isinstance(value, dict) and "messages" in value else Prompt
        body = self._service.checked(kind, value)
        return JSONResponse(await run_in_threadpool(self._ids, body))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = self._service.checked(Ids, await read_json(request, self._service.settings.max_body))
        text = await run_in_threadpool(self._tokenizer.decode, body.tokens, skip_special=False)
        return JSONResponse({"prompt": text})

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._service.engine.tokenizer
        if tokenizer is None:
            raise HttpError(400, "the model has no tokenizer; prompts and answers are token ids.", "prompt")
        return tokenizer

    def _ids(self, body: Prompt | Chat) -> dict[str, object]:
        if isinstance(body, Chat):
            ids = list(self._service.jobs.chat_prompt(body).ids)
        else:
            ids = self._tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)
        names = [self._service.jobs.pieces.name(id) for id in ids] if body.return_token_strs else None
        length = self._service.engine.limits.max_length
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": names}
