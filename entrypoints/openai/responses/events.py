"""Builds a response's output items, and their stream events, from parser events.

A whole response has the items that its events build.
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
from .client_tools import CLIENT_TOOLS
from .custom_tools import InputReader
from .input_items import item_id
from .item_kinds import Item
from .tools import Tools

Event = dict[str, Any]
NO_TOOLS = Tools()
_CALL_EVENTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
"""Field of a call's item → middle of its events' names."""


class Logprobs(Protocol):
    """Looks up a message's log-probabilities."""

    def __call__(self, index: int, *, only_new: bool) -> list[Any]:
        """Return the token entries of the message at this output index: all, or those since the
        last call.
        """


def call_id() -> str:
    """Return an id for a call without one."""
    return f"call_{uuid.uuid4().hex}"


def no_logprobs(index: int, *, only_new: bool) -> list[Any]:
    return []


class _Open(msgspec.Struct):
    """The unfinished item, if any."""

    index: int
    item: Item
    field: str = ""
    """Of a call: field of the item with its text."""
    read: Callable[[str], Item] | None = None
    """Of a call without such a field: arguments → fields."""
    input: InputReader | None = None
    """Of a custom tool's call: reads its text."""
    texts: list[str] = []

    @property
    def is_call(self) -> bool:
        return bool(self.field) or self.read is not None


class OutputItems:
    """Growing output items, in linear time."""

    def __init__(
        self,
        new_call_id: Callable[[], str] = call_id,
        logprobs: Logprobs = no_logprobs,
        tools: Tools = NO_TOOLS,
    ) -> None:
        """tools: decide calls' types of items."""
        self._items: list[Item] = []
        self._open: _Open | None = None
        self._space = ""
        """White space between items, kept only if text follows in a message."""
        self._new_call_id = new_call_id
        self._logprobs = logprobs
        self._tools = tools

    def snapshot(self) -> list[Item]:
        """Return the items; the last may be in progress."""
        if self._open is None:
            return list(self._items)
        return [*self._items, self._finished(self._open, "in_progress")]

    def add(self, parser_events: list[ParserEvent]) -> list[Event]:
        """Return stream events, each with `type`, without `sequence_number`."""
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
                    self._begin_call(name, id or self._new_call_id(), events)
                case ToolCallArguments(_, fragment):
                    self._arguments(fragment, events)
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

    def _begin_call(self, name: str, id: str, events: list[Event]) -> None:
        tool = self._tools.find(name)
        names: Item = {"name": tool.name}
        if tool.namespace is not None:
            names["namespace"] = tool.namespace
        if (client_tool := CLIENT_TOOLS.get(tool.kind)) is not None:
            item = _Open(0, {"type": client_tool.call, **client_tool.fields({}), "call_id": id})
            item.read = lambda arguments: client_tool.fields(json_object(arguments))
        elif tool.kind == "custom":
            item = _Open(0, {"type": "custom_tool_call", **names, "input": "", "call_id": id})
            item.field, item.input = "input", InputReader()
        else:
            item = _Open(0, {"type": "function_call", **names, "arguments": "", "call_id": id})
            item.field = "arguments"
        self._open_item(item, events)

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> None:
        self._open_item(_Open(0, {"type": kind, **fields}), events)
        assert self._open is not None
        part = self._part(self._open, "", [])
        events.append(self._item_event("response.content_part.added", part=part))

    def _open_item(self, open: _Open, events: list[Event]) -> None:
        # A call with complete arguments has ended already; other items end when the next one
        # begins.
        is_call = self._open is not None and self._open.is_call
        self._end("incomplete" if is_call else "completed", events)
        self._space = ""
        ids = {"id": item_id(open.item["type"]), "type": open.item["type"]}
        open.item = {**ids, "status": "in_progress", **open.item}
        open.index = len(self._items)
        self._open = open
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": open.index,
                "item": open.item,
            }
        )

    def _arguments(self, fragment: str, events: list[Event]) -> None:
        if self._open is None or not self._open.is_call:
            return
        if self._open.input is not None:
            fragment = self._open.input.feed(fragment)
        self._call_delta(fragment, events)

    def _call_delta(self, text: str, events: list[Event]) -> None:
        assert self._open is not None
        if self._open.read is not None:
            self._open.texts.append(text)
        else:
            self._delta(f"response.{_CALL_EVENTS[self._open.field]}.delta", text, events)

    def _delta(self, kind: str, text: str, events: list[Event]) -> None:
        if self._open is None or not text:
            return
        self._open.texts.append(text)
        event = self._item_event(kind, delta=text)
        if kind == "response.output_text.delta":
            event["logprobs"] = self._logprobs(self._open.index, only_new=True)
        events.append(event)

    def _end(self, status: str, events: list[Event]) -> None:
        open = self._open
        if open is None:
            return
        if open.input is not None:
            self._call_delta(open.input.finish(complete=status == "completed"), events)
        item = self._finished(open, status)
        if open.field:
            fields = {open.field: item[open.field]}
            if open.field == "arguments":
                fields = {"name": item["name"], **fields}
            events.append(self._item_event(f"response.{_CALL_EVENTS[open.field]}.done", **fields))
        elif not open.is_call:
            (part,) = item["content"]
            text = {"text": part["text"]}
            if item["type"] == "message":
                text["logprobs"] = part["logprobs"]
                events.append(self._item_event("response.output_text.done", **text))
            else:
                events.append(self._item_event("response.reasoning_text.done", **text))
            events.append(self._item_event("response.content_part.done", part=part))
        events.append(
            {"type": "response.output_item.done", "output_index": open.index, "item": item}
        )
        self._items.append(item)
        self._open = None

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        event = {
            "type": kind,
            "item_id": self._open.item["id"],
            "output_index": self._open.index,
        }
        if not self._open.is_call:
            event["content_index"] = 0
        return {**event, **fields}

    def _finished(self, open: _Open, status: str) -> Item:
        text = "".join(open.texts)
        if open.read is not None:
            return {**open.item, **(open.read(text) if text else {}), "status": status}
        if open.field:
            return {**open.item, open.field: text, "status": status}
        part = self._part(open, text, self._logprobs(open.index, only_new=False))
        return {**open.item, "content": [part], "status": status}

    @staticmethod
    def _part(open: _Open, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if open.item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def json_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; {} if incomplete."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
    return value if isinstance(value, dict) else {}
