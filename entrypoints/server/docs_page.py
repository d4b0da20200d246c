"""GET /openapi.json and GET /docs: the server's routes, for programs and for people.

The page is plain HTML from the document, without scripts; its buttons lead to /docs/try
(`entrypoints/web/try.js`).
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from aiohttp import web

from ..http.auth.tenants import TENANCY
from ..http.context import DOCUMENT, OPTIONS, encoder
from ..http.routing import route
from ..openai.common.openapi import document, internal

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --link: light-dark(#06c, #7bf) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem } h2::first-letter { text-transform: uppercase }
a { color: var(--link) } code { font: 0.9em ui-monospace, monospace }
details { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0 }
summary { cursor: pointer; padding: 0.5rem 0.75rem } details > div { padding: 0 0.75rem 0.75rem }
summary b { display: inline-block; min-width: 4rem } summary span { opacity: 0.75 }
div.table { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem }
th, td { border-bottom: 1px solid var(--line) } pre { white-space: pre-wrap }
details td:first-child { width: 1%; white-space: nowrap }
form { margin-top: 0.75rem }
section:target { background: var(--soft) }
"""


@route("GET /openapi.json", keyless=True)
@internal
async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json: the OpenAPI document of every route."""
    body = encoder.encode(_document(request))
    return web.Response(body=body, content_type="application/json")


@route("GET /docs", keyless=True)
@internal
async def docs(request: web.Request) -> web.Response:
    """GET /docs: the OpenAPI document as a page."""
    return web.Response(text=page(_document(request)), content_type="text/html", headers=HEADERS)


def _document(request: web.Request) -> dict[str, Any]:
    """Return the document, created at the first request, after plugins' routes."""
    cached = request.app[DOCUMENT]
    if not cached:
        options = request.app[OPTIONS]
        openapi = document(
            request.app,
            root_path=options.root_path,
            keys=request.app[TENANCY].required,
        )
        cached.update(openapi)
    return cached


def page(openapi: dict[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            (tag, *_) = operation.get("tags") or ["others"]
            groups.setdefault(tag, []).append(_operation(method, path, operation))
    info = openapi["info"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<p>{escape(info['description'])} For programs: "
        '<a href="openapi.json">openapi.json</a>.</p>',
    ]
    for tag, operations in groups.items():
        parts += [f"<h2>{escape(tag)}</h2>", *operations]
    parts.append("<h2>Objects</h2>")
    for name, schema in openapi["components"]["schemas"].items():
        parts.append(
            f'<section id="{escape(name)}"><h3>{escape(name)}</h3>'
            f"<p>{escape(schema.get('description', ''))}</p>{_fields(schema)}</section>"
        )
    return "".join([*parts, "</main></body></html>\n"])


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = []
    for body in operation.get("requestBody", {}).get("content", {}).values():
        rows.append(["Body", _type(body["schema"])])
    for parameter in operation.get("parameters", ()):
        text = f"<code>{escape(parameter['name'])}</code>: {_type(parameter.get('schema', {}))}"
        rows.append([f"In the {escape(parameter['in'])}", text])
    for status, response in operation["responses"].items():
        parts = [escape(response.get("description", ""))]
        for kind, content in response.get("content", {}).items():
            parts.append(f"<code>{escape(kind)}</code>: {_type(content.get('schema', {}))}")
        rows.append([escape(status), "<br>".join(parts)])
    if operation.get("security"):
        rows.append(["Key", "<code>Authorization: Bearer KEY</code>"])
    about = operation.get("description", "")
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"<span>{escape(operation.get('summary', ''))}</span></summary><div>"
        + (f"<pre>{escape(about)}</pre>" if about else "")
        + _table([], rows)
        + _try(method, path, operation)
        + "</div></details>"
    )


def _try(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return a button for trying a route; none for bodies other than JSON."""
    kinds = operation.get("requestBody", {}).get("content", {})
    if kinds and "application/json" not in kinds:
        return ""
    return (
        '<form action="docs/try"><button name="operation" '
        f'value="{escape(f"{method} {path}")}">Try it</button></form>'
    )


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else ""
        if field.get("default") is not None:
            default = f"<code>{escape(encoder.encode(field['default']).decode())}</code>"
        about = escape(field.get("description", ""))
        rows.append([f"<code>{escape(name)}</code>", _type(field), default, about])
    return _table(["field", "type", "default", ""], rows) if rows else ""


def _type(schema: dict[str, Any]) -> str:
    """Describe a schema briefly, with links."""
    return " or ".join(dict.fromkeys(_words(schema))) or "anything"


def _words(schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        yield f'<a href="#{name}">{name}</a>'
    for part in schema.get("anyOf", ()):
        yield from _words(part)
    if "properties" in schema:
        yield from (_type(part) for part in schema["properties"].values())
    if "const" in schema:
        yield f"<code>{escape(str(schema['const']))}</code>"
    if "contentSchema" in schema:
        yield from _words(schema["contentSchema"])
        return
    if "enum" in schema:
        yield from (f"<code>{escape(encoder.encode(v).decode())}</code>" for v in schema["enum"])
    elif schema.get("type") == "array":
        inner = schema.get("items")
        yield f"list of {_type(inner)}" if inner else "list"
    elif isinstance(schema.get("additionalProperties"), dict):
        yield f"object of {_type(schema['additionalProperties'])}"
    elif "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield from (escape(kind) for kind in kinds)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [
        "<tr>" + "".join(f"<{cell}>{text}</{cell}>" for text in row) + "</tr>"
        for cell, some in (("th", [head] if head else []), ("td", rows))
        for row in some
    ]
    return f'<div class="table"><table>{"".join(lines)}</table></div>'
