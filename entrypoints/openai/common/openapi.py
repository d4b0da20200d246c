"""The OpenAPI document of an application, from its routes and the Structs that decode requests.

A handler's attribute `openapi` is an OpenAPI 3.1 operation, in which types (with a msgspec schema)
may replace schemas.

    async def hello(request): ...
    hello.openapi = {"summary": "Say hello", "responses": {"200": {"description": "Hello"}}}

Our own handlers use `documented`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from .... import __version__
from ...http.routing import NO_ROUTE, ROUTES
from .response_schemas import ErrorResponse

F = TypeVar("F", bound=Callable[..., Any])
REFERENCE = "#/components/schemas/{name}"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
ERRORS = {
    400: "A field is wrong: `param` names it",
    401: "No API key, or a wrong one",
    403: "This key may not do that",
    404: "A model that is not served, or nothing by that name",
    408: "The body did not come in time",
    413: "The body is too large, or has too many values",
    415: "The body is not JSON by its Content-Type, or is packed in an unknown way",
    429: "The key has used up what it may use for now: Retry-After says when to try again",
    500: "This request failed",
    501: "Not supported (yet)",
    503: "Too many requests, or the engine is stopping or has failed",
}
EVENTS = "With `stream`: server-sent events; an error after the first one comes as an event"
LINES = "With `stream`, the default: a line of JSON each; an error after the first comes as a line"
JSON = (dict, list, tuple, str, int, float, bool, type(None))
"""Types of JSON values; others stand for a schema."""


class DialectError:
    """Stands for an error's body in the form of the route's dialect."""


def documented(
    tag: str,
    *,
    request: Any = None,
    response: Any = None,
    event: Any = None,
    errors: tuple[int, ...] = (),
    content_type: str = "application/json",
    ends_with_done: bool = True,
    in_lines: bool = False,
) -> Callable[[F], F]:
    """Return a decorator that describes a handler; its docstring becomes the summary.

    request, response, event: types of bodies and of a stream's events; errors: statuses of ERRORS,
    besides those of every route with a body or a key; ends_with_done: a stream ends with
    `data: [DONE]`; in_lines: it has a JSON object per line instead of server-sent events.
    """

    def decorate(handler: F) -> F:
        operation = {"tags": [tag], **_description(handler)}
        success: dict[str, Any] = {"description": "Done"}
        if response is not None:
            success["content"] = {content_type: {"schema": response}}
        if event is not None and in_lines:
            success["description"] = f"Done. {LINES}"
            success["content"]["application/x-ndjson"] = {
                "schema": {"anyOf": [event, DialectError]}
            }
        elif event is not None:
            ending = ", and the last is `data: [DONE]`" if ends_with_done else ""
            success["description"] = f"Done. {EVENTS}{ending}"
            success["content"]["text/event-stream"] = {"schema": _event(event, ends_with_done)}
        statuses = set(errors) | {500}
        if request is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": request}},
            }
            statuses |= {400, 404, 408, 413, 415, 501, 503}
        refusals = {str(status): _error(status) for status in sorted(statuses)}
        operation["responses"] = {"200": success} | refusals
        handler.openapi = operation  # type: ignore[attr-defined]
        return handler

    return decorate


def internal(handler: F) -> F:
    """Exclude a handler from the document."""
    handler.openapi = None  # type: ignore[attr-defined]
    return handler


def document(app: web.Application, *, root_path: str = "", keys: bool = False) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of `app`'s current routes.

    keys: routes that are not keyless require a bearer key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in routes(app):
        description = getattr(handler, "openapi", _undocumented(handler))
        if description is None:
            continue
        info = app[ROUTES].served.get((method, path), NO_ROUTE)
        operation = copy.copy(description)
        operation["operationId"] = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
        names = re.findall(r"{(\w+)}", path)
        if names:
            operation["parameters"] = [
                *_missing(names, operation),
                *description.get("parameters", ()),
            ]
        responses = operation["responses"]
        if info.manages_engine:
            responses = responses | {"403": _error(403)}
        if keys and not info.keyless:
            operation["security"] = [{"key": []}]
            responses = responses | {"401": _error(401)}
        operation["responses"] = responses
        operation = _with_errors(operation, info.dialect.error or ErrorResponse)
        paths.setdefault(path, {})[method.lower()] = operation
    types = list(_types(paths))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    openapi: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Jackfield",
            "version": __version__,
            "description": "OpenAI's protocol, with some fields of vLLM's.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": _filled(paths, iter(schemas)),
        "components": {"schemas": components},
    }
    if keys:
        openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return openapi


def routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    """Yield (method, path, handler) by registration, without HEAD and OPTIONS."""
    for route in app.router.routes():
        if route.method in METHODS and route.resource is not None:
            yield route.method, route.resource.canonical, route.handler


def summary_of(handler: Any) -> str:
    """Return what a handler's route is for, in a line."""
    operation = getattr(handler, "openapi", None) or _description(handler)
    summary: str = operation["summary"]
    return summary


def _error(status: int) -> dict[str, Any]:
    text = ERRORS.get(status) or HTTPStatus(status).phrase
    return {"description": text, "content": {"application/json": {"schema": DialectError}}}


def _with_errors(value: Any, error: Any) -> Any:
    """Return an operation with a type in place of DialectError."""
    if isinstance(value, list | tuple):
        return [_with_errors(part, error) for part in value]
    if isinstance(value, dict):
        return {key: _with_errors(part, error) for key, part in value.items()}
    return error if value is DialectError else value


def _event(kind: Any, ends_with_done: bool) -> dict[str, Any]:
    """Return the schema of a parsed server-sent event."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [kind, DialectError]},
    }
    datas = (data, {"const": "[DONE]"}) if ends_with_done else (data,)
    events = [{"properties": {"data": data}} for data in datas]
    return {"type": "object", "required": ["data"], "anyOf": events}


def _description(handler: Any) -> dict[str, Any]:
    first, _, description = (inspect.getdoc(handler) or handler.__name__).partition("\n\n")
    text = re.sub(r"^((?:GET|POST|PUT|PATCH|DELETE|/)[\w/{}.]*(?:,| and)? ?)+:? *", "", first)
    text = " ".join((text or first).split()).rstrip(".")
    operation = {"summary": text[:1].upper() + text[1:]}
    if description:
        operation["description"] = description
    return operation


def _undocumented(handler: Any) -> dict[str, Any]:
    return {
        "tags": ["others"],
        **_description(handler),
        "responses": {"default": {"description": "Not described by the plugin that answers"}},
    }


def _missing(names: list[str], operation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the path parameters that the operation lacks."""
    parameters = {
        parameter["name"]
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "path"
    }
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
        if name not in parameters
    ]


def _types(value: Any) -> Iterator[Any]:
    """Yield the types that stand for schemas, in `_filled`'s order."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _types(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _types(part)
    elif not isinstance(value, JSON):
        yield value


def _filled(value: Any, schemas: Iterator[dict[str, Any]]) -> Any:
    if isinstance(value, list | tuple):
        return [_filled(part, schemas) for part in value]
    if isinstance(value, dict):
        return {key: _filled(part, schemas) for key, part in value.items()}
    return value if isinstance(value, JSON) else next(schemas)
