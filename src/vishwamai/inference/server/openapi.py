"""The OpenAPI document of a server: its routes, with the classes that read their bodies as schemas."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import vishwamai

Handler = Callable[[Request], Awaitable[Response]]

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_DECLINED = {
    400: "the request is wrong; `param` names the field at fault",
    401: "the API key is missing or wrong",
    403: "the host, the origin or the operation is not allowed",
    404: "the model is not served",
    408: "the body did not arrive in time",
    413: "the body is too long",
    415: "the Content-Type is not application/json",
    429: "too many answers wait, or the key's budget is spent; see Retry-After",
    503: "the server cannot answer now; see Retry-After",
}


def fields(**kinds: str | Mapping[str, object]) -> dict[str, object]:
    """The schema of an object with these members: a JSON type, or a schema.

    >>> fields(id="string")
    {'type': 'object', 'required': ['id'], 'properties': {'id': {'type': 'string'}}}
    """
    properties = {name: {"type": kind} if isinstance(kind, str) else dict(kind) for name, kind in kinds.items()}
    return {"type": "object", "required": list(properties), "properties": properties}


_ERROR = fields(
    error=fields(message="string", type="string", param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One route.

    Attributes:
      path: path in starlette's form.
      handler: function that answers.
      summary: text of one line, its purpose.
      bodies: classes that read the body, one of which must fit; none: a GET without a body.
      answer: JSON schema of an answer in JSON; None: a text.
      media: media types of answers.
      statuses: statuses of answers besides those that decline.
      post: flag, a POST without a body.
      parameters: entries of OpenAPI for parameters of the address.
    """

    path: str
    handler: Handler
    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    answer: Mapping[str, object] | None = None
    media: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = (200,)
    post: bool = False
    parameters: tuple[Mapping[str, object], ...] = ()

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "POST" if self.bodies or self.post else "GET"

    @property
    def route(self) -> Route:
        """The route of starlette."""
        return Route(self.path, self.handler, methods=[self.method])


def document(endpoints: Sequence[Endpoint], keyed: tuple[str, ...] = ()) -> dict[str, object]:
    """The OpenAPI 3.1 document.

    Args:
      endpoints: routes of the server.
      keyed: beginnings of the paths that ask for a key.
    """
    classes = dict.fromkeys(body for endpoint in endpoints for body in endpoint.bodies)
    names, definitions = models_json_schema(
        [(body, "validation") for body in classes], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, object] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation: dict[str, object] = {
            "operationId": f"{endpoint.method} {path}",
            "summary": endpoint.summary,
            "responses": _responses(endpoint),
        }
        parameters = [*endpoint.parameters]
        if "{name}" in path:
            parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
        if parameters:
            operation["parameters"] = parameters
        if endpoint.bodies:
            choices = [names[body, "validation"] for body in endpoint.bodies]
            schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        if path.startswith(keyed) and keyed:
            operation["security"] = [{"bearer": []}, {"header": []}]
        paths[path] = {endpoint.method.lower(): operation}
    description = "the answer declines the request"
    return {
        "openapi": "3.1.0",
        "info": {"title": "vishwamai", "version": vishwamai.__version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "responses": {
                "Error": {
                    "description": description,
                    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _responses(endpoint: Endpoint) -> dict[str, object]:
    content: dict[str, object] = {media: {"schema": {"type": "string"}} for media in endpoint.media}
    if JSON in content:
        content[JSON] = {"schema": dict(endpoint.answer or {})}
    if EVENTS in content:
        content[EVENTS] = {}  # OpenAPI 3.1 has no schema for the events of a stream
    responses: dict[str, object] = {
        str(status): {"description": "the answer", "content": content} for status in endpoint.statuses
    }
    declined = (
        _DECLINED if endpoint.method == "POST" else {status: _DECLINED[status] for status in (400, 401, 403, 404)}
    )
    for status, description in declined.items():
        reference = {"$ref": "#/components/responses/Error"}
        responses.setdefault(str(status), {**reference, "description": description})
    return responses
