"""Routes that pause the engine and change its weights, only with `--enable-admin`.

vLLM's routes and SGLang's, over the same jobs (`core/live/engine_jobs.py`), for those who may
(`TenantLimits.manages_engine`). What changes state is a POST.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from ...http.routing import add_routes
from . import sglang_routes, vllm_routes


def add_live_routes(app: web.Application, needs: Mapping[str, bool]) -> None:
    add_routes(app, *vllm_routes.ROUTES, *sglang_routes.ROUTES, needs=needs)
