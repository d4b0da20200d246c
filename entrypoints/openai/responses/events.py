"""Builds a response's output items, and the stream events that describe them, from parser events.

The items of a response in one piece are those that the streamed events build up.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ....core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .input_items import Item, item_id

Event = dict[str, Any]


class Logprobs(Protocol):
    """Looks up the log-probabilities of a message."""

    def __call__(self, index: int, *, only_new: bool) -> list[Any]:
        """Return the entries of the tokens of the message at this output index: all of them, or
        those since the last call for new ones."""


def call_id() -> str:
    """Return an id for a call whose text has none."""
    return f"call_{uuid.uuid4().hex}"


def no_logprobs(index: int, *, only_new: bool) -> list[Any]:
    """Return [], for requests without log-probabilities."""
    return []


class _Open(msgspec.Struct):
    """The unfinished item, if any."""

    index: int
    item: Item
    texts: list[str] = []


class OutputItems:
    """Output items as they grow, in time linear in the text."""

    def __init__(
        self, new_call_id: Callable[[], str] = call_id, logprobs: Logprobs = no_logprobs
    ) -> None:
        self._items: list[Item] = []
        self._open: _Open | None = None
        self._space = ""
        """White space between items; part of a message only if text follows."""
        self._new_call_id = new_call_id
        self._logprobs = logprobs

    def snapshot(self) -> list[Item]:
        """Return the items so far; the last one may be in progress."""
        if self._open is None:
            return list(self._items)
        return [*self._items, self._finished(self._open, "in_progress")]

    def add(self, parser_events: list[ParserEvent]) -> list[Event]:
        """Return the stream events; each begins with `type` and lacks `sequence_number`."""
        events: list[Event] = []
        for event in parser_events:
            match event:
                case Reasoning(text):
                    if self._kind != "reasoning":
                        self._begin("reasoning", events, summary=[], content=[])
                    self._delta("response.reasoning_text.delta", text, events)
                case Content(text):
                    self._content(text, events)
                case ToolCallStart(_, name, id):
                    self._begin(
                        "function_call", events, name=name, arguments="",
                        call_id=id or self._new_call_id(),
                    )  # fmt: skip
                case ToolCallArguments(_, fragment):
                    self._delta("response.function_call_arguments.delta", fragment, events)
                case ToolCallEnd():
                    self._end("completed", events)
        return events

    def close(self, status: str) -> list[Event]:
        """End the last item. status: completed or incomplete"""
        events: list[Event] = []
        has_output = any(item["type"] != "reasoning" for item in self._items)
        if self._kind in (None, "reasoning") and not has_output:
            space = self._space
            if space or status == "completed":
                self._begin("message", events, role="assistant", content=[])
                self._delta("response.output_text.delta", space, events)
        self._end(status, events)
        return events

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else self._open.item["type"]

    def _content(self, text: str, events: list[Event]) -> None:
        if self._kind != "message":
            self._space += text
            if not self._space or self._space.isspace():
                return
            text, self._space = self._space, ""
            self._begin("message", events, role="assistant", content=[])
        self._delta("response.output_text.delta", text, events)

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> None:
        # A call with complete arguments has ended already; other items end when the next one
        # begins.
        self._end("incomplete" if self._kind == "function_call" else "completed", events)
        self._space = ""
        item = {"id": item_id(kind), "type": kind, "status": "in_progress", **fields}
        self._open = _Open(len(self._items), item)
        events.append(
            {"type": "response.output_item.added", "output_index": self._open.index, "item": item}
        )
        if kind != "function_call":
            part = self._part(self._open, "", [])
            events.append(self._item_event("response.content_part.added", part=part))

    def _delta(self, kind: str, text: str, events: list[Event]) -> None:
        if self._open is None or not text:
            return
        self._open.texts.append(text)
        event = self._item_event(kind, delta=text)
        if kind == "response.output_text.delta":
            event["logprobs"] = self._logprobs(self._open.index, only_new=True)
        events.append(event)

    def _end(self, status: str, events: list[Event]) -> None:
        if self._open is None:
            return
        item = self._finished(self._open, status)
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            events.append(self._item_event(kind, name=item["name"], arguments=item["arguments"]))
        else:
            (part,) = item["content"]
            text = {"text": part["text"]}
            if item["type"] == "message":
                text["logprobs"] = part["logprobs"]
                events.append(self._item_event("response.output_text.done", **text))
            else:
                events.append(self._item_event("response.reasoning_text.done", **text))
            events.append(self._item_event("response.content_part.done", part=part))
        events.append(
            {"type": "response.output_item.done", "output_index": self._open.index, "item": item}
        )
        self._items.append(item)
        self._open = None

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the open item."""
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
        """Return the open item with its text so far."""
        text = "".join(open.texts)
        if open.item["type"] == "function_call":
            return {**open.item, "arguments": text, "status": status}
        part = self._part(open, text, self._logprobs(open.index, only_new=False))
        return {**open.item, "content": [part], "status": status}

    @staticmethod
    def _part(open: _Open, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if open.item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
