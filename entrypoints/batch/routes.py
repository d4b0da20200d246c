"""/v1/files and /v1/batches: OpenAI's routes over a store."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

from aiohttp import web

from ...core.errors import InvalidRequest, shown
from ...core.recording.private_files import private_opener
from ..http.auth.tenants import tenant_of
from ..http.context import reply
from ..http.forms import FormReader
from ..http.options import BatchOptions
from ..http.routing import route
from ..openai.common.request_body import decode_body
from .inprocess import LINES
from .manager import BatchWork
from .schemas import (
    Batch,
    CreateBatch,
    ExpiresAfter,
    FileObject,
    new_file_id,
    page,
    window_seconds,
)
from .storage import storage
from .store import Store, sync

STORE: web.AppKey[Store] = web.AppKey("batch_store", Store)
WORK: web.AppKey[BatchWork] = web.AppKey("batch_work", BatchWork)
SETTINGS: web.AppKey[BatchOptions] = web.AppKey("batch_options", BatchOptions)
MAX_FIELD = 1024
"""Most bytes of a form field other than the file."""


# ---------------------------------------------------------------- files


@route("POST /v1/files", stateful=True, allow_head=False)
async def upload(request: web.Request) -> web.Response:
    """POST /v1/files: store a file: multipart/form-data with `file` and `purpose`."""
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("the body must be multipart/form-data with file and purpose")
    store = request.app[STORE]
    file_id = new_file_id()
    path = store.incoming(file_id)
    await store.call(store.check_room, request.content_length or 0)
    try:
        fields, name, size = await _form(request, path)
        file = _file_object(file_id, fields, name, size)
        await store.call(store.add_file, file, path, tenant_of(request).owner)
    finally:
        with storage("file"):
            await asyncio.to_thread(path.unlink, missing_ok=True)
    return reply(file)


async def _form(request: web.Request, path: Any) -> tuple[dict[str, str], str | None, int]:
    limit = request.app[SETTINGS].max_file_bytes
    fields: dict[str, str] = {}
    name: str | None = None
    size = 0
    form = FormReader(request)
    while (part := await form.next_part()) is not None:
        if part.name != "file":
            field = part.name[:64]
            if field in fields:
                raise InvalidRequest(f"{field}: give one", param=field)
            fields[field] = await _field(form, field)
            continue
        if name is not None:
            raise InvalidRequest("file: give one", param="file")
        name = part.filename or "file"
        size = await _content(form, path, limit)
    return fields, name, size


async def _field(form: FormReader, name: str) -> str:
    value = b""
    while piece := await form.read():
        value += piece
        if len(value) > MAX_FIELD:
            raise InvalidRequest(f"{name}: is too long", param=name)
    return value.decode("utf-8", "replace")


async def _content(form: FormReader, path: Any, limit: int) -> int:
    size = 0
    with storage("file"):
        # Unbuffered: on close, a buffer would write again what did not fit.
        file = await asyncio.to_thread(open, path, "xb", 0, opener=private_opener)
    try:
        while chunk := await form.read():
            size += len(chunk)
            if size > limit:
                raise InvalidRequest(f"file: is larger than {limit} bytes", param="file")
            with storage("file"):
                await asyncio.to_thread(_write, file, chunk)
        with storage("file"):
            await asyncio.to_thread(sync, file)
    finally:
        await asyncio.to_thread(file.close)
    return size


def _write(file: Any, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _file_object(file_id: str, fields: dict[str, str], name: str | None, size: int) -> FileObject:
    if name is None:
        raise InvalidRequest("file: is missing", param="file")
    if size == 0:
        raise InvalidRequest("file: is empty", param="file")
    if fields.get("purpose") != "batch":
        raise InvalidRequest(
            f"purpose: must be batch, got {shown(fields.get('purpose'))}", param="purpose"
        )
    now = int(time.time())
    expires: int | None = None
    if (seconds := fields.get("expires_after[seconds]")) is not None:
        if not re.fullmatch("[0-9]{1,9}", seconds):
            raise InvalidRequest("expires_after.seconds: must be an integer", param="expires_after")
        if fields.get("expires_after[anchor]") != "created_at":
            raise InvalidRequest("expires_after.anchor: must be created_at", param="expires_after")
        after = ExpiresAfter("created_at", int(seconds))
        after.check("expires_after")
        expires = now + after.seconds
    # Only shown to clients, never used as a path.
    filename = "".join(c for c in re.split(r"[/\\]", name)[-1] if c.isprintable())[:255]
    return FileObject(
        id=file_id,
        bytes=size,
        created_at=now,
        filename=filename or "file",
        purpose="batch",
        expires_at=expires,
    )


@route("GET /v1/files", stateful=True, allow_head=False)
async def list_files(request: web.Request) -> web.Response:
    """GET /v1/files: the files that are stored."""
    store = request.app[STORE]
    limit = _limit(request, 10_000, 10_000)
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, got {shown(order)}", param="order")
    files = await store.call(
        store.files,
        request.query.get("after") or None,
        limit,
        order == "asc",
        request.query.get("purpose") or None,
        tenant_of(request).owner,
    )
    return reply(page(files, limit))


@route("GET /v1/files/{file_id}", stateful=True, allow_head=False)
async def get_file(request: web.Request) -> web.Response:
    """GET /v1/files/{file_id}: what is known of a file."""
    store = request.app[STORE]
    owner = tenant_of(request).owner
    return reply(await store.call(store.file, request.match_info["file_id"], owner))


@route("DELETE /v1/files/{file_id}", stateful=True, allow_head=False)
async def delete_file(request: web.Request) -> web.Response:
    """DELETE /v1/files/{file_id}: delete a file that no batch reads."""
    store = request.app[STORE]
    file_id = request.match_info["file_id"]
    await store.call(store.delete_file, file_id, tenant_of(request).owner)
    return reply({"id": file_id, "object": "file", "deleted": True})


@route("GET /v1/files/{file_id}/content", stateful=True, allow_head=False)
async def file_content(request: web.Request) -> web.StreamResponse:
    """GET /v1/files/{file_id}/content: what a file holds."""
    store = request.app[STORE]
    owner = tenant_of(request).owner
    file = await store.call(store.file, request.match_info["file_id"], owner)
    return web.FileResponse(
        store.content(file.id),
        headers={"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"},
    )


# ---------------------------------------------------------------- batches


@route("POST /v1/batches", stateful=True, allow_head=False)
async def create_batch(request: web.Request) -> web.Response:
    """POST /v1/batches: answer the requests in a file."""
    body = await decode_body(request, CreateBatch)
    work = _work(request)
    body.check(tuple(LINES))
    now = int(time.time())
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_seconds(body.completion_window),
        metadata=body.metadata,
        output_expires_after=body.output_expires_after,
    )
    return reply(await work.create(batch, tenant_of(request)))


@route("GET /v1/batches", stateful=True, allow_head=False)
async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches: the batches, newest first."""
    limit = _limit(request, 20, 100)
    after, owner = request.query.get("after") or None, tenant_of(request).owner
    batches = await _work(request).list(after, limit, owner)
    return reply(page(batches, limit))


@route("GET /v1/batches/{batch_id}", stateful=True, allow_head=False)
async def get_batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{batch_id}: how far a batch is."""
    batch_id, owner = request.match_info["batch_id"], tenant_of(request).owner
    return reply(await _work(request).get(batch_id, owner))


@route("POST /v1/batches/{batch_id}/cancel", stateful=True, allow_head=False, ends_work=True)
async def cancel_batch(request: web.Request) -> web.Response:
    """POST /v1/batches/{batch_id}/cancel: end a batch; its results so far stay."""
    batch_id, owner = request.match_info["batch_id"], tenant_of(request).owner
    return reply(await _work(request).cancel(batch_id, owner))


def _work(request: web.Request) -> BatchWork:
    return request.app[WORK]


def _limit(request: web.Request, default: int, most: int) -> int:
    text = request.query.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit: must be from 1 to {most}, got {shown(text)}", param="limit")
    return int(text)


ROUTES = (
    upload,
    list_files,
    get_file,
    delete_file,
    file_content,
    create_batch,
    list_batches,
    get_batch,
    cancel_batch,
)
