"""Builds a message's content blocks from parser events, as stream events, or folded into one
message.
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from ...core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ..openai.chat.call_arguments import as_object

Event = dict[str, Any]
TEXTS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""Type of a block → field with its deltas' text."""
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def tool_use_id() -> str:
    """Return an id for a call without one."""
    return f"toolu_{uuid.uuid4().hex}"


class ContentBlocks:
    """Growing content blocks, one open at a time."""

    def __init__(
        self, new_id: Callable[[], str] = tool_use_id, *, show_thinking: bool = True
    ) -> None:
        self._new_id = new_id
        self._show_thinking = show_thinking
        self._count = 0
        self._kind: str | None = None
        """Type of the open block."""
        self._digest = hashlib.sha256()
        """Hash of the open thinking block's text."""
        self._space = ""
        """White space between blocks, kept only if text follows in a text block."""
        self._has_content = False
        """Whether there was text or a call."""

    def add(self, parser_events: list[ParserEvent]) -> list[Event]:
        events: list[Event] = []
        for event in parser_events:
            match event:
                case Reasoning(text):
                    if self._kind != "thinking":
                        self._begin(events, "thinking", thinking="", signature="")
                        self._digest = hashlib.sha256()
                    self._digest.update(text.encode("utf-8", "surrogatepass"))
                    if self._show_thinking:
                        self._add_text(events, text)
                case Content(text):
                    self._text(events, text)
                case ToolCallStart(_, name, id):
                    self._begin(events, "tool_use", id=id or self._new_id(), name=name, input={})
                case ToolCallArguments(_, fragment):
                    self._add_text(events, fragment)
                case ToolCallEnd():
                    self._end(events)
        return events

    def close(self) -> list[Event]:
        events: list[Event] = []
        if self._space and not self._has_content:  # The output is only white space.
            space, self._space = self._space, ""
            self._begin(events, "text", text="")
            self._add_text(events, space)
        self._end(events)
        return events

    def _text(self, events: list[Event], text: str) -> None:
        if self._kind != "text":
            self._space += text
            if not self._space or self._space.isspace():
                return
            text, self._space = self._space, ""
            self._begin(events, "text", text="")
        self._add_text(events, text)

    def _begin(self, events: list[Event], kind: str, **fields: Any) -> None:
        self._end(events)
        self._space = ""
        self._kind = kind
        self._has_content |= kind != "thinking"
        events.append(
            {
                "type": "content_block_start",
                "index": self._count,
                "content_block": {"type": kind, **fields},
            }
        )

    def _add_text(self, events: list[Event], text: str) -> None:
        if self._kind is not None and text:
            self._delta(events, {"type": DELTAS[self._kind], TEXTS[self._kind]: text})

    def _delta(self, events: list[Event], delta: dict[str, Any]) -> None:
        events.append({"type": "content_block_delta", "index": self._count, "delta": delta})

    def _end(self, events: list[Event]) -> None:
        if self._kind is None:
            return
        if self._kind == "thinking":
            signature = base64.b64encode(self._digest.digest()).decode("ascii")
            self._delta(events, {"type": "signature_delta", "signature": signature})
        events.append({"type": "content_block_stop", "index": self._count})
        self._count += 1
        self._kind = None


# ---------------------------------------------------------------- as one message


def fold_events(events: Iterable[Event]) -> dict[str, Any]:
    """Return the message built from a stream's events."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
                texts = []
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    message["content"][-1]["signature"] = delta["signature"]
                else:
                    texts.append(delta[TEXTS[message["content"][-1]["type"]]])
            case "content_block_stop":
                block = message["content"][-1]
                text = "".join(texts)
                if block["type"] == "tool_use":
                    block["input"] = as_object(text)
                else:
                    block[block["type"]] = text
            case "message_delta":
                message.update(event["delta"])
                message["usage"] = {**message["usage"], **event["usage"]}
    return message
