"""A message in progress: a chat completion, sent as events of Anthropic's streams."""

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any

import msgspec

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import RequestFailed
from ...core.outputs import CompletionOutput, RequestOutput
from ...core.text.text_threads import rough_size
from ...core.text.token_limit import LONG_TEXT
from ..http.options import ServerOptions
from ..http.streaming import Protocol, named_frame
from ..openai.chat.chat_template_kwargs import thinking_switch
from ..openai.chat.request import ChatCompletion
from ..openai.common.protocol import ChatRequest
from .blocks import ContentBlocks, Event, fold_events, tool_use_id
from .errors import error_body
from .protocol import CountTokensRequest, in_own_terms

PING: Event = {"type": "ping"}
PROTOCOL = Protocol(
    failure=lambda error: named_frame(error_body(in_own_terms(error))),
    end=b"",
)
"""How a stream reports errors; no frame follows message_stop."""


class MessageCompletion(ChatCompletion):
    """A validated request for a message, and the message as it grows."""

    @classmethod
    async def of(
        cls, engine: AsyncEngine, body: CountTokensRequest, options: ServerOptions
    ) -> MessageCompletion:
        """Validate a request. Raises InvalidRequest with the field's name, and EngineOverloaded
        if too many texts wait."""
        body.check()
        read = functools.partial(body.chat, thinking_switch(engine))
        size = rough_size(body.messages, body.system)
        if size < LONG_TEXT:
            chat = read()
        else:
            chat = await engine.in_text_threads(size, read)
        return cls(engine, body, chat, options)

    def __init__(
        self,
        engine: AsyncEngine,
        body: CountTokensRequest,
        chat: ChatRequest,
        options: ServerOptions,
    ) -> None:
        """chat: the same request in OpenAI's form. Raises InvalidRequest with the field's name."""
        super().__init__(engine, chat, options)
        self.id = f"msg_{uuid.uuid4().hex}"
        # If the context has no room for max_tokens, the output ends at the end of the context.
        self.params = msgspec.structs.replace(self.params, max_tokens_field=None)
        self._choice = self.new_choice()
        self._blocks = ContentBlocks(
            getattr(self.tool_parser, "new_id", tool_use_id), show_thinking=body.shows_thinking
        )
        self._started = False

    def encode(self, output: RequestOutput) -> bytes:
        """Return the frames of an output."""
        return b"".join([named_frame(event) for event in self.events(output)])

    async def full_response(self) -> dict[str, Any]:
        """Return the complete message: the fold of its events. Raises RequestFailed."""
        output: RequestOutput | None = None
        async for output in self.outputs():  # noqa: B007
            pass
        assert output is not None
        if len(output.outputs[0].text) < LONG_TEXT:
            return fold_events(self.events(output))
        return fold_events(await asyncio.to_thread(self.events, output))

    def events(self, output: RequestOutput) -> list[Event]:
        """Return the events of an output. Raises RequestFailed if the request failed."""
        (completion,) = output.outputs
        self.check(output, completion)
        parsed = self._choice.parse(completion)
        events: list[Event] = []
        if not self._started:
            self._started = True
            events += [{"type": "message_start", "message": self._empty(output)}, PING]
        events += self._blocks.add(parsed)
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
        if completion.finish_reason == "abort":  # The protocol has no stop_reason for it.
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
            filled = limit is None or self._choice.parser.num_tokens < limit
            reason = "model_context_window_exceeded" if filled else "max_tokens"
        else:
            reason = "tool_use" if self._choice.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return token counts; `input_tokens` excludes those read from the cache."""
        cached = output.num_cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": output.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.parser.num_tokens,
        }
        if self.reasoning_parser is not None:
            usage["output_tokens_details"] = {
                "thinking_tokens": self._choice.parser.num_reasoning_tokens
            }
        if output.kv_compression is not None:
            usage["kv_cache_details"] = msgspec.structs.asdict(output.kv_compression)
        return usage
