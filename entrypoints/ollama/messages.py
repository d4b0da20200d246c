"""Converts Ollama's messages to those of a chat."""

from __future__ import annotations

from typing import Any, NoReturn

from ...core.errors import InvalidRequest, shown
from ...core.media.sources import MediaPart

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def to_messages(messages: list[Message]) -> list[Message]:
    """Return the messages of a chat. Raises InvalidRequest with the field's path.

    Ollama's older messages have no ids of calls: results are matched with calls by name and order.
    """
    chat: list[Message] = []
    open_calls: list[tuple[str, str]] = []
    num_calls = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = _text(message, "role", path).lower()
        if role not in ROLES:
            _refuse(f"{path}.role", f"one of {', '.join(ROLES)}", message.get("role"))
        text = _text(message, "content", path)
        content = content_of(text, message.get("images"), f"{path}.images")
        converted: Message = {"role": role, "content": content}
        if role == "tool":
            converted |= _answered(message, path, open_calls)
        elif role == "assistant":
            if thinking := _text(message, "thinking", path):
                converted["reasoning_content"] = thinking
            calls = _calls(message.get("tool_calls"), f"{path}.tool_calls", num_calls)
            if calls:
                num_calls += len(calls)
                open_calls = [(call["id"], call["function"]["name"]) for call in calls]
                converted["tool_calls"] = calls
        chat.append(converted)
    return chat


def content_of(text: str, images: Any, path: str) -> str | list[dict[str, Any]]:
    """Return a message's content, its pictures before its text. Raises InvalidRequest.

    images: texts in base64; path: what the request calls them.
    """
    if not images:
        return text
    if not isinstance(images, list):
        _refuse(path, "a list", images)
    parts: list[dict[str, Any]] = []
    for index, image in enumerate(images):
        field = f"{path}[{index}]"
        if not isinstance(image, str):
            _refuse(field, "a picture in base64", image)
        # What it is comes from its content.
        parts.append(MediaPart(f"data:image/png;base64,{image}", field, "image"))
    return [*parts, {"type": "text", "text": text}] if text else parts


def turn_starts(messages: list[Message]) -> tuple[int, list[int]]:
    """Return the number of leading system messages, and the indices where the conversation may
    begin without separating results from calls.
    """
    num_system = 0
    while num_system < len(messages) and messages[num_system]["role"] == "system":
        num_system += 1
    starts = [i for i, m in enumerate(messages) if i > num_system and m["role"] == "user"]
    return num_system, [num_system, *starts]


def _calls(calls: Any, path: str, first: int) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        _refuse(path, "a list", calls)
    converted = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            _refuse(where, "an object with a function", call)
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not name:
            _refuse(f"{where}.function.name", "a non-empty text", name)
        if not isinstance(arguments, dict):
            _refuse(f"{where}.function.arguments", "an object", arguments)
        # Nine letters and digits: what the strictest template takes.
        id = _text(call, "id", where) or f"call{first + index:05d}"
        function = {"name": name, "arguments": arguments}
        converted.append({"id": id, "type": "function", "function": function})
    return converted


def _answered(message: Message, path: str, open_calls: list[tuple[str, str]]) -> dict[str, str]:
    """Return the name and id of the call that a result belongs to, which is then closed."""
    name = _text(message, "tool_name", path) or _text(message, "name", path)
    id = _text(message, "tool_call_id", path)
    for call in open_calls:
        if (id and call[0] == id) or (not id and (not name or call[1] == name)):
            open_calls.remove(call)
            id, name = call
            break
    fields = {"tool_call_id": id, "name": name}
    return {field: value for field, value in fields.items() if value}


def _text(value: Message, field: str, path: str) -> str:
    """Return a text field, "" without one."""
    text = value.get(field)
    if text is None:
        return ""
    if not isinstance(text, str):
        _refuse(f"{path}.{field}", "a text", text)
    return text


def _refuse(field: str, expected: str, value: Any) -> NoReturn:
    raise InvalidRequest(f"{field}: must be {expected}, got {shown(value)}", param=field)
