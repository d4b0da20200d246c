"""Routes for operators, only with `--enable-admin`."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from ... import __version__
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest
from ..flags.secrets import without_secrets
from ..http.auth.tenants import check_manages_engine
from ..http.context import ENGINE, OPTIONS, reply
from ..http.routing import add_routes, route
from ..openai.common.openapi import documented
from .adapter_routes import add_adapter_routes
from .live.routes import add_live_routes
from .live.surface import NoOptions, options_of


class CacheInUse(InvalidRequest):
    """Running requests use cached blocks."""

    status = 409


class ResetOptions(msgspec.Struct):
    reset_running_requests: bool = False
    reset_external: bool = False
    """vLLM's: also what a KV connector has."""


class ProfileOptions(msgspec.Struct):
    """None; other fields have no effect, as benchmarks of vLLM send those of a completion."""

    UNSUPPORTED = dict.fromkeys(
        ("profile_prefix", "delay_iterations", "max_iterations", "output_dir", "start_step",
         "num_steps", "activities", "profile_by_stage", "with_stack", "record_shapes",
         "profile_stages"),
        "a profile has all from here to POST /stop_profile; where, say --profiler-config.*",
    )  # fmt: skip


def add_admin_routes(app: web.Application) -> None:
    needs = {"--enable-admin": app[OPTIONS].enable_admin}
    add_routes(
        app, reset_prefix_cache, compact_kv_cache, start_profile, stop_profile, server_info,
        needs=needs,
    )  # fmt: skip
    add_live_routes(app, needs)
    add_adapter_routes(app, needs | {"--enable-lora": app[ENGINE].config.enable_lora})


@route("POST /reset_prefix_cache")
@documented("admin", request=ResetOptions, response=dict[str, bool], errors=(409,))
async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: forget cached prefixes.

    409 while requests run, unless `reset_running_requests=true`, in the query or a JSON body, lets
    them be computed again.
    """
    options = await options_of(request, ResetOptions)
    again = options.reset_running_requests
    if again:
        check_manages_engine(request)
    if options.reset_external and request.app[ENGINE].config.kv_transfer_config is not None:
        raise InvalidRequest(
            "reset_external: what a KV connector has is not forgotten here", param="reset_external"
        )
    if not await request.app[ENGINE].reset_prefix_cache(again):
        raise CacheInUse("the prefix cache is in use by running requests; nothing was forgotten")
    return reply({"success": True})


@route("POST /compact_kv_cache")
@documented("admin", response=dict[str, int], errors=(400,))
async def compact_kv_cache(request: web.Request) -> web.Response:
    """POST /compact_kv_cache: compact the caches of running requests with their next steps.

    Those where blocks come back; `requests` is their number. 400 without kv_compression.
    """
    await options_of(request, NoOptions)
    return reply({"requests": await request.app[ENGINE].compact_kv_cache()})


@route("POST /start_profile")
@documented("admin", errors=(400,))
async def start_profile(request: web.Request) -> web.Response:
    """POST /start_profile: trace the step loop, the worker and the device."""
    await options_of(request, ProfileOptions, ignores_others=True)
    await request.app[ENGINE].start_profile()
    return web.Response()


@route("POST /stop_profile")
@documented("admin", response=dict[str, Any], errors=(400,))
async def stop_profile(request: web.Request) -> web.Response:
    """POST /stop_profile: end a profile, and name the files that it is in."""
    await options_of(request, ProfileOptions, ignores_others=True)
    return reply({"traces": await request.app[ENGINE].stop_profile()})


@route("GET /server_info", allow_head=False)
@documented("admin", response=dict[str, Any])
async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: the engine's resolved options, without secrets, and its device."""
    engine = request.app[ENGINE]
    return reply(
        {
            "version": __version__,
            "config": without_secrets(msgspec.to_builtins(engine.config)),
            "architecture": engine.model_config.architecture,
            "device": engine.info.device,
            "dtype": engine.info.dtype,
            "attention_backend": engine.info.attention_backend,
            "num_blocks": engine.info.num_blocks,
            "vllm_config": _as_vllm(engine),
        }
    )


def _as_vllm(engine: AsyncEngine) -> dict[str, Any]:
    """Return what trainers read of vLLM's configuration."""
    config, device = engine.config, engine.info.device
    return {
        "model_config": {
            "model": config.model,
            "dtype": f"torch.{engine.info.dtype.removeprefix('torch.')}",
            "max_model_len": engine.model_config.max_model_len,
            "logprobs_mode": config.logprobs_mode,
            "max_logprobs": config.max_logprobs,
            "seed": config.seed,
        },
        "parallel_config": {
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
            "data_parallel_size": config.data_parallel_size,
        },
        "lora_config": (
            {"max_lora_rank": config.max_lora_rank, "max_loras": config.max_loras}
            if config.enable_lora
            else None
        ),
        "weight_transfer_config": {"backend": "nccl" if device.startswith("cuda") else "gloo"},
    }
