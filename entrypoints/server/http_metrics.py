"""Requests by route and status, as in prometheus-fastapi-instrumentator (vLLM's)."""

from __future__ import annotations

import bisect
import collections
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ..http.auth.tenants import route_of
from ..http.context import ENGINE
from ..http.request_log import CLIENT_LEFT, Lines, begin, client_has_left, has_been_left, watch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECONDS = (0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
"""Bounds of `http_request_duration_seconds`."""
UNKNOWN = "none"
"""`handler` of paths without a route."""
OTHER = "other"
"""`method` of methods without a route."""


class HttpMetrics:
    """A `prometheus_client` collector of requests by route, method and class of status.

    Labels come from the server, never clients. Those of counts exist from the start, so that no
    first request is missed.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[tuple[str, str], list[int]] = {}
        """Route and method → requests by the first of SECONDS that was enough."""
        self._seconds: dict[tuple[str, str], float] = collections.defaultdict(float)

    def add_routes(self, app: web.Application) -> None:
        for route in app.router.routes():
            if route.resource is not None and route.method in METHODS:
                for status in ("2xx", "4xx", "5xx"):
                    self._counts[route.resource.canonical, route.method, status] += 0
        for method in (*METHODS, OTHER):
            self._counts[UNKNOWN, method, "4xx"] += 0

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an ended request. route: "" without a match."""
        if route and method in METHODS:
            durations = self._durations.setdefault((route, method), [0] * (len(SECONDS) + 1))
            durations[bisect.bisect_left(SECONDS, seconds)] += 1
            self._seconds[route, method] += seconds
        method = method if method in METHODS else OTHER
        self._counts[route or UNKNOWN, method, f"{status // 100}xx"] += 1

    def describe(self) -> Iterable[Metric]:
        return [*self._describe()]

    def _describe(self) -> tuple[CounterMetricFamily, HistogramMetricFamily]:
        return (
            CounterMetricFamily(
                "http_requests",
                "HTTP requests by route, method and class of status; 4xx are also those whose "
                "client left.",
                labels=["handler", "method", "status"],
            ),
            HistogramMetricFamily(
                "http_request_duration_seconds",
                "Seconds from a request's head to the end of its response, by route and method.",
                labels=["handler", "method"],
            ),
        )

    def collect(self) -> Iterable[Metric]:
        requests, durations = self._describe()
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        for place, counts in self._durations.items():
            below = itertools.accumulate(counts)
            bounds = [*map(floatToGoString, SECONDS), "+Inf"]
            durations.add_metric(place, list(zip(bounds, below, strict=True)), self._seconds[place])
        return [requests, durations]

    async def serve(self, app: web.Application) -> AsyncIterator[None]:
        """Show the metric among the engine's; for `Application.cleanup_ctx`."""
        self.add_routes(app)
        registry = app[ENGINE].metrics_registry
        registry.register(self)
        yield
        registry.unregister(self)


def observe_requests(
    metrics: HttpMetrics, lines: Lines | None
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the first middleware, which counts requests, and logs those whose clients left.

    lines: the access log, if any.
    """

    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        start, status = time.monotonic(), 500
        begin(request)
        if lines is not None:
            watch(request)
        try:
            response = await handler(request)
            status = response.status
            left = has_been_left(request)
            return response
        except web.HTTPException as response:
            status, left = response.status, False
            raise
        except BaseException:
            left = client_has_left(request)
            raise
        finally:
            seconds = time.monotonic() - start
            status = CLIENT_LEFT if left else status
            metrics.count(route_of(request), request.method, status, seconds)
            if left and lines is not None:
                lines.log_left(request, seconds)

    return observed
