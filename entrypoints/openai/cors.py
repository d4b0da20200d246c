"""Cross-origin requests: which pages of other sites a browser lets talk to this server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_AGE = "600"
"""Seconds that a browser may remember a preflight's answer."""
EXPOSED = "X-Request-Id"


@dataclass(frozen=True)
class Cors:
    """Who may ask what. `*` stands for all; names of headers in any case."""

    origins: tuple[str, ...] = ()
    """None: no page of another site may read an answer."""
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False
    """Whether pages may send cookies and HTTP authentication of the browser's own."""

    def allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    def origin_headers(self, origin: str) -> dict[str, str]:
        """For any answer to a request from `origin`."""
        if not self.allows(origin):
            return {"Vary": "Origin"}
        every = "*" in self.origins and not self.credentials
        made = {"Access-Control-Allow-Origin": "*" if every else origin}
        if not every:
            made["Vary"] = "Origin"
        if self.credentials:
            made["Access-Control-Allow-Credentials"] = "true"
        return made

    def preflight(self, origin: str, method: str, headers: str) -> web.Response:
        """The answer to a browser that asks before it sends: 204, or 400 with what is refused."""
        asked = [name.strip().lower() for name in headers.split(",") if name.strip()]
        known = {name.lower() for name in self.headers}
        refused = []
        if not self.allows(origin):
            refused.append("origin")
        if "*" not in self.methods and method not in self.methods:
            refused.append("method")
        if "*" not in known and not known.issuperset(asked):
            refused.append("headers")
        made = self.origin_headers(origin)
        if refused:
            text = f"CORS: not allowed: {', '.join(refused)}"
            return web.Response(status=400, text=text, headers=made)
        made["Access-Control-Allow-Methods"] = method
        if asked:
            made["Access-Control-Allow-Headers"] = ", ".join(asked)
        made["Access-Control-Max-Age"] = MAX_AGE
        made["Vary"] = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
        return web.Response(status=204, headers=made)


def install(app: web.Application, cors: Cors) -> None:
    """Answer preflights before anything else looks at them, and mark every answer."""

    @web.middleware
    async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or origin is None or method is None:
            return await handler(request)
        return cors.preflight(
            origin, method, request.headers.get("Access-Control-Request-Headers", "")
        )

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and "Access-Control-Allow-Methods" not in response.headers:
            response.headers.update(cors.origin_headers(origin))
            if cors.allows(origin):
                response.headers["Access-Control-Expose-Headers"] = EXPOSED

    app.middlewares.insert(0, preflights)
    app.on_response_prepare.append(mark)
