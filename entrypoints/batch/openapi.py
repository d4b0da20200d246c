"""OpenAPI descriptions of the file and batch routes, in each handler's attribute `openapi`, with
types in place of schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import routes
from .schemas import Batch, CreateBatch, FileObject

JSON = "application/json"
TEXT = {"type": "string"}
AFTER = {"name": "after", "in": "query", "schema": TEXT, "description": "Begin after this id"}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
DELETED = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {"id": TEXT, "object": {"const": "file"}, "deleted": {"type": "boolean"}},
}
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


def describe() -> None:
    _put(routes.upload, FileObject, body=("multipart/form-data", FORM), errors=(400, 408, 413, 415))
    _put(
        routes.list_files, _page(FileObject), errors=(400, 404),
        query=[AFTER, _limit(10_000), _choice("order", "asc", "desc"), _choice("purpose")],
    )  # fmt: skip
    _put(routes.get_file, FileObject, errors=(404,))
    _put(routes.delete_file, DELETED, errors=(404, 409))
    _put(routes.file_content, TEXT, errors=(404,), kind="application/octet-stream")
    _put(
        routes.create_batch,
        Batch,
        body=(JSON, CreateBatch),
        errors=(400, 404, 408, 409, 413, 415, 503),
    )
    _put(routes.list_batches, _page(Batch), query=[AFTER, _limit(100)], errors=(400, 404))
    _put(routes.get_batch, Batch, errors=(404,))
    _put(routes.cancel_batch, Batch, errors=(404, 409))


def _put(
    handler: Callable[..., Any],
    response: Any,
    *,
    errors: tuple[int, ...],
    body: tuple[str, Any] | None = None,
    query: list[Any] | None = None,
    kind: str = JSON,
) -> None:
    operation: dict[str, Any] = {
        "tags": ["files and batches"],
        "summary": (handler.__doc__ or "").partition(": ")[2].rstrip(".").capitalize(),
        "responses": {
            "200": {"description": "Done", "content": {kind: {"schema": response}}},
            **{
                str(status): {"description": "Refused", "content": {JSON: {"schema": ERROR}}}
                for status in (*errors, 500)
            },
        },
    }
    if query is not None:
        operation["parameters"] = query
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {body[0]: {"schema": body[1]}}}
    handler.openapi = operation  # type: ignore[attr-defined]


def _page(kind: type) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": kind},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
    }


def _limit(most: int) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 1, "maximum": most}
    return {"name": "limit", "in": "query", "schema": schema}


def _choice(name: str, *values: str) -> dict[str, Any]:
    schema = {"type": "string", "enum": [*values]} if values else TEXT
    return {"name": name, "in": "query", "schema": schema}
