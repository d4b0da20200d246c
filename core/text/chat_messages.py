"""Validates the messages, tools and documents of a chat, and guards every text in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest, shortened, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PAIR_ROLES = ("query", "document")
"""Roles of two texts that are scored, in templates that read them."""
_MAX_DEPTH = 64
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "conversation",
        "conversations",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "namespace",
        "cycler",
        "joiner",
        "lipsum",
        "self",
    }
)
"""Template inputs that `chat_template_kwargs` may not set."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read an assistant's reasoning; the first present is the value of
all."""
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
}  # fmt: skip
"""Type of a part of content that is a text → its field with the text."""

Guard = Callable[[str], str]
"""Keeps typed texts from becoming control tokens."""
Message = dict[str, Any]
"""A validated message: `content` is a text, a list of parts, or None beside tool calls; `arguments`
of calls are a text or an object, as sent."""


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Reject the template's own inputs. Raises InvalidRequest."""
    for key in kwargs:
        reserved = key in RESERVED or key.startswith("_") or key.endswith("_token")
        if reserved or not key.isidentifier():
            field = f"chat_template_kwargs.{shortened(key)}"
            raise InvalidRequest(f"{field}: is reserved", param=field)


def guarded(value: Any, guard: Guard, path: str, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{path}: nested deeper than {_MAX_DEPTH}", param=path)
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {
            guard(str(key)): guarded(item, guard, path, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [guarded(item, guard, path, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise InvalidRequest(f"{path}: {type(value).__name__} is no JSON value", param=path)


def same(text: str) -> str:
    return text


def check_tools(
    tools: Sequence[Mapping[str, Any]] | None, guard: Guard
) -> list[Mapping[str, Any]] | None:
    """Return the tools guarded, or None. Raises InvalidRequest."""
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequest(f"tools: must be a list, got {type(tools).__name__}", param="tools")
    for index, tool in enumerate(tools):
        check_tool(tool, f"tools[{index}]")
    return [guarded(tool, guard, f"tools[{i}]") for i, tool in enumerate(tools)]


def check_tool(tool: Any, path: str) -> None:
    """Raise InvalidRequest with the field's path unless it is a function with fields of the right
    types."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else "function"
    if kind != "function":
        raise InvalidRequest(
            f"{path}.type: must be function, got {shown(kind)}", param=f"{path}.type"
        )
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(
            f'{path}: must be {{"type": "function", "function": {{…}}}}', param=path
        )
    path = f"{path}.function"
    if not function.get("name"):
        raise InvalidRequest(f"{path}.name: must be a non-empty string", param=f"{path}.name")
    for name, kinds, what in (
        ("name", str, "a non-empty string"),
        ("description", str | None, "a string"),
        ("parameters", Mapping | None, "a JSON schema"),
        ("strict", bool | None, "true or false"),
    ):
        _check_field(function, name, kinds, what, path)


def _check_field(fields: Mapping[str, Any], name: str, kinds: Any, what: str, path: str) -> None:
    if not isinstance(fields.get(name), kinds):
        raise InvalidRequest(f"{path}.{name}: must be {what}", param=f"{path}.{name}")


def check_documents(documents: Any, guard: Guard) -> list[Any] | None:
    """Return the documents guarded. Raises InvalidRequest."""
    if not documents:
        return None
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            raise InvalidRequest(
                f"documents[{index}]: must be an object", param=f"documents[{index}]"
            )
    return [guarded(document, guard, f"documents[{i}]") for i, document in enumerate(documents)]


def check_messages(
    messages: Any, modalities: Collection[str] = (), roles: Collection[str] = ROLES
) -> list[Message]:
    """Return validated messages without null fields. modalities: types of parts that stand for
    media, {"type": modality}. Raises InvalidRequest with the field's path.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages: must be a non-empty list", param="messages")
    return [
        _check_message(message, f"messages[{i}]", modalities, roles)
        for i, message in enumerate(messages)
    ]


def _check_message(
    message: Any, path: str, modalities: Collection[str], roles: Collection[str]
) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    role = message.get("role")
    if role not in roles:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(roles)}, got {shown(role)}",
            param=f"{path}.role",
        )
    for name in ("name", "tool_call_id", *REASONING_FIELDS):
        _check_field(message, name, str | None, "a string", path)
    checked = {key: value for key, value in message.items() if value is not None}
    content = _check_content(message.get("content"), f"{path}.content", modalities)
    if content is None and role != "assistant":
        raise InvalidRequest(f"{path}.content: is missing", param=f"{path}.content")
    checked["content"] = content
    calls = checked.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls: only assistant messages have them", param=f"{path}.tool_calls"
            )
        checked["tool_calls"] = _check_calls(calls, f"{path}.tool_calls")
    elif content is None:
        checked["content"] = ""
    if role == "assistant":
        reasoning = next((checked[name] for name in REASONING_FIELDS if checked.get(name)), None)
        if isinstance(reasoning, str):
            checked.update(dict.fromkeys(REASONING_FIELDS, reasoning))
    return checked


def _check_content(
    content: Any, path: str, modalities: Collection[str]
) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{path}: must be a string or a list of parts, got {type(content).__name__}", param=path
        )
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in modalities:
            parts.append(item_part(kind))
            continue
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                f'{path}[{index}]: must be {{"type": "text", "text": "…"}}; '
                f"{shown(kind)} parts are not supported",
                param=f"{path}[{index}]",
            )
        if not isinstance(part.get(field), str):
            raise InvalidRequest(
                f"{path}[{index}].{field}: must be a string", param=f"{path}[{index}].{field}"
            )
        parts.append({"type": "text", "text": part[field]})
    return parts


def item_part(modality: str) -> dict[str, str]:
    """Return the part that stands for an item in what templates read; some ask for its type, some
    for a key of that name."""
    return {"type": modality, modality: ""}


def _check_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{path}: must be a list", param=path)
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        kind = call.get("type", "function") if isinstance(call, Mapping) else "function"
        if kind not in ("function", None):
            raise InvalidRequest(
                f'{where}.type: must be "function", got {shown(kind)}', param=f"{where}.type"
            )
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            field = f"{where}.function.name"
            raise InvalidRequest(f"{field}: must be a string", param=field)
        _check_field(call, "id", str | None, "a string", where)
    return [dict(call) for call in calls]


# ---------------------------------------------------------------- arguments of calls


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as text, preferably the client's own."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: Any) -> dict[str, Any] | None:
    """Return a call's arguments as an object; None if they are not (of a call that was cut off)."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) and not _too_deep(arguments) else None


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, Mapping) else value)
            if isinstance(item, Mapping | list | tuple)
        ]
        if not level:
            return False
    return True
