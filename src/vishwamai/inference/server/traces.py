"""Traces of requests by OpenTelemetry's API: a span for each, within the trace that the client names.

The API alone records nothing. A provider, which `opentelemetry-instrument` or the program sets up, exports the spans.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from vishwamai.inference.server.requests_log import QUIET, record_of


class Traces:
    """Opens a span around each request but those of probes; it has the tokens, the status and the request's id."""

    def __init__(self, app: ASGIApp):
        from opentelemetry import trace

        self._app, self._tracer = app, trace.get_tracer("vishwamai")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        from opentelemetry import propagate, trace

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = record_of(scope)
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}"[:200],
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"][:2000]},
        ) as span:
            try:
                await self._app(scope, receive, send)
            finally:
                span.set_attribute("http.response.status_code", record.status)
                span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
                span.set_attribute("gen_ai.usage.output_tokens", record.new_tokens)
                span.set_attribute("vishwamai.request.id", record.id)
                if record.status >= 500:
                    span.set_status(trace.StatusCode.ERROR, record.error)
