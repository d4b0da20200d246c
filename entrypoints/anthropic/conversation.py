"""Converts Anthropic's messages of content blocks to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.errors import InvalidRequest, shown
from ..http.content_pieces import Piece, as_content, as_turn
from .block_texts import (
    PICTURE,
    RESULT,
    SERVER_CALLS,
    block_text,
    blocks_of,
    picture,
    pieces_of,
    server_result,
    text_of,
    texts_of,
)

Message = dict[str, Any]
BETWEEN = {"user": "\n\n", "system": "\n\n", "assistant": "\n"}
"""Separator of texts in merged turns, which are joined once at the end to stay linear."""
ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-billing-header:"
"""Start of a system block with one coding agent's bookkeeping. It differs in each request, which
would defeat the prefix cache."""


def is_prefilled(messages: list[Any]) -> bool:
    """Return whether the output continues the assistant's last message."""
    return bool(messages) and _is_assistants(messages[-1]) and not _is_empty(messages[-1])


def _is_assistants(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_empty(message: Message) -> bool:
    content = message.get("content")
    return not content or (
        isinstance(content, list)
        and all(
            isinstance(block, dict) and block.get("type") == "text" and block.get("text") == ""
            for block in content
        )
    )


def to_messages(system: str | list[Any] | None, messages: list[Any]) -> list[Message]:
    """Return the messages of a chat; consecutive turns of one role become one message.

    Raises InvalidRequest with the block's path.
    """
    if messages and _is_assistants(messages[-1]) and not is_prefilled(messages):
        messages = messages[:-1]
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    chat: list[Message] = []
    if system:
        if texts := [t for t in texts_of(system, "system") if not _is_billing(t)]:
            _add_text(chat, "system", texts)
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise InvalidRequest(
                f"{path}.role: must be one of {', '.join(ROLES)}, got {shown(role)}",
                param=f"{path}.role",
            )
        blocks = blocks_of(message.get("content"), f"{path}.content")
        if role == "user":
            _add_user(chat, blocks, f"{path}.content", names)
        elif role == "assistant":
            _add_assistant(chat, blocks, f"{path}.content", names)
        else:
            if texts := texts_of(blocks, f"{path}.content"):
                _add_text(chat, "system", texts)
    last = chat[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(
            f"{path}: its tool_use blocks need tool_result blocks in a message after it",
            param=path,
        )
    return [_joined(message) for message in chat]


def _joined(message: Message) -> Message:
    between = BETWEEN.get(message["role"], "")
    joined = {
        name: as_content(value, between) if name in ("content", "reasoning_content") else value
        for name, value in message.items()
    }
    if joined["content"] == "" and "tool_calls" in joined:
        joined["content"] = None  # As in OpenAI's messages: there is none beside the calls.
    return joined


def _is_billing(text: str) -> bool:
    return text.startswith(BILLING)


def _add_user(chat: list[Message], blocks: list[Any], path: str, names: dict[str, str]) -> None:
    """Add texts, pictures and tool results in order."""
    texts: list[Piece] = []
    results = 0
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block["type"] == PICTURE:
            texts.append(picture(block, where))
            continue
        if block["type"] != "tool_result":
            if (text := block_text(block, where)) is not None:
                texts.append(text)
            continue
        if texts:
            _add_text(chat, "user", texts)
            texts = []
        chat.append(_result(block, where, names))
        results += 1
    if texts or not results:
        _add_text(chat, "user", texts)


def _result(block: Any, path: str, names: dict[str, str]) -> Message:
    id = block.get("tool_use_id")
    if not isinstance(id, str) or id not in names:
        raise InvalidRequest(
            f"{path}.tool_use_id: no tool_use block with id {shown(id)} comes before",
            param=f"{path}.tool_use_id",
        )
    content = block.get("content")
    pieces: list[Piece] = []
    if content is not None and block["type"] == "tool_result":
        pieces = pieces_of(content, f"{path}.content")
    elif content is not None:
        pieces = [server_result(content, f"{path}.content")]
    if block.get("is_error"):
        first, rest = (pieces[:1], pieces[1:]) if _is_text(pieces[:1]) else ([""], pieces)
        pieces = [f"Error: {first[0]}", *rest] if any(pieces) else ["Error"]
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": [as_turn(pieces)]}


def _is_text(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and isinstance(pieces[0], str)


def _add_text(chat: list[Message], role: str, texts: Sequence[Piece]) -> None:
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role, "content": []})
    chat[-1]["content"].append(as_turn(texts))


class _Turn:
    """The assistant's thinking, text and calls up to a server-run call's result."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning_parts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.reasoning_parts or self.calls)

    def add_to(self, chat: list[Message]) -> None:
        """Add the message, or join it to the assistant's previous one."""
        if not chat or chat[-1]["role"] != "assistant":
            chat.append({"role": "assistant", "content": []})
        message = chat[-1]
        if any(self.texts):
            message["content"].append(as_turn([text for text in self.texts if text]))
        if any(self.reasoning_parts):
            message.setdefault("reasoning_content", []).extend(filter(None, self.reasoning_parts))
        if self.calls:
            message.setdefault("tool_calls", []).extend(self.calls)


def _add_assistant(
    chat: list[Message], blocks: list[Any], path: str, names: dict[str, str]
) -> None:
    """Add a turn as one message, split at the results of server-run calls."""
    turn, results = _Turn(), 0
    for index, block in enumerate(blocks):
        where, kind = f"{path}[{index}]", block["type"]
        if kind in ("tool_use", *SERVER_CALLS):
            turn.calls.append(_call(block, where, names))
        elif kind.endswith(RESULT):
            if not turn.is_empty:
                turn.add_to(chat)
            chat.append(_result(block, where, names))
            turn, results = _Turn(), results + 1
        elif kind == "thinking":
            turn.reasoning_parts.append(text_of(block, "thinking", where))
        elif (text := block_text(block, where)) is not None:
            turn.texts.append(text)
    if not turn.is_empty or not results:
        turn.add_to(chat)


def _call(block: Any, path: str, names: dict[str, str]) -> dict[str, Any]:
    for field, right, what in (
        ("id", isinstance(block.get("id"), str) and block["id"], "a non-empty text"),
        ("name", isinstance(block.get("name"), str) and block["name"], "a non-empty text"),
    ):
        if not right:
            raise InvalidRequest(f"{path}.{field}: must be {what}", param=f"{path}.{field}")
    names[block["id"]] = block["name"]
    # A client that joined the deltas of a call that was cut off may have a text.
    function = {"name": block["name"], "arguments": block.get("input")}
    return {"id": block["id"], "type": "function", "function": function}
