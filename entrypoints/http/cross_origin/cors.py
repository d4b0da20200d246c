"""Cross-origin requests: which other sites' pages may use this server from a browser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ..options import Cors

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_AGE = "600"
"""Seconds for caching a preflight's response."""
EXPOSED = "X-Request-Id"


def origin_headers(cors: Cors, origin: str) -> dict[str, str]:
    """Return the headers of responses to `origin`."""
    if not cors.allows(origin):
        return {"Vary": "Origin"}
    every = "*" in cors.origins and not cors.credentials
    headers = {"Access-Control-Allow-Origin": "*" if every else origin}
    if not every:
        headers["Vary"] = "Origin"
    if cors.credentials:
        headers["Access-Control-Allow-Credentials"] = "true"
    return headers


def preflight(cors: Cors, origin: str, method: str, headers: str) -> web.Response:
    """Respond to a preflight: 204, or 400 with the refused part."""
    names = [name.strip().lower() for name in headers.split(",") if name.strip()]
    header_names = {name.lower() for name in cors.headers}
    problems = []
    if not cors.allows(origin):
        problems.append("origin")
    if "*" not in cors.methods and method not in cors.methods:
        problems.append("method")
    if "*" not in header_names and not header_names.issuperset(names):
        problems.append("headers")
    response_headers = origin_headers(cors, origin)
    if problems:
        text = f"CORS: not allowed: {', '.join(problems)}"
        return web.Response(status=400, text=text, headers=response_headers)
    response_headers["Access-Control-Allow-Methods"] = method
    if names:
        response_headers["Access-Control-Allow-Headers"] = ", ".join(names)
    response_headers["Access-Control-Max-Age"] = MAX_AGE
    response_headers["Vary"] = (
        "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
    )
    return web.Response(status=204, headers=response_headers)


def install(app: web.Application, cors: Cors) -> None:
    """Answer preflights before other middlewares, and add headers to every response."""

    @web.middleware
    async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or origin is None or method is None:
            return await handler(request)
        names = request.headers.get("Access-Control-Request-Headers", "")
        return preflight(cors, origin, method, names)

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and "Access-Control-Allow-Methods" not in response.headers:
            response.headers.update(origin_headers(cors, origin))
            if cors.allows(origin):
                response.headers["Access-Control-Expose-Headers"] = EXPOSED

    app.middlewares.insert(0, preflights)
    app.on_response_prepare.append(mark)
