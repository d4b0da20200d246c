"""The newest turns of a conversation that fit in the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ....core.errors import ContextLengthExceeded
from ....core.text.token_limit import TokenLimit
from .job import ChatJob

Messages = list[dict[str, Any]]


def room_for_prompt(context: int, max_tokens: int | None) -> int:
    """Return the tokens that a truncated prompt may have: it leaves room for `max_tokens`, at most
    half of the context.
    """
    return context - min(max_tokens or 1, context // 2)


async def fit_to_context(
    job: ChatJob,
    begins: Sequence[int],
    messages_from: Callable[[int], Messages],
    *,
    room: int,
    size: int,
) -> ChatJob:
    """Return the job with as many turns as fit in `room` tokens; at least the last one.

    begins: where the conversation may begin, in order; messages_from: the messages from there on;
    size: of the conversation, in characters. Raises InvalidRequest, and EngineOverloaded if too
    many texts wait.
    """
    limit = TokenLimit(tokens=room, context=job.engine.model_config.max_model_len, param="messages")

    async def fits(begin: int) -> bool:
        try:
            messages = await job.engine.in_text_threads(size, lambda: messages_from(begin))
            tokens = await job.engine.tokenize_chat(messages, limit=limit, **job.rendering)
            return len(tokens) <= room
        except ContextLengthExceeded:
            return False

    first, last = 0, len(begins) - 1
    while first < last:
        middle = (first + last) // 2
        if await fits(begins[middle]):
            last = middle
        else:
            first = middle + 1
    return msgspec.structs.replace(job, messages=messages_from(begins[first]))
