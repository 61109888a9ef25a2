"""The routes that compute: their handlers, the classes that read their bodies, and the form of their answers."""

from __future__ import annotations

from vishwamai.inference.server import messages, responses, schema, scores, tokens
from vishwamai.inference.server.adapter_routes import AdapterRoutes, Load, Unload
from vishwamai.inference.server.openapi import EVENTS, JSON, Endpoint, Handler, fields
from vishwamai.inference.server.service import Service
from vishwamai.inference.server.vectors import Vectors

_USAGE = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_ANSWER = fields(id="string", object="string", created="integer", model="string", choices="array", usage=_USAGE)


def answering(service: Service | None, no_answers: Handler) -> list[Endpoint]:
    """Routes of the model's answers; of an encoder alone, those that say that it gives none."""
    chat, completion = (no_answers, no_answers) if service is None else (service.chat, service.completions)
    typed = (JSON, EVENTS)
    endpoints = [
        Endpoint("/v1/completions", completion, "continues a text", (schema.Completion,), _ANSWER, typed),
        Endpoint("/v1/chat/completions", chat, "answers a conversation", (schema.Chat,), _ANSWER, typed),
    ]
    if service is None:
        return endpoints
    ids, anthropic, loader = tokens.Tokens(service), messages.Messages(service), AdapterRoutes(service)
    response = fields(id="string", object="string", status="string", output="array")
    message = fields(id="string", type="string", role="string", content="array", usage="object")
    fields(input_tokens="integer")
    count, texts = fields(count="integer", max_model_len="integer", tokens="array"), fields(prompt="string")
    loaded, unloaded = fields(loaded="string"), fields(unloaded="string")
    create, counter = responses.Responses(service).create, anthropic.count
    return [
        *endpoints,
        Endpoint("/v1/responses", create, "OpenAI's responses", (responses.Body,), response, typed),
        Endpoint("/v1/messages", anthropic.create, "Anthropic's messages", (messages.Body,), message, typed),
        Endpoint(
            "/v1/messages/count_tokens",
            counter,
            "tokens of messages",
            (messages.Count,),
            fields(input_tokens="integer"),
        ),
        Endpoint("/v1/load_lora_adapter", loader.load, "loads an adapter", (Load,), loaded),
        Endpoint("/v1/unload_lora_adapter", loader.unload, "forgets an adapter", (Unload,), unloaded),
        Endpoint("/tokenize", ids.tokenize, "token ids of a text or chat", (tokens.Prompt, tokens.Chat), count),
        Endpoint("/detokenize", ids.detokenize, "the text of token ids", (tokens.Ids,), texts),
    ]


def scoring(vectors: Vectors, scorer: scores.Scores) -> list[Endpoint]:
    """Routes of vectors and of scores."""
    score = fields(id="string", object="string", model="string", data="array", usage="object")
    ranks = fields(id="string", model="string", results="array", usage="object")
    embeddings = fields(object="string", data="array", model="string", usage="object")
    return [
        Endpoint("/v1/embeddings", vectors.embeddings, "vectors of texts", (schema.Embedding,), embeddings),
        *(
            Endpoint(path, scorer.score, "scores of pairs of texts", (scores.Score,), score)
            for path in ("/v1/score", "/score")
        ),
        *(
            Endpoint(path, scorer.rerank, "ranks texts for a query", (scores.Rerank,), ranks)
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        ),
    ]
