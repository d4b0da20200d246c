"""The aiohttp application: routes, authentication, errors in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, JackfieldError, RequestFailed
from ..anthropic.routes import add_messages
from ..batch.app import add_batch_routes
from ..http import request_log
from ..http.auth.tenants import TENANCY, Tenancy, authentication
from ..http.auth.usage import USAGE, Usage, within_limits
from ..http.concurrency_limit import limit_concurrency, limit_waiting
from ..http.connections import SERVER_NAME, BodyTooSlow
from ..http.context import (
    DOCUMENT,
    ENGINE,
    OPTIONS,
    error_reply,
)
from ..http.cross_origin import cors
from ..http.cross_origin import cross_site as sites
from ..http.dialect_errors import in_dialect
from ..http.inflight import IN_FLIGHT, InFlightCounts, count_in_flight, server_load
from ..http.log_format import LoggedText
from ..http.options import ServerOptions
from ..http.request_pacing import PACER, RequestPacer, pace_requests
from ..http.routing import ROUTES, Routes, add_routes
from ..ollama.routes import add_ollama
from ..openai.audio.realtime import add_realtime
from ..openai.audio.routes import add_audio
from ..openai.chat.routes import chat_completions
from ..openai.completions.routes import completions
from ..openai.invocations import invocations
from ..openai.pooling.cohere import cohere_embed
from ..openai.pooling.embeddings import embeddings
from ..openai.pooling.routes import classify, pooling
from ..openai.pooling.scoring import rerank, score
from ..openai.responses.routes import add_responses
from ..web.page import PLAYGROUND, TRY, add_page
from . import docs_page, stateful_proxy
from .admin import add_admin_routes
from .frontend_metrics import FrontendMetrics
from .health import add_health
from .http_metrics import HttpMetrics, observe_requests
from .info_routes import (
    detokenize,
    metrics,
    model,
    models,
    tokenize,
    tokenizer_info,
    version,
)
from .plugin_list import add_plugin_list
from .plugin_routes import add_plugin_routes, owner
from .route_hints import hint

logger = logging.getLogger("jackfield.server")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: AsyncEngine, options: ServerOptions | None = None, host: str | None = None
) -> web.Application:
    """Return an application with all routes over a started engine; plugins' come last.

    host: where it will listen; None: at a Unix socket, or unknown.
    """
    options = options or ServerOptions()
    app = web.Application(
        middlewares=[in_dialect, _errors, authentication, count_in_flight, pace_requests],
        client_max_size=options.max_body_bytes,
    )
    app[ROUTES] = Routes()
    app[ENGINE] = engine
    app[OPTIONS] = options
    app[TENANCY] = Tenancy(options, engine.plugins)
    in_flight = app[IN_FLIGHT] = InFlightCounts(engine)
    if options.num_fronts > 1:
        metrics_of_front = FrontendMetrics(options.front, lambda: in_flight.received)
        engine.metrics_registry.register(metrics_of_front)
    app[PACER] = RequestPacer()
    usage = app[USAGE] = Usage(options.num_fronts, options.front, options.usage_at)
    app.on_cleanup.append(_closing(usage))
    app[DOCUMENT] = {}
    add_routes(
        app, models, model, completions, chat_completions, embeddings, pooling, classify, score,
        rerank, cohere_embed, invocations, tokenize, detokenize, server_load, version, metrics,
    )  # fmt: skip
    add_routes(
        app, tokenizer_info, needs={"--enable-tokenizer-info-endpoint": options.tokenizer_info}
    )
    add_health(app)
    add_audio(app)
    add_realtime(app)
    add_responses(app)
    add_plugin_list(app)
    add_admin_routes(app)
    add_batch_routes(app, options.batches, work_here=options.kept_at is None)
    if options.playground:
        add_page(app, PLAYGROUND)
    if options.docs:
        add_routes(app, docs_page.openapi_json, docs_page.docs)
        add_page(app, TRY)
    _check_sites(app, host)
    app.on_response_prepare.append(_tell_server)
    if options.request_id_headers:
        app.on_response_prepare.append(_tell_request_id)
    add_messages(app)
    add_ollama(app, root=not options.playground)
    app.middlewares.append(within_limits)
    if options.max_concurrency is not None:
        app.middlewares.append(limit_concurrency(options.max_concurrency))
    has_limit = options.max_concurrency or engine.config.max_waiting_requests
    if options.max_waiting or (options.max_waiting is None and not has_limit):
        batches, slots = options.batches, engine.config.max_num_seqs
        num_batched = 0 if batches is None else batches.max_concurrency or slots // 2
        app.middlewares.append(limit_waiting(options.max_waiting, num_batched))
    most_logprobs = max(options.max_live_logprobs, engine.config.max_logprobs_per_request)
    engine.limit_logprobs(most_logprobs if options.max_live_logprobs else None)
    if options.log_requests:
        app.middlewares.append(
            request_log.log_bodies(LoggedText(options.max_log_len, options.log_redact))
        )
    if options.kept_at is not None:
        app.middlewares.append(stateful_proxy.forward_to(options.kept_at))
    if options.keeps_at is not None:
        app.cleanup_ctx.append(stateful_proxy.serve_stateful(options.keeps_at, _errors))
    if options.cors.origins:
        cors.install(app, options.cors)
    add_plugin_routes(app, engine)
    http_metrics = HttpMetrics()
    app.cleanup_ctx.append(http_metrics.serve)
    kind = request_log.lines_of(options.access_log, options.access_log_except)
    lines = None if kind is None else kind(request_log.access, "")
    app.middlewares.insert(0, observe_requests(http_metrics, lines))
    return app


def _closing(usage: Usage) -> Callable[[web.Application], Awaitable[None]]:
    async def close(_: web.Application) -> None:
        usage.close()

    return close


def _check_sites(app: web.Application, host: str | None) -> None:
    """Add checks against other sites' pages, if no key is required."""
    options = app[OPTIONS]
    keyless = not app[TENANCY].required
    hosts = options.allowed_hosts
    if hosts is None:
        hosts = sites.default_hosts(host) if keyless and host is not None else ("*",)
    after_errors = app.middlewares.index(_errors) + 1
    if keyless and host is not None:
        app.middlewares.insert(after_errors, sites.check_origin(options.cors))
    if "*" not in hosts:
        app.middlewares.insert(after_errors, sites.check_host(hosts))


async def _tell_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME


async def _tell_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set the request id header, the caller's or a new one, on every response."""
    response.headers["X-Request-Id"] = request_log.id_of(request)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except JackfieldError as error:
        return error_reply(error)
    except web.HTTPRequestEntityTooLarge as refusal:
        return _refusal(413, f"the body is too large: {refusal.text}")
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise
        more = hint(request) if refusal.status == 404 else ""
        message = f"{request.method} {request.path}: {refusal.reason}{more}"
        response = _refusal(refusal.status, message)
        if "Allow" in refusal.headers:
            response.headers["Allow"] = refusal.headers["Allow"]
        return response
    except BodyTooSlow as error:
        return _refusal(408, f"the body did not come in time: {error}")
    except web.RequestPayloadError as error:
        return _refusal(400, f"the body cannot be read: {' '.join(str(error).split())}")
    except (ConnectionError, TimeoutError):
        raise
    except Exception:
        plugin = owner(request)
        of = "" if plugin is None else f" in a route of plugin {plugin}"
        logger.exception("%s %s failed%s", request.method, request.path, of)
        return error_reply(RequestFailed("the server failed on this request"))


def _refusal(status: int, message: str) -> web.Response:
    return error_reply(InvalidRequest(message), status)
