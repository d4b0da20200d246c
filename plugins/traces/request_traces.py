"""Spans of HTTP requests, of the engine's requests and of their phases.

Names follow OpenTelemetry's conventions for HTTP servers and for generative AI; those of latencies
are vLLM's. A parent comes from the `traceparent` header, or from the caller's current span.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from ... import __version__
from ...core.errors import JackfieldError
from ...core.hooks import hookimpl
from ...core.outputs import PoolingRequestOutput, RequestOutput, RequestTimings
from ...core.pooling_params import PoolingParams
from ...core.sampling_params import SamplingParams

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPERATION = otel_context.create_key("jackfield-operation")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/api/generate": "chat",
}
"""Route → `gen_ai.operation.name` of its requests that generate text, if other than
`text_completion`."""
FLUSH_SECONDS = 5.0
"""How long a server that stops waits for the collector."""


class RequestTraces:
    """Exports spans from a thread of its own; at most 2048 wait, and further ones are dropped."""

    def __init__(self, exporter: SpanExporter, processor: SpanProcessor | None = None) -> None:
        """processor: instead of one that exports in batches."""
        name = os.environ.get("OTEL_SERVICE_NAME") or "jackfield"
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor or BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jackfield", __version__)
        self._model = ""

    # ------------------------------------------------------------ hooks

    @hookimpl
    def register_metrics(self, engine: Any) -> None:
        self._model = engine.served_model_names[0]

    @hookimpl
    def register_routes(self, app: web.Application) -> None:
        app.middlewares.append(self._traced)
        app.on_cleanup.append(self._flush)

    @hookimpl
    async def engine_stopping(self) -> None:
        await self._flush()

    @hookimpl
    def request_finished(
        self,
        output: RequestOutput | PoolingRequestOutput,
        params: SamplingParams | PoolingParams,
    ) -> None:
        # It runs in the caller's context, which has its span.
        times = output.timings
        clock = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return clock + int(seconds * 1e9)

        end = times.finished if times.finished is not None else time.monotonic()
        operation = str(otel_context.get_value(OPERATION) or "text_completion")
        if isinstance(output, PoolingRequestOutput):
            operation = "embeddings"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            kind=SpanKind.INTERNAL,
            start_time=at(times.arrival),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jackfield",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": output.request_id,
                "gen_ai.request.id": output.request_id,
                "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
                **_latencies(times, end),
            },
        )
        if isinstance(output, RequestOutput) and isinstance(params, SamplingParams):
            _describe(span, output, params)
        else:
            span.set_attribute("gen_ai.usage.input_tokens", len(output.prompt_token_ids))
        inside = set_span_in_context(span)
        for phase, first, last in _phases(times, end):
            child = self._tracer.start_span(phase, inside, start_time=at(first))
            child.end(at(last))
        span.end(at(end))

    # ------------------------------------------------------------ HTTP

    @web.middleware
    async def _traced(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if request.method != "POST" or resource is None:
            return await handler(request)
        route = resource.canonical
        span = self._tracer.start_span(
            f"POST {route}",
            extract(request.headers, Context()),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "url.path": request.path,
                "url.scheme": request.scheme,
            },
        )
        inside = set_span_in_context(span)
        operation = OPERATIONS.get(route)
        token = otel_context.attach(otel_context.set_value(OPERATION, operation, inside))
        try:
            response = await handler(request)
            _set_status(span, response.status)
            return response
        except JackfieldError as error:
            _set_status(span, error.status, type(error).__name__)
            raise
        except web.HTTPException as response:
            _set_status(span, response.status)
            raise
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            otel_context.detach(token)
            span.end()

    async def _flush(self, _: object = None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._provider.force_flush), FLUSH_SECONDS)


def _set_status(span: Span, status: int, error: str | None = None) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_attribute("error.type", error or str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _describe(span: Span, output: RequestOutput, params: SamplingParams) -> None:
    reasons = [completion.finish_reason or "" for completion in output.outputs]
    generated = sum(len(completion.token_ids) for completion in output.outputs)
    span.set_attribute("gen_ai.usage.input_tokens", output.num_prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", generated)
    span.set_attribute("gen_ai.response.finish_reasons", reasons)
    span.set_attribute("gen_ai.request.temperature", params.temperature)
    span.set_attribute("gen_ai.request.top_p", params.top_p)
    span.set_attribute("gen_ai.request.choice.count", params.n)
    if params.max_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
    if output.timings.num_preemptions:
        span.set_attribute("jackfield.num_preemptions", output.timings.num_preemptions)
    if "error" in reasons:
        span.set_attribute("error.type", type(output.failure()).__name__)
        span.set_status(Status(StatusCode.ERROR, output.error))


def _phases(times: RequestTimings, end: float) -> list[tuple[str, float, float]]:
    """Return names, beginnings and ends. A pooling request has no first token."""
    if times.first_scheduled is None:
        return [("queued", times.arrival, end)]
    phases = [("queued", times.arrival, times.first_scheduled)]
    if times.first_token is None or times.last_token is None:
        return [*phases, ("prefill", times.first_scheduled, end)]
    return [
        *phases,
        ("prefill", times.first_scheduled, times.first_token),
        ("decode", times.first_token, times.last_token),
    ]


def _latencies(times: RequestTimings, end: float) -> dict[str, float]:
    latencies = {"gen_ai.latency.e2e": end - times.arrival}
    if times.first_scheduled is not None:
        latencies["gen_ai.latency.time_in_queue"] = times.first_scheduled - times.arrival
    if times.first_token is not None:
        latencies["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrival
        if times.first_scheduled is not None:
            latencies["gen_ai.latency.time_in_model_prefill"] = (
                times.first_token - times.first_scheduled
            )
        if times.last_token is not None:
            latencies["gen_ai.latency.time_in_model_decode"] = times.last_token - times.first_token
    return latencies
