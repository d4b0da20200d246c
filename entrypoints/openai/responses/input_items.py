"""Validates a response's input items, gives them ids, and converts them to chat messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from ....core.errors import InvalidRequest, shown
from ...http.content_pieces import Turn, as_content
from .item_kinds import (
    KINDS,
    Item,
    Kind,
    MediaContent,
    PromptCall,
    call_id,
    check_item,
    parts_of,
    shown_texts,
    text_field,
)

MAX_ITEMS = 16384
"""Most items of an input, including earlier responses'."""
ROLES = ("user", "assistant", "system", "developer")
PREFIXES = {"message": "msg", "reasoning": "rs"} | {
    name: kind.prefix for name, kind in KINDS.items()
}
"""Type of an item → prefix of its id."""


def item_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_items(value: str | list[Any] | None, find: Callable[[str], Item | None]) -> list[Item]:
    """Return `input` as listed items.

    find: resolves an `item_reference`. Raises InvalidRequest with the item's path.
    """
    if value is None or value == "" or value == []:
        raise InvalidRequest("input: must not be empty", param="input")
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input")]
    check_count(len(value))
    return [_read_item(item, f"input[{index}]", find) for index, item in enumerate(value)]


def check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(
            f"input: at most {MAX_ITEMS} items, with those of previous_response_id; got {count}",
            param="input",
        )


def _read_item(item: Any, path: str, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    match kind:
        case "message":
            return _message(item, path)
        case "reasoning":
            return _reasoning(item, path)
        case "item_reference":
            stored_item = find(text_field(item, "id", path))
            if stored_item is None:
                raise InvalidRequest(
                    f"{path}.id: no item {shown(item['id'])} is stored here", param=f"{path}.id"
                )
            return stored_item
        case _:
            check_item(item, path)
            return _identified(item, kind, **item)


def _identified(item: Item, kind: str, **fields: Any) -> Item:
    id = item.get("id")
    id = id if isinstance(id, str) and id else item_id(kind)
    return {**fields, "id": id, "type": kind, "status": "completed"}


def _message(item: Item, path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(ROLES)}, got {shown(role)}",
            param=f"{path}.role",
        )
    content = item.get("content")
    if isinstance(content, str):
        content_parts = [{"text": content}]
    else:
        content_parts = parts_of(content, f"{path}.content", media=role == "user")
    part: Item = {"type": "output_text" if role == "assistant" else "input_text"}
    extra: Item = {"annotations": [], "logprobs": []} if role == "assistant" else {}
    parts = [
        each if isinstance(each, MediaContent) else {**part, **each, **extra}
        for each in content_parts
    ]
    return _identified(item, "message", role=role, content=parts)


def _reasoning(item: Item, path: str) -> Item:
    """Read reasoning that a client sends back; other servers' encrypted one is unreadable."""
    content = item.get("content") or []
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            where = f"{path}.content[{index}]"
            raise InvalidRequest(f"{where}: must be a reasoning_text part", param=where)
        texts.append({"type": "reasoning_text", "text": text})
    return _identified(item, "reasoning", summary=item.get("summary") or [], content=texts)


# ---------------------------------------------------------------- as messages


def to_messages(items: list[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Convert items to chat messages.

    Consecutive reasoning, text and calls form one assistant message. Everything before the first
    turn (`instructions`, system and developer messages) forms one system message, as many templates
    accept only one. Raises InvalidRequest for a result without its call.
    """
    messages: list[dict[str, Any]] = []
    """`content` is a list of (lists of) texts at first, as appending to strings would be
    quadratic."""
    if instructions is not None:
        messages.append({"role": "system", "content": [instructions]})
    calls: dict[str, tuple[str, str]] = {}
    """Id of a call or its item → (the call's id, its name)."""
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _add_text(messages, shown_texts(item["content"]))
            case "message":
                _add_told(messages, item)
            case "reasoning":
                reasoning = "\n".join(part["text"] for part in item.get("content") or ())
                if reasoning:
                    messages.append({"role": "assistant", "reasoning_content": reasoning})
            case kind:
                _add_other(messages, item, KINDS[kind], calls)
    for message in messages:
        separator = "\n\n" if message["role"] == "system" else ""
        if "content" in message or not message.get("tool_calls"):
            message["content"] = as_content(message.get("content", []), separator)
    return messages


def _add_other(
    messages: list[dict[str, Any]], item: Item, kind: Kind, calls: dict[str, tuple[str, str]]
) -> None:
    """Add an item other than a message or reasoning."""
    id, call = call_id(item), kind.call(item)
    if call is not None:
        calls[id] = calls[item.get("id", id)] = (id, call.name)
        _add_call(messages, id, call)
    result, text = kind.result(item), kind.text(item)
    if result is None and kind.elsewhere:
        result = ""
    if result is not None:
        if id not in calls:
            raise InvalidRequest(
                f"input: no call with call_id {shown(id)} comes before its {item['type']}",
                param="input",
            )
        id, name = calls[id]
        messages.append({"role": "tool", "tool_call_id": id, "name": name, "content": [result]})
    if text is not None:
        messages.append({"role": "user", "content": [text]})


def _add_told(messages: list[dict[str, Any]], item: Item) -> None:
    text = shown_texts(item["content"])
    role = "system" if item["role"] == "developer" else item["role"]
    if role == "system" and messages and messages[-1]["role"] == "system":
        messages[-1]["content"].append(text)
    else:
        messages.append({"role": role, "content": [text]})


def _add_text(messages: list[dict[str, Any]], text: Turn) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "content" not in last:
        last["content"] = [text]
    elif last.get("role") == "assistant" and last.get("tool_calls"):
        last["content"].append(text)
    else:
        messages.append({"role": "assistant", "content": [text]})


def _add_call(messages: list[dict[str, Any]], id: str, call: PromptCall) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    function = {"name": call.name, "arguments": call.arguments}
    messages[-1].setdefault("tool_calls", []).append(
        {"id": id, "type": "function", "function": function}
    )


def turns(items: list[Item]) -> tuple[int, list[int]]:
    """Return the number of leading instructions, and the indices where the conversation can be cut
    without separating results from calls.
    """
    num_instructions = 0
    for item in items:
        if item["type"] != "message" or item["role"] not in ("system", "developer"):
            break
        num_instructions += 1
    starts = [
        index
        for index, item in enumerate(items)
        if index >= num_instructions and item["type"] == "message" and item["role"] == "user"
    ]
    return num_instructions, starts
