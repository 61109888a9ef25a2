"""Adapters by HTTP: clients load and unload those of one folder, where the operator names it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError, declined, read_json
from vishwamai.inference.server.service import Service

Name = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]


class Load(schema.Open):
    """A body of /v1/load_lora_adapter: `lora_path` is the name of a folder, by default that of the adapter."""

    lora_name: Name
    lora_path: Name | None = None


class Unload(schema.Open):
    """A body of /v1/unload_lora_adapter."""

    lora_name: Name


class AdapterRoutes:
    """Loads and unloads adapters of a service."""

    def __init__(self, service: Service):
        self._service = service

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        service, folder = self._service, self._service.settings.adapter_folder
        body = service.checked(Load, await read_json(request, service.settings.max_body))
        if folder is None:
            raise HttpError(403, "clients may not load adapters; the operator allows it by --adapter-folder.")
        name = body.lora_path or body.lora_name
        if name in (".", ".."):
            raise HttpError(400, f"`lora_path` is {name!r}; pass the name of a folder.", "lora_path")
        if body.lora_name in service.settings.names:
            raise HttpError(400, f"{body.lora_name!r} is the name of the model; pass another.", "lora_name")
        with declined("lora_path"):
            await run_in_threadpool(service.engine.load_adapter, body.lora_name, folder / name)
        return JSONResponse({"loaded": body.lora_name})

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        service = self._service
        body = service.checked(Unload, await read_json(request, service.settings.max_body))
        if service.settings.adapter_folder is None:
            raise HttpError(403, "clients may not unload adapters; the operator allows it by --adapter-folder.")
        with declined("lora_name"):
            service.engine.unload_adapter(body.lora_name)
        return JSONResponse({"unloaded": body.lora_name})
