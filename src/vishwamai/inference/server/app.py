"""The application: routes, API keys, errors in OpenAI's form, and the engine's life."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vishwamai.core.arguments import check_instances, checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.inference.engine import Engine
from vishwamai.inference.server import openapi
from vishwamai.inference.server.errors import HttpError, error_response
from vishwamai.inference.server.guards import Guards
from vishwamai.inference.server.keys import KEYED, Keys
from vishwamai.inference.server.metrics import Metrics
from vishwamai.inference.server.openapi import TEXT, Endpoint, fields
from vishwamai.inference.server.requests_log import RequestLog
from vishwamai.inference.server.routes import answering, scoring
from vishwamai.inference.server.scores import Scores
from vishwamai.inference.server.service import Service, Settings
from vishwamai.inference.server.sleep_routes import Sleep
from vishwamai.inference.server.traces import Traces
from vishwamai.inference.server.vectors import Embed, Vectors

_PAGE_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
_PAGE_POLICY += "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@checked
def make_app(engine: Engine | None, settings: Settings, embed: Embed | None = None) -> Starlette:
    """The ASGI application of a server.

    Args:
      engine: compiled; the application starts its loop, and stops it at its end. None: embeddings alone are served.
      settings: names and limits.
      embed: the encoder of /v1/embeddings, or None: an error says that there is none.

    Raises:
      ShapeError: an argument is not of its type.

    >>> from vishwamai.inference import Settings
    >>> make_app(None, Settings("tiny")).url_path_for("health")
    '/health'
    """
    check_instances("make_app", {"engine": Engine}, {"engine": engine})
    if embed is not None and not callable(embed):
        raise ShapeError(f"make_app: `embed` is {described(embed)}; pass a function of texts, or None.")
    metrics = Metrics(engine, settings.name)
    encoder_name = settings.encoder or settings.name
    vectors = Vectors(embed, encoder_name, settings)
    ready: list[bool] = []
    names = list(settings.names) if engine else []
    names += [encoder_name] if embed and encoder_name not in names else []
    common = {"object": "model", "created": int(time.time()), "owned_by": "vishwamai"}
    entries: dict[str, dict[str, object]] = {name: {"id": name, **common} for name in names}
    if engine is not None:
        details = {"max_model_len": engine.limits.max_length, "defaults": defaults_of(settings)}
        for name in settings.names:
            entries[name] |= {"root": settings.name, **details}

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        served = dict(entries)
        if service is not None:
            served |= {
                name: {**entries[settings.name], "id": name, "root": name, "parent": settings.name}
                for name in service.adapters
            }
        if name is None:
            return JSONResponse({"object": "list", "data": list(served.values())})
        if name not in served:
            raise HttpError(404, f"the model {name[:200]!r} is not served; {', '.join(served)} is.", "model")
        return JSONResponse(served[name])

    async def health(request: Request) -> Response:
        """Whether the process is worth keeping; the log says why not."""
        good = engine is None or engine.failure is None
        asleep = engine is not None and engine.sleeping
        return JSONResponse({"status": ("sleeping" if asleep else "ok") if good else "failed"}, 200 if good else 503)

    async def is_ready(request: Request) -> Response:
        good = bool(ready) and (engine is None or (engine.failure is None and not engine.sleeping))
        return JSONResponse({"ready": good}, 200 if good else 503, {} if good else {"Retry-After": "1"})

    async def metrics_text(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @functools.cache
    def described_routes() -> dict[str, object]:
        return openapi.document(endpoints, KEYED if settings.keys else ())

    async def description(request: Request) -> Response:
        return JSONResponse(described_routes())

    page = resources.files("vishwamai.inference.server").joinpath("page.html").read_text(encoding="utf-8")

    async def front(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    async def no_answers(request: Request) -> Response:
        raise HttpError(
            400,
            f"{encoder_name!r} is an encoder, which answers /v1/embeddings, /v1/score and /v1/rerank only.",
            "model",
        )

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        if engine is not None:
            engine.start()
        ready.append(True)
        yield
        ready.clear()
        if engine is not None:
            engine.stop()
        if service is not None:
            service.grammars.close()

    service = None if engine is None else Service(engine, settings, metrics)
    scorer = Scores(engine, vectors, settings)
    sleep = Sleep(engine) if engine is not None and settings.sleep_mode else None
    endpoints = [
        *([] if engine is None else [Endpoint("/", front, "a page to chat with the model", media=("text/html",))]),
        Endpoint("/health", health, "whether the engine works", answer=fields(status="string"), statuses=(200, 503)),
        Endpoint("/ready", is_ready, "whether requests are taken", answer=fields(ready="boolean"), statuses=(200, 503)),
        Endpoint("/metrics", metrics_text, "counters in Prometheus's form", media=(TEXT,)),
        Endpoint("/v1/models", models, "the models", answer=fields(object="string", data="array")),
        Endpoint("/v1/models/{name:path}", models, "one model", answer=fields(id="string", object="string")),
        *answering(service, no_answers),
        *scoring(vectors, scorer),
        *([] if sleep is None else sleep.endpoints),
        Endpoint("/openapi.json", description, "this document", answer=fields(openapi="string", paths="object")),
    ]
    app = Starlette(
        routes=[endpoint.route for endpoint in endpoints],
        exception_handlers={
            HttpError: _http_error,
            HTTPException: _starlette_error,
            ClientDisconnect: _left,
            Exception: _own_error,
        },
        lifespan=life,
    )
    if sleep is not None:
        app.add_middleware(sleep.guard)
    if settings.keys:
        app.add_middleware(Keys, keys=settings.keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Guards, settings=settings)
    if settings.traces:
        app.add_middleware(Traces)
    app.add_middleware(RequestLog)
    return app


def defaults_of(settings: Settings) -> dict[str, float]:
    """The options of sampling that hold where a request has none."""
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **settings.defaults}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(request, error)


async def _starlette_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}."
    if error.status_code == 404:
        paths = dict.fromkeys(route.path for route in request.app.routes if isinstance(route, Route))
        text = f"{text} The routes are {', '.join(path for path in paths if '{' not in path)}."
    return error_response(request, HttpError(error.status_code, text))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _own_error(request: Request, error: Exception) -> Response:
    return error_response(request, HttpError(500, f"{type(error).__name__} in the server; its log has the trace."))
