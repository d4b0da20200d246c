"""From parser events to a response's output items, and the stream events that tell of them.

The items of a whole answer are those that the streamed events build up: one machine makes both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .responses_input import Item, item_id

Event = dict[str, Any]
Logprobs = Callable[[int, bool], list[Any]]
"""(output index, whether all) → entries of that message's tokens: those not told yet, or all."""


def call_id() -> str:
    """An id for a call whose text has none."""
    return f"call_{uuid.uuid4().hex}"


def no_logprobs(index: int, all: bool) -> list[Any]:
    """Where nobody asked."""
    return []


class _Open(msgspec.Struct):
    """The item that is being written."""

    index: int
    item: Item
    pieces: list[str] = []


class OutputItems:
    """Output items as they grow. Feeding costs time linear in the text."""

    def __init__(
        self, new_call_id: Callable[[], str] = call_id, logprobs: Logprobs = no_logprobs
    ) -> None:
        self._items: list[Item] = []
        self._open: _Open | None = None
        self._space = ""
        """White space that has come between items; part of a message only if more follows."""
        self._new_call_id = new_call_id
        self._logprobs = logprobs

    def snapshot(self) -> list[Item]:
        """The items so far, the last one perhaps in progress."""
        if self._open is None:
            return list(self._items)
        return [*self._items, self._finished(self._open, "in_progress")]

    def feed(self, parsed: list[ParserEvent]) -> list[Event]:
        """→ what to tell. `type` comes first; `sequence_number` is still missing."""
        told: list[Event] = []
        for event in parsed:
            match event:
                case Reasoning(text):
                    if self._kind != "reasoning":
                        self._begin("reasoning", told, summary=[], content=[])
                    self._piece("response.reasoning_text.delta", text, told)
                case Content(text):
                    self._content(text, told)
                case ToolCallStart(_, name, id):
                    self._begin(
                        "function_call", told, name=name, arguments="",
                        call_id=id or self._new_call_id(),
                    )  # fmt: skip
                case ToolCallArguments(_, fragment):
                    self._piece("response.function_call_arguments.delta", fragment, told)
                case ToolCallEnd():
                    self._end("completed", told)
        return told

    def close(self, status: str) -> list[Event]:
        """Nothing more comes. `status`: completed or incomplete, of the last item."""
        told: list[Event] = []
        answered = any(item["type"] != "reasoning" for item in self._items)
        if self._kind in (None, "reasoning") and not answered:
            space = self._space
            if space or status == "completed":
                self._begin("message", told, role="assistant", content=[])
                self._piece("response.output_text.delta", space, told)
        self._end(status, told)
        return told

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else self._open.item["type"]

    def _content(self, text: str, told: list[Event]) -> None:
        if self._kind != "message":
            self._space += text
            if not self._space or self._space.isspace():
                return
            text, self._space = self._space, ""
            self._begin("message", told, role="assistant", content=[])
        self._piece("response.output_text.delta", text, told)

    def _begin(self, kind: str, told: list[Event], **fields: Any) -> None:
        # A call whose arguments are whole has had its end; others end where the next begins.
        self._end("incomplete" if self._kind == "function_call" else "completed", told)
        self._space = ""
        item = {"id": item_id(kind), "type": kind, "status": "in_progress", **fields}
        self._open = _Open(len(self._items), item)
        told.append(
            {"type": "response.output_item.added", "output_index": self._open.index, "item": item}
        )
        if kind != "function_call":
            part = self._part(self._open, "", [])
            told.append(self._about("response.content_part.added", part=part))

    def _piece(self, kind: str, text: str, told: list[Event]) -> None:
        if self._open is None or not text:
            return
        self._open.pieces.append(text)
        event = self._about(kind, delta=text)
        if kind == "response.output_text.delta":
            event["logprobs"] = self._logprobs(self._open.index, False)
        told.append(event)

    def _end(self, status: str, told: list[Event]) -> None:
        if self._open is None:
            return
        item = self._finished(self._open, status)
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            told.append(self._about(kind, name=item["name"], arguments=item["arguments"]))
        else:
            (part,) = item["content"]
            text = {"text": part["text"]}
            if item["type"] == "message":
                text["logprobs"] = part["logprobs"]
                told.append(self._about("response.output_text.done", **text))
            else:
                told.append(self._about("response.reasoning_text.done", **text))
            told.append(self._about("response.content_part.done", part=part))
        told.append(
            {"type": "response.output_item.done", "output_index": self._open.index, "item": item}
        )
        self._items.append(item)
        self._open = None

    def _about(self, kind: str, **fields: Any) -> Event:
        """An event about the open item."""
        assert self._open is not None
        event = {
            "type": kind,
            "item_id": self._open.item["id"],
            "output_index": self._open.index,
        }
        if self._open.item["type"] != "function_call":
            event["content_index"] = 0
        return {**event, **fields}

    def _finished(self, open: _Open, status: str) -> Item:
        """The open item with the text it has by now."""
        text = "".join(open.pieces)
        if open.item["type"] == "function_call":
            return {**open.item, "arguments": text, "status": status}
        part = self._part(open, text, self._logprobs(open.index, True))
        return {**open.item, "content": [part], "status": status}

    @staticmethod
    def _part(open: _Open, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if open.item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
