"""The text of each type of content block, for a model that reads text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...core.errors import InvalidRequest, shown
from ...core.media.sources import MediaPart
from ..http.content_pieces import Piece

Block = dict[str, Any]
RESULT = "_tool_result"
"""Suffix of the types of server-run calls' results; they are in the assistant's content."""
SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_OPAQUE = ("encrypted_", "cache_control", "citations", "signature", "type")
"""Key prefixes of values that are not for the model."""


def block_text(block: Block, path: str) -> str | None:
    """Return the text of a block; None without any.

    Raises InvalidRequest with the block's path if it has content other than text.
    """
    kind = block["type"]
    if kind in SILENT:
        return None
    if kind not in TEXTS:
        raise InvalidRequest(
            f"{path}: {shown(kind)} blocks are not supported here",
            param=path,
        )
    return TEXTS[kind](block, path)


def text_of(block: Block, field: str, path: str) -> str:
    """Return a text field. Raises InvalidRequest."""
    if not isinstance(block.get(field), str):
        raise InvalidRequest(f"{path}.{field}: must be a text", param=f"{path}.{field}")
    return str(block[field])


def blocks_of(content: Any, path: str) -> list[Any]:
    """Return content as a list of blocks, validated as objects with a type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a text or a list of blocks", param=path)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(
                f"{path}[{index}]: must be an object with a type", param=f"{path}[{index}]"
            )
    return content


PICTURE = "image"


def picture(block: Block, path: str) -> MediaPart:
    """Return an image block as a part of a chat. Raises InvalidRequest."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    where = f"{path}.source"
    if isinstance(source, dict) and kind == "url":
        return MediaPart(text_of(source, "url", where), f"{where}.url", PICTURE)
    if not isinstance(source, dict) or kind != "base64":
        raise InvalidRequest(
            f"{where}: must be of type base64 or url, got {shown(kind)}; files are not kept here",
            param=where,
        )
    media_type, data = text_of(source, "media_type", where), text_of(source, "data", where)
    return MediaPart(f"data:{media_type};base64,{data}", f"{where}.data", PICTURE)


def pieces_of(content: Any, path: str) -> list[Piece]:
    """Return the texts and pictures of content. Raises InvalidRequest."""
    pieces: list[Piece] = []
    for index, block in enumerate(blocks_of(content, path)):
        where = f"{path}[{index}]"
        if block["type"] == PICTURE:
            pieces.append(picture(block, where))
        elif (text := block_text(block, where)) is not None:
            pieces.append(text)
    return pieces


def texts_of(content: Any, path: str) -> list[str]:
    blocks = blocks_of(content, path)
    texts = (block_text(block, f"{path}[{index}]") for index, block in enumerate(blocks))
    return [text for text in texts if text is not None]


def server_result(content: Any, path: str) -> str:
    """Return the text of a server-run call's result: JSON without opaque values. Raises
    InvalidRequest if nested too deep.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "\n".join(str(part.get("text")) for part in content)
    try:
        return json.dumps(_readable(content), ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{path}: is nested too deep", param=path) from None


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if not key.startswith(_OPAQUE)}
    return value


def _document(block: Block, path: str) -> str:
    """Return a document's title, context and text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise InvalidRequest(
            f"{path}: documents must have a source of type text or content, got {shown(kind)}; "
            "send a PDF's text, or its pages as pictures",
            param=path,
        )
    where = f"{path}.source"
    if kind == "text":
        texts = [text_of(source, "data", where)]
    else:
        texts = texts_of(source.get("content"), f"{where}.content")
    head = (block.get(name) for name in ("title", "context"))
    return "\n".join([*(text for text in head if isinstance(text, str)), *texts])


def _search_result(block: Block, path: str) -> str:
    head = [text_of(block, name, path) for name in ("title", "source")]
    return "\n".join([*head, *texts_of(block.get("content"), f"{path}.content")])


def _tool_reference(block: Block, path: str) -> str:
    return f"Tool that can be called now: {text_of(block, 'tool_name', path)}"


def _compaction(block: Block, path: str) -> str | None:
    return None if block.get("content") is None else text_of(block, "content", path)


TEXTS: dict[str, Callable[[Block, str], str | None]] = {
    "text": lambda block, path: text_of(block, "text", path),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
    "compaction": _compaction,
}
SILENT = frozenset(
    ("fallback", "mcp_tool_listing", "tool_addition", "tool_removal", "redacted_thinking")
)
"""Types of blocks that are not for the model, or readable only by the server that made them. All
tools are offered from the beginning, including those of `tool_addition`."""
