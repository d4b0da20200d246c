"""One message on its way: a chat's machinery, told in the events of Anthropic's streams."""

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any

import msgspec

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import RequestFailed
from ...core.text.encoding import LONG_TEXT
from ...core.text.text_threads import rough_size
from ...core.types import CompletionOutput, RequestOutput
from ..openai.chat_job import ChatJob
from ..openai.context import ServerOptions
from ..openai.protocol import ChatRequest
from ..openai.streaming import Protocol, named_frame
from ..openai.template_fields import thought_switch
from .blocks import ContentBlocks, Event, folded, tool_use_id
from .errors import error_body
from .protocol import CountTokensRequest, in_own_terms

PING: Event = {"type": "ping"}
PROTOCOL = Protocol(
    failure=lambda error: named_frame(error_body(in_own_terms(error))),
    end=b"",
)
"""How a stream of messages tells an error, and that nothing follows message_stop."""


class MessageJob(ChatJob):
    """A message from its request to its end."""

    @classmethod
    async def of(
        cls, engine: AsyncEngine, wanted: CountTokensRequest, options: ServerOptions
    ) -> MessageJob:
        """A message that has not begun. Raises InvalidRequest with the field's name, and
        EngineOverloaded where too many texts wait."""
        wanted.check()
        read = functools.partial(wanted.chat, thought_switch(engine))
        size = rough_size(wanted.messages, wanted.system)
        if size < LONG_TEXT:
            chat = read()
        else:
            chat = await engine.in_text_threads(size, read)
        return cls(engine, wanted, chat, options)

    def __init__(
        self,
        engine: AsyncEngine,
        wanted: CountTokensRequest,
        chat: ChatRequest,
        options: ServerOptions,
    ) -> None:
        """chat: the same request as a chat's. Raises InvalidRequest with the field's name."""
        super().__init__(engine, chat, options)
        self.id = f"msg_{uuid.uuid4().hex}"
        # A prompt that leaves less room than max_tokens is answered as far as the context goes.
        self.params = msgspec.structs.replace(self.params, max_tokens_field=None)
        self._choice = self.new_choice()
        self._blocks = ContentBlocks(
            getattr(self.tools, "new_id", tool_use_id), show_thinking=wanted.shows_thinking
        )
        self._started = False

    def encode(self, output: RequestOutput) -> bytes:
        """What an output tells, for a stream."""
        return b"".join([named_frame(event) for event in self.events(output)])

    async def whole(self) -> dict[str, Any]:
        """The message in one piece: the fold of its events. Raises RequestFailed."""
        output: RequestOutput | None = None
        async for output in self.outputs():  # noqa: B007
            pass
        assert output is not None
        if len(output.outputs[0].text) < LONG_TEXT:
            return folded(self.events(output))
        return folded(await asyncio.to_thread(self.events, output))

    def events(self, output: RequestOutput) -> list[Event]:
        """What an output tells. Raises RequestFailed where there will be no message."""
        (completion,) = output.outputs
        self.check(output, completion)
        self._choice.count(completion)
        events: list[Event] = []
        if not self._started:
            self._started = True
            events += [{"type": "message_start", "message": self._empty(output)}, PING]
        events += self._blocks.feed(self._choice.feed(completion))
        if completion.finish_reason is not None:
            events += self._blocks.close()
            events.append(
                {
                    "type": "message_delta",
                    "delta": self._ending(completion),
                    "usage": self._usage(output),
                }
            )
            events.append({"type": "message_stop"})
        return events

    def check(self, output: RequestOutput, completion: CompletionOutput) -> None:
        super().check(output, completion)
        if completion.finish_reason == "abort":  # The protocol has no name for it.
            raise RequestFailed("the request was aborted")

    def _empty(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output),
        }

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        limit = self.params.max_tokens
        if sequence is not None:
            reason = "stop_sequence"
        elif completion.finish_reason == "length":
            filled = limit is None or self._choice.num_tokens < limit
            reason = "model_context_window_exceeded" if filled else "max_tokens"
        else:
            reason = "tool_use" if self._choice.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """In tokens. What was read from the cache is no part of `input_tokens`."""
        cached = output.num_cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": len(output.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.num_tokens,
        }
        if self._choice.thought is not None:
            usage["output_tokens_details"] = {
                "thinking_tokens": self._choice.thought.num_reasoning_tokens
            }
        return usage
