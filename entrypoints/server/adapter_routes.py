"""Routes that load and unload adapters, only with `--enable-admin` and `--enable-lora`.

Bodies, texts and errors are vLLM's; without `/v1`, SGLang's. Whoever manages adapters
(`TenantLimits.manages_adapters`) loads them for everyone; other tenants load from their folder, for
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from ...core.errors import Forbidden, InvalidRequest, JackfieldError, NotFound, shown
from ...core.local_path import local_path
from ...core.lora_request import LoadAdapter, check_adapter_name
from ...core.tenancy import Tenant
from ..http.auth.tenants import tenant_of
from ..http.context import ENGINE, reply
from ..http.model_names import usable
from ..http.routing import add_routes, route
from ..openai.common.openapi import documented
from ..openai.common.request_body import decode_body

logger = logging.getLogger("jackfield.server")
MAX_PATH_LENGTH = 4096
Name = Annotated[str, msgspec.Meta(min_length=1)]
Path_ = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]


class LoadRequest(msgspec.Struct):
    """An adapter on the server's machine."""

    lora_name: Name
    lora_path: Path_
    """Folder of the adapter, or its GGUF file; within the tenant's folder for whoever has one."""
    load_inplace: bool = False
    """Take the place of what is loaded under this name."""
    is_3d_lora_weight: bool = False
    """vLLM's; the files tell, whatever it says."""
    pinned: bool = False
    """SGLang's: keep it in the device's memory."""


class UnloadRequest(msgspec.Struct):
    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's; the name is enough."""


class AdapterReply(msgspec.Struct):
    """SGLang's answer."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]
    """Name → path, or name again for whoever does not manage adapters."""


class RefusedAdapter(InvalidRequest):
    error_type = "InvalidUserInput"


class NoAdapter(NotFound):
    error_type = "NotFoundError"


def add_adapter_routes(app: web.Application, needs: Mapping[str, bool]) -> None:
    add_routes(
        app, load_adapter, unload_adapter, load_adapter_as_sglang, unload_adapter_as_sglang,
        needs=needs,
    )  # fmt: skip


@route("POST /v1/load_lora_adapter")
@documented("admin", request=LoadRequest, response=str, content_type="text/plain", errors=(403,))
async def load_adapter(request: web.Request) -> web.Response:
    """Load an adapter."""
    name = await _load(request)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


@route("POST /v1/unload_lora_adapter")
@documented("admin", request=UnloadRequest, response=str, content_type="text/plain", errors=(403,))
async def unload_adapter(request: web.Request) -> web.Response:
    """Unload an adapter; requests that have it go on."""
    name = await _unload(request)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


@route("POST /load_lora_adapter")
@documented("admin", request=LoadRequest, response=AdapterReply, errors=(403,))
async def load_adapter_as_sglang(request: web.Request) -> web.Response:
    """Load an adapter, with SGLang's answer."""
    return await _as_sglang(request, _load)


@route("POST /unload_lora_adapter")
@documented("admin", request=UnloadRequest, response=AdapterReply, errors=(403,))
async def unload_adapter_as_sglang(request: web.Request) -> web.Response:
    """Unload an adapter, with SGLang's answer."""
    return await _as_sglang(request, _unload)


async def _as_sglang(
    request: web.Request, work: Callable[[web.Request], Awaitable[str]]
) -> web.Response:
    tenant = tenant_of(request)
    status, message = 200, ""
    try:
        await work(request)
    except JackfieldError as error:
        status, message = error.status, error.message
    cards = usable(await request.app[ENGINE].list_loras(), tenant)
    manages = tenant.limits.manages_adapters
    loaded = {card.name: card.path if manages else card.name for card in cards}
    return reply(AdapterReply(status == 200, message, loaded), status)


async def _load(request: web.Request) -> str:
    """Load an adapter, and return its name."""
    engine, tenant = request.app[ENGINE], tenant_of(request)
    with _refusals():
        body = await decode_body(request, LoadRequest)
        name = check_adapter_name(body.lora_name, engine.served_model_names)
    path, limits = body.lora_path, tenant.limits
    if not limits.manages_adapters:
        path = await asyncio.to_thread(_within, tenant, body.lora_path)
    job = LoadAdapter(
        name=name,
        path=path,
        load_inplace=body.load_inplace,
        owner="" if limits.manages_adapters else tenant.owner,
        pinned=body.pinned and limits.manages_adapters,
        most=None if limits.manages_adapters else limits.max_adapters,
    )
    with _refusals(path, body.lora_path):
        card = await engine.load_adapter(job)
    logger.info(
        "adapter %s loaded from %s, rank %d%s", shown(name), shown(path), card.rank,
        f", for {tenant.name}" if card.owner else "",
    )  # fmt: skip
    return name


async def _unload(request: web.Request) -> str:
    """Unload an adapter, and return its name."""
    engine, tenant = request.app[ENGINE], tenant_of(request)
    with _refusals():
        name = (await decode_body(request, UnloadRequest)).lora_name
    if not tenant.limits.manages_adapters:
        _folder_of(tenant)
    owner = "" if tenant.limits.manages_adapters else tenant.owner
    if not await engine.remove_lora(name, tenant=owner):
        raise NoAdapter(f"lora_name: no adapter {shown(name)} is loaded", param="lora_name")
    logger.info("adapter %s unloaded", shown(name))
    return name


def _folder_of(tenant: Tenant) -> Path:
    """Return the folder of a tenant's own adapters. Raises Forbidden."""
    if tenant.limits.adapter_folder is None:
        raise Forbidden("this key may not load or unload adapters")
    return local_path(tenant.limits.adapter_folder)


def _within(tenant: Tenant, name: str) -> str:
    """Return the path of a name in a tenant's folder, without links. Raises Forbidden, and
    NoAdapter if there is none inside."""
    folder = _folder_of(tenant)
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = root = folder
    if root not in path.parents:
        raise _nothing_at(name)
    return str(path)


def _nothing_at(written: str) -> NoAdapter:
    return NoAdapter(f"lora_path: no adapter is at {shown(written)}", param="lora_path")


@contextlib.contextmanager
def _refusals(path: str = "", written: str = "") -> Iterator[None]:
    """Give errors vLLM's types, and paths as the caller wrote them."""
    try:
        yield
    except InvalidRequest as error:
        if error.status == 400:
            raise RefusedAdapter(error.message, param=error.param) from error
        if error.status != 404:
            raise
        if path != written:
            raise _nothing_at(written) from error
        raise NoAdapter(error.message, param=error.param) from error
