"""The server's part for files and batches: routes, store and batch manager."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from ..http.options import BatchOptions
from ..http.routing import add_routes
from . import routes
from .manager import BatchWork
from .openapi import describe
from .routes import SETTINGS, STORE, WORK
from .store import Store


def add_batch_routes(
    app: web.Application, options: BatchOptions | None, *, work_here: bool = True
) -> None:
    """Add the routes, startup and cleanup. options: None without batches.

    work_here: False if another process has the store, to which requests are forwarded.
    """
    describe()
    add_routes(app, *routes.ROUTES, needs={"--batch-dir": options is not None})
    if options is None:
        return
    app[SETTINGS] = options
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
