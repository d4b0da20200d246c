"""Items of a response's input: validated, given ids, and converted to the messages of a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from ....core.errors import InvalidRequest

Item = dict[str, Any]
MAX_ITEMS = 16384
"""Limit of one response's input, including the items of the responses before it."""
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
}  # fmt: skip
"""Type of an item → prefix of its id."""


def item_id(kind: str) -> str:
    """Return a new id for an item of this type."""
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_items(value: str | list[Any] | None, find: Callable[[str], Item | None]) -> list[Item]:
    """Return `input` as items, in the form in which they are listed.

    find: returns the item of an `item_reference`. Raises InvalidRequest with the item's path.
    """
    if value is None or value == "" or value == []:
        raise InvalidRequest("input: must not be empty", param="input")
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input")]
    check_count(len(value))
    return [_read_item(item, f"input[{index}]", find) for index, item in enumerate(value)]


def check_count(count: int) -> None:
    """Raise InvalidRequest if there are too many items."""
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
        case "function_call":
            return _identified(item, kind, name=_text(item, "name", path),
                               arguments=_arguments(item, path),
                               call_id=_text(item, "call_id", path))  # fmt: skip
        case "function_call_output":
            return _identified(item, kind, call_id=_text(item, "call_id", path),
                               output=_output(item.get("output"), f"{path}.output"))  # fmt: skip
        case "reasoning":
            return _reasoning(item, path)
        case "item_reference":
            stored_item = find(_text(item, "id", path))
            if stored_item is None:
                raise InvalidRequest(
                    f"{path}.id: no item {item['id']!r} is stored here", param=f"{path}.id"
                )
            return stored_item
        case other:
            raise InvalidRequest(
                f"{path}.type: {other!r} items are not supported", param=f"{path}.type"
            )


def _identified(item: Item, kind: str, **fields: Any) -> Item:
    id = item.get("id")
    return {
        "id": id if isinstance(id, str) and id else item_id(kind),
        "type": kind,
        **fields,
        "status": "completed",
    }


def _text(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (not value and name != "arguments"):
        raise InvalidRequest(
            f"{path}.{name}: must be a non-empty text, got {type(value).__name__}",
            param=f"{path}.{name}",
        )
    return value


def _arguments(item: Item, path: str) -> str:
    text = _text(item, "arguments", path)
    try:
        read = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise InvalidRequest(
            f"{path}.arguments: must be the JSON text of an object", param=f"{path}.arguments"
        )
    return text


def _message(item: Item, path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(ROLES)}, got {role!r}", param=f"{path}.role"
        )
    content = item.get("content")
    if isinstance(content, str):
        texts = [content]
    else:
        texts = _texts(content, f"{path}.content")
    part: Item = {"type": "output_text" if role == "assistant" else "input_text"}
    extra: Item = {"annotations": [], "logprobs": []} if role == "assistant" else {}
    parts = [{**part, "text": text, **extra} for text in texts]
    return _identified(item, "message", role=role, content=parts)


def _texts(parts: Any, path: str) -> list[str]:
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path}: must be a text or a list of parts", param=path)
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{path}[{index}]: must be {{"type": "input_text", "text": "…"}}; {kind!r} parts '
                "are not supported by a text model",
                param=f"{path}[{index}]",
            )
        texts.append(text)
    return texts


def _output(output: Any, path: str) -> str | list[Item]:
    """Read a function's result: text, or parts of text."""
    if isinstance(output, str):
        return output
    return [{"type": "input_text", "text": text} for text in _texts(output, path)]


def _reasoning(item: Item, path: str) -> Item:
    """Read reasoning that a client sends back. What another server encrypted cannot be read
    here."""
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
    """Convert items to the messages of a chat.

    Consecutive reasoning, text and calls of the model become one assistant message. Everything
    before the first turn (`instructions`, system and developer messages) becomes one system
    message, because many templates accept only one. Raises InvalidRequest for a result without its
    call.
    """
    messages: list[dict[str, Any]] = []
    """`content` is a list of texts at first: appending to a string would copy a long text each
    time."""
    if instructions is not None:
        messages.append({"role": "system", "content": [instructions]})
    names: dict[str, str] = {}
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _add_text(messages, _joined(item["content"]))
            case "message":
                _add_told(messages, item)
            case "reasoning":
                reasoning = "\n".join(part["text"] for part in item.get("content") or ())
                if reasoning:
                    messages.append({"role": "assistant", "reasoning_content": reasoning})
            case "function_call":
                names[item["call_id"]] = item["name"]
                _add_call(messages, item)
            case "function_call_output":
                if item["call_id"] not in names:
                    raise InvalidRequest(
                        f"input: no function_call with call_id {item['call_id']!r} comes before "
                        "its function_call_output",
                        param="input",
                    )
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item["call_id"],
                        "name": names[item["call_id"]],
                        "content": [_joined(item["output"])],
                    }
                )
    for message in messages:
        separator = "\n\n" if message["role"] == "system" else ""
        if "content" in message or not message.get("tool_calls"):
            message["content"] = separator.join(message.get("content", ()))
    return messages


def _joined(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _add_told(messages: list[dict[str, Any]], item: Item) -> None:
    text = _joined(item["content"])
    role = "system" if item["role"] == "developer" else item["role"]
    if role == "system" and messages and messages[-1]["role"] == "system":
        messages[-1]["content"].append(text)
    else:
        messages.append({"role": role, "content": [text]})


def _add_text(messages: list[dict[str, Any]], text: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "content" not in last:
        last["content"] = [text]
    elif last.get("role") == "assistant" and last.get("tool_calls"):
        last["content"].append(text)
    else:
        messages.append({"role": "assistant", "content": [text]})


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    call = {"name": item["name"], "arguments": item["arguments"]}
    messages[-1].setdefault("tool_calls", []).append(
        {"id": item["call_id"], "type": "function", "function": call}
    )


def turns(items: list[Item]) -> tuple[int, list[int]]:
    """Return the number of leading items that are instructions, and the indices of items at which
    the conversation can be cut so that each result keeps its call."""
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
