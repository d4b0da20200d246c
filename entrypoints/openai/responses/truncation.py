"""`truncation: auto`: the newest turns that fit in the context."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import msgspec

from ....core.errors import ContextLengthExceeded, JackfieldError
from ....core.text.text_threads import rough_size
from ....core.text.token_limit import TokenLimit
from ..chat.job import ChatJob
from .input_items import to_messages, turns
from .item_kinds import Item
from .protocol import ResponsesRequest, renamed


async def truncated(job: ChatJob, body: ResponsesRequest, items: list[Item]) -> ChatJob:
    """Return the job without the oldest turns of `items`, so that the prompt fits with
    `max_output_tokens` (at most half of the context).

    Raises InvalidRequest with the field's name, and EngineOverloaded if too many texts wait.
    """
    context = job.engine.model_config.max_model_len
    room = context - min(body.max_output_tokens or 1, context // 2)
    num_instructions, starts = turns(items)
    # Each item has at least one token, so a prompt with more items than `room` cannot fit.
    least = bisect_left(starts, len(items) + num_instructions - room)
    begins = [num_instructions, *starts[1:]][min(least, max(len(starts) - 1, 0)) :]
    limit = TokenLimit(tokens=room, context=context, param="messages")
    size = rough_size(items)

    def messages_from(begin: int) -> list[dict[str, Any]]:
        """Return the leading instructions, and the conversation from an item on."""
        return to_messages(items[:num_instructions] + items[begin:], body.instructions)

    def num_tokens(begin: int) -> int:
        return len(job.engine.render_chat(messages_from(begin), limit=limit, **job.rendering))

    async def fits(begin: int) -> bool:
        try:
            return await job.engine.in_text_threads(size, lambda: num_tokens(begin)) <= room
        except ContextLengthExceeded:
            return False
        except JackfieldError as error:
            raise renamed(error) from None

    first, last = 0, len(begins) - 1
    while first < last:
        middle = (first + last) // 2
        if await fits(begins[middle]):
            last = middle
        else:
            first = middle + 1
    return msgspec.structs.replace(job, messages=messages_from(begins[first]))
