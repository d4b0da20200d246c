"""Forms of a conversation to try when a chat template refuses it.

Templates get messages as in transformers. If one raises, the forms below are tried, fewest changes
first, then in the order of `FALLBACKS`. None loses anything: texts move or are written differently.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .chat_messages import Message, arguments_object, arguments_text

MAX_ATTEMPTS = 64
"""Most renderings of one conversation."""
BETWEEN = "\n\n"
"""Separator in joined messages."""
SYSTEM_ROLES = ("system", "developer")
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9

Chat = list[Message]
Change = Callable[[Chat], Chat]


class Fallback(NamedTuple):
    """A trait that templates refuse, and its other forms."""

    trait: str
    changes: tuple[Change, ...]
    """In order of trial; each returns an equal chat if not applicable."""


def attempts(chat: Chat) -> Iterator[Chat]:
    """Yield the chat, then its other forms, fewest changes first."""
    yield chat
    tried = [chat]
    for number in range(1, len(FALLBACKS) + 1):
        for chosen in itertools.combinations(FALLBACKS, number):
            for changes in itertools.product(*(fallback.changes for fallback in chosen)):
                changed = chat
                for change in changes:
                    before, changed = changed, change(changed)
                    if changed == before:
                        break
                else:
                    if changed not in tried:
                        if len(tried) == MAX_ATTEMPTS:
                            return
                        tried.append(changed)
                        yield changed


# ---------------------------------------------------------------- system messages


def adjacent_system_joined(chat: Chat) -> Chat:
    """Join adjacent system and developer messages, as a system message."""
    return _joined(
        chat, lambda a, b: a["role"] in SYSTEM_ROLES and b["role"] in SYSTEM_ROLES, "system"
    )


def system_first(chat: Chat) -> Chat:
    system = [message for message in chat if message["role"] in SYSTEM_ROLES]
    others = [message for message in chat if message["role"] not in SYSTEM_ROLES]
    if not system or not others:
        return chat
    return adjacent_system_joined(system) + others


def system_as_user(chat: Chat) -> Chat:
    """Write system and developer messages as text of the next or previous user message."""
    users: Chat = []
    for message in chat:
        is_system = message["role"] in SYSTEM_ROLES
        users.append({**message, "role": "user", "": True} if is_system else message)
    joined = _joined(users, lambda a, b: a["role"] == b["role"] == "user" and ("" in a or "" in b))
    return [{key: value for key, value in message.items() if key} for message in joined]


# ---------------------------------------------------------------- turns, calls


def adjacent_turns_joined(chat: Chat) -> Chat:
    """Join adjacent user messages, or assistant ones without calls."""
    return _joined(
        chat,
        lambda a, b: (
            a["role"] == b["role"]
            and a["role"] in ("user", "assistant")
            and not a.get("tool_calls")
            and not b.get("tool_calls")
        ),
    )


def short_ids(chat: Chat) -> Chat:
    """Replace calls' ids by nine letters and digits derived from them."""
    changed = []
    for message in chat:
        if message.get("tool_calls"):
            calls = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            message = {**message, "tool_call_id": _short_id(message.get("tool_call_id"))}
        changed.append(message)
    return changed


def _short_id(id: Any) -> str:
    if isinstance(id, str) and len(id) == _ID_LENGTH and all(char in _LETTERS for char in id):
        return id
    number = int.from_bytes(hashlib.sha256(repr(id).encode("utf-8", "replace")).digest())
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)


def arguments_as_objects(chat: Chat) -> Chat:
    """Wrap arguments that are not an object: `{"arguments": text}`."""

    def hold(arguments: Any) -> Any:
        if arguments_object(arguments) is not None:
            return arguments
        return {"arguments": arguments_text(arguments)}

    return _with_arguments(chat, hold)


def arguments_as_text(chat: Chat) -> Chat:
    """Write arguments as text, for templates that concatenate them."""
    return _with_arguments(chat, lambda arguments: Verbatim(arguments_text(arguments)))


class Verbatim(str):
    """Arguments that stay text."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Verbatim) and str.__eq__(self, other)

    __hash__ = str.__hash__


def no_null_content(chat: Chat) -> Chat:
    return [
        {**message, "content": ""} if message.get("content") is None else message
        for message in chat
    ]


def _with_arguments(chat: Chat, change: Callable[[Any], Any]) -> Chat:
    changed = []
    for message in chat:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                function = call["function"]
                arguments = change(function.get("arguments"))
                calls.append({**call, "function": {**function, "arguments": arguments}})
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


FALLBACKS = (
    Fallback("system messages", (adjacent_system_joined, system_first, system_as_user)),
    Fallback("turns", (adjacent_turns_joined,)),
    Fallback("ids of calls", (short_ids,)),
    Fallback("arguments of calls", (arguments_as_objects, arguments_as_text)),
    Fallback("content that is null", (no_null_content,)),
)
"""Documented in docs/how-to/chat-and-completions.md."""


def _joined(chat: Chat, belong: Callable[[Message, Message], bool], role: str = "") -> Chat:
    result: Chat = []
    parts: list[list[Any]] = []
    """Contents of each message of `result`, joined at the end."""
    for message in chat:
        if result and belong(result[-1], message):
            result[-1] = {**message, **result[-1], "role": role or message["role"]}
            parts[-1].append(message["content"])
        else:
            result.append(message)
            parts.append([message["content"]])
    return [
        message if len(contents) == 1 else {**message, "content": _joined_contents(contents)}
        for message, contents in zip(result, parts, strict=True)
    ]


def _joined_contents(contents: list[Any]) -> str:
    return BETWEEN.join(joined_parts(content) for content in contents if content)


def joined_parts(content: Any) -> str:
    """Return text of content in parts, with marks in the place of media."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] if part["type"] == "text" else item_mark(part["type"]) for part in content
        )
    return content or ""


_NONCE = secrets.token_hex(8)
"""Keeps marks from being typed."""


def item_mark(modality: str) -> str:
    """Return what stands in a text in place of an item, until its placeholder does."""
    return f"\ufdd3{modality}-{_NONCE}\ufdd3"
