"""`truncation: auto`: the newest turns that fit in the context."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from ....core.errors import JackfieldError
from ....core.text.text_threads import rough_size
from ..chat.job import ChatJob
from ..chat.truncation import fit_to_context, room_for_prompt
from .input_items import to_messages, turns
from .item_kinds import Item
from .protocol import ResponsesRequest, renamed


async def truncated(job: ChatJob, body: ResponsesRequest, items: list[Item]) -> ChatJob:
    """Return the job without the oldest turns of `items`, so that the prompt fits with
    `max_output_tokens` (at most half of the context).

    Raises InvalidRequest with the field's name, and EngineOverloaded if too many texts wait.
    """
    room = room_for_prompt(job.engine.model_config.max_model_len, body.max_output_tokens)
    num_instructions, starts = turns(items)
    # Each item has at least one token, so a prompt with more items than `room` cannot fit.
    least = bisect_left(starts, len(items) + num_instructions - room)
    begins = [num_instructions, *starts[1:]][min(least, max(len(starts) - 1, 0)) :]

    def messages_from(begin: int) -> list[dict[str, Any]]:
        """Return the leading instructions, and the conversation from an item on."""
        return to_messages(items[:num_instructions] + items[begin:], body.instructions)

    try:
        return await fit_to_context(job, begins, messages_from, room=room, size=rough_size(items))
    except JackfieldError as error:
        raise renamed(error) from None
