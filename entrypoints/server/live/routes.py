"""Routes that pause the engine and change its weights, only with `--enable-admin`.

vLLM's routes and SGLang's, over the same jobs (`core/live/engine_jobs.py`), for those who may
(`TenantLimits.manages_engine`). What changes state is a POST.
"""

from __future__ import annotations

from aiohttp import web

from . import sglang_routes, vllm_routes
from .surface import for_managers


def add_live_routes(app: web.Application) -> None:
    for handler in (*vllm_routes.POSTS, *sglang_routes.POSTS):
        app.router.add_post(f"/{handler.__name__}", for_managers(handler))
    for handler in vllm_routes.GETS:
        app.router.add_get(f"/{handler.__name__}", for_managers(handler), allow_head=False)
