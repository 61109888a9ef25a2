"""/v1/score and /v1/rerank: how well texts go with a query.

A decoder judges each pair in the form of Qwen3-Reranker: the score is the probability of "yes" against "no". A
cross-encoder reads both texts at once. Another encoder gives the cosine of the two texts' vectors, the first behind its
prompt for queries and the second behind that for documents.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vishwamai.core.errors import ShapeError
from vishwamai.inference.embedding import Embedder
from vishwamai.inference.engine import Engine
from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError, read_json
from vishwamai.inference.server.requests_log import record_of
from vishwamai.inference.server.service import check_keys
from vishwamai.inference.server.settings import Settings
from vishwamai.inference.server.vectors import Vectors

Texts = str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)]

TASK = "Given a web search query, retrieve relevant passages that answer the query"
PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
"""A query and a text as Qwen3-Reranker reads them."""

_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the prompts of queries and of documents, as sentence-transformers looks for them."""


class Score(schema.Open):
    """A body of /v1/score: one text with many, or pairs."""

    model: str | None = None
    text_1: Texts
    text_2: Texts
    instruction: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class Document(schema.Open):
    text: str


class Rerank(schema.Open):
    """A body of /v1/rerank."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, min_length=1, max_length=1024)]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class Scores:
    """Scores of pairs of texts.

    Args:
      engine: whose model judges pairs, or None.
      vectors: the encoder, which may have none.
      settings: names and limits.
    """

    def __init__(self, engine: Engine | None, vectors: Vectors, settings: Settings):
        self._engine, self._vectors, self._settings = engine, vectors, settings

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        body = schema.parse(Score, await read_json(request, self._settings.max_body))
        first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
        if len(first) not in (1, len(second)):
            raise HttpError(
                400, f"`text_1` has {len(first)} texts and `text_2` {len(second)}; pass one, or as many.", "text_1"
            )
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second))
        values, tokens = await self._scores(request, body, pairs)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return JSONResponse({**head, "model": self._name(body), "data": data, "usage": usage})

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank, in the form of Jina and Cohere."""
        body = schema.parse(Rerank, await read_json(request, self._settings.max_body))
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        values, tokens = await self._scores(request, body, [(body.query, text) for text in texts])
        order = sorted(range(len(texts)), key=lambda i: -values[i])[: body.top_n or None]
        keeps = body.return_documents is not False
        results = [
            {"index": i, **({"document": {"text": texts[i]}} if keeps else {}), "relevance_score": values[i]}
            for i in order
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse(
            {"id": f"rerank-{uuid.uuid4().hex}", "model": self._name(body), "usage": usage, "results": results}
        )

    def _name(self, body: Score | Rerank) -> str:
        return body.model or (self._vectors.name if self._engine is None else self._settings.name)

    async def _scores(
        self, request: Request, body: Score | Rerank, pairs: Sequence[tuple[str, str]]
    ) -> tuple[list[float], int]:
        """The score of each pair, and the tokens that were computed."""
        check_keys(body, self._settings)
        name, vectors = self._name(body), self._vectors
        judges = self._engine is not None and name in self._settings.names
        if not judges and (vectors.embed is None or name != vectors.name):
            raise HttpError(404, f"the model {name[:200]!r} is not served.", "model")
        crossed = isinstance(vectors.embed, Embedder) and vectors.embed.cross is not None
        run = self._judged if judges else self._crossed if crossed else self._cosines
        with vectors.room():
            try:
                values, tokens = await run_in_threadpool(run, body, pairs)
            except ShapeError as error:
                raise HttpError(400, str(error), "text_2" if isinstance(body, Score) else "documents") from error
        if not np.isfinite(values).all():
            raise HttpError(500, "a score is not finite; check the model's weights and dtype.")
        record_of(request.scope).prompt_tokens = tokens
        return [float(value) for value in values], tokens

    def _judged(self, body: Score | Rerank, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, int]:
        task = body.instruction or TASK
        texts = [PAIR.format(task=task, query=query, document=document) for query, document in pairs]
        values, tokens = self._judge(texts, body.truncate_prompt_tokens)
        return values[:, 0], tokens

    @functools.cached_property
    def _judge(self) -> Embedder:
        engine = self._engine
        tokenizer = None if engine is None else engine.tokenizer
        words = [] if tokenizer is None else [tokenizer.encode(word, add_special=False) for word in ("yes", "no")]
        if engine is None or tokenizer is None or any(len(ids) != 1 for ids in words):
            raise ShapeError(
                'the model has no tokens "yes" and "no", by which a decoder judges pairs; start the server with an '
                "encoder, or with a reranker such as Qwen3-Reranker."
            )
        ids = [word[0] for word in words]
        return Embedder.of_judgement(engine.model, tokenizer, ids, engine.limits.max_length, engine.optimization)

    def _crossed(self, body: Score | Rerank, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, int]:
        assert isinstance(self._vectors.embed, Embedder)
        return self._vectors.embed.scores(pairs, body.truncate_prompt_tokens)

    def _cosines(self, body: Score | Rerank, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, int]:
        embed = self._vectors.embed
        assert embed is not None
        prompts: Mapping[str, str] = getattr(embed, "prompts", {})
        names = [next((name for name in choices if name in prompts), None) for choices in (_QUERY, _DOCUMENT)]
        columns = (self._vectors.prompted(column, name) for column, name in zip(zip(*pairs), names))
        pairs = list(zip(*columns))
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors, tokens = embed(texts, body.truncate_prompt_tokens)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        place = {text: i for i, text in enumerate(texts)}
        return np.asarray([vectors[place[a]] @ vectors[place[b]] for a, b in pairs]), tokens
