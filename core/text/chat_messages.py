"""Validates the messages of a chat and puts them into the form that templates expect, with every
user's text guarded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_DEPTH = 64
REASONING_START, REASONING_END = "<think>", "</think>"
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
"""What a template is given by others than `chat_template_kwargs`."""

Guard = Callable[[str], str]
"""Keeps what is typed in a text from becoming control tokens."""


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Reject names of the template's own inputs. Raises InvalidRequest."""
    for key in kwargs:
        reserved = key in RESERVED or key.startswith("_") or key.endswith("_token")
        if reserved or not key.isidentifier():
            raise InvalidRequest(
                f"chat_template_kwargs.{key}: is reserved", param=f"chat_template_kwargs.{key}"
            )


def guarded(value: Any, guard: Guard, path: str, depth: int = 0) -> Any:
    """Return a copy of a JSON value with every string guarded."""
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
    """Return the text as it is: the guard that changes nothing."""
    return text


def check_tools(
    tools: Sequence[Mapping[str, Any]] | None, guard: Guard
) -> list[Mapping[str, Any]] | None:
    """Return the tools with their strings guarded; None if there are none. Raises
    InvalidRequest."""
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequest(f"tools: must be a list, got {type(tools).__name__}", param="tools")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequest(
                f'{path}: must be {{"type": "function", "function": {{…}}}}', param=path
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(
                f"{path}.function.name: must be a non-empty string", param=f"{path}.function.name"
            )
    return [guarded(tool, guard, f"tools[{i}]") for i, tool in enumerate(tools)]


def check_documents(documents: Any, guard: Guard) -> list[Any] | None:
    """Return the documents with their strings guarded. Raises InvalidRequest."""
    if not documents:
        return None
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            raise InvalidRequest(
                f"documents[{index}]: must be an object", param=f"documents[{index}]"
            )
    return [guarded(document, guard, f"documents[{i}]") for i, document in enumerate(documents)]


def check_messages(
    messages: Any, guard: Guard, *, guard_assistants: bool = True, split_reasoning: int = 0
) -> list[dict[str, Any]]:
    """Return the messages in the form that templates expect. Raises InvalidRequest with the field's
    path.

     split_reasoning: in this many of the first messages, reasoning at the beginning of an
    assistant's content moves to its own field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages: must be a non-empty list", param="messages")
    checked = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        mine = guard
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            if guard_assistants and index < split_reasoning:
                message = _split_reasoning(message)
            mine = guard if guard_assistants else _counting(guard)
        checked.append(_check_message(message, path, mine))
    return checked


def _counting(guard: Guard) -> Guard:
    """Return a guard that changes nothing, but counts the text."""

    def count(text: str) -> str:
        guard(text)
        return text

    return count


def _split_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Split content that begins with reasoning, as some clients send it back, as the template
    would: once guarded, its marks mean nothing to the template."""
    content = message.get("content")
    if not isinstance(content, str) or REASONING_END not in content:
        return message
    if message.get("reasoning_content") or message.get("reasoning"):
        return message
    reasoning, _, rest = content.partition(REASONING_END)
    reasoning = reasoning.rpartition(REASONING_START)[2].strip("\n")
    return {**message, "reasoning_content": reasoning, "content": rest.lstrip("\n")}


def _check_message(message: Any, path: str, guard: Guard) -> dict[str, Any]:
    """Return a message in the form that templates expect: content a string, call arguments
    objects."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{path}.role"
        )
    if role == "assistant":
        message = _with_reasoning(message)
    checked = {
        key: guarded(value, guard, f"{path}.{key}")
        for key, value in message.items()
        if key not in ("role", "content", "tool_calls")
    }
    checked["role"] = role
    calls = message.get("tool_calls")
    content = _check_content(message.get("content"), f"{path}.content")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{path}.content: is missing", param=f"{path}.content")
    if calls:
        if role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls: only assistant messages have them", param=f"{path}.tool_calls"
            )
        checked["tool_calls"] = _check_calls(calls, f"{path}.tool_calls", guard)
    checked["content"] = guard(content) if content is not None else ""
    return checked


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its reasoning under both names: some templates read the one, some the
    other."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str):
        return message
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning}


def _check_content(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{path}: must be a string or a list of parts, got {type(content).__name__}", param=path
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "refusal") and not isinstance(part.get(kind), str):
            raise InvalidRequest(
                f"{path}[{index}].{kind}: must be a string", param=f"{path}[{index}].{kind}"
            )
        if kind not in ("text", "refusal"):
            raise InvalidRequest(
                f'{path}[{index}]: must be {{"type": "text", "text": "…"}}; '
                f"{kind!r} parts are not supported",
                param=f"{path}[{index}]",
            )
        texts.append(part[kind])
    return "\n".join(texts)


def _check_calls(calls: Any, path: str, guard: Guard) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as templates write them."""
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{path}: must be a list", param=path)
    checked = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}.name: must be a string", param=f"{where}.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise InvalidRequest(
                    f"{where}.arguments: is not JSON", param=f"{where}.arguments"
                ) from None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"{where}.arguments: must be a JSON object", param=f"{where}.arguments"
            )
        plain = guarded({**call, "function": None}, guard, path)
        plain["function"] = guarded({**function, "arguments": arguments}, guard, where)
        checked.append(plain)
    return checked
