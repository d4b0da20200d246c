"""The server's part for files and batches: routes, store and batch manager."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from ..http.options import BatchOptions
from . import routes
from .manager import BatchWork
from .openapi import describe
from .routes import SETTINGS, STORE, WORK
from .store import Store


def add_batch_routes(
    app: web.Application, options: BatchOptions, *, work_here: bool = True
) -> None:
    """Add the routes, startup and cleanup.

    work_here: False if another process has the store, to which requests are forwarded.
    """
    describe()
    app[SETTINGS] = options
    app.add_routes(
        [
            web.post("/v1/files", routes.upload),
            web.get("/v1/files", routes.list_files, allow_head=False),
            web.get("/v1/files/{file_id}", routes.get_file, allow_head=False),
            web.delete("/v1/files/{file_id}", routes.delete_file),
            web.get("/v1/files/{file_id}/content", routes.file_content, allow_head=False),
            web.post("/v1/batches", routes.create_batch),
            web.get("/v1/batches", routes.list_batches, allow_head=False),
            web.get("/v1/batches/{batch_id}", routes.get_batch, allow_head=False),
            web.post("/v1/batches/{batch_id}/cancel", routes.cancel_batch),
        ]
    )
    if not work_here:
        return
    app[STORE] = Store(options.folder, options.max_store_bytes)
    app.cleanup_ctx.append(_working)


async def _working(app: web.Application) -> AsyncIterator[None]:
    store, options = app[STORE], app[SETTINGS]
    await store.start()
    try:
        work = app[WORK] = BatchWork(app, store, options)
        await work.resume()
        yield
        await work.close()
    finally:
        await store.shut()
