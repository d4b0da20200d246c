"""One response on its way: the same machinery as a chat's, told in the events of a response."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator
from typing import Any

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ContextLengthExceeded, JackfieldError, RequestFailed
from ...core.protocols import ParserEvent, ToolCallEnd
from ...core.text.encoding import LONG_TEXT
from ...core.text.text_threads import rough_size
from ...core.text.token_limit import TokenLimit
from ...core.types import CompletionOutput, RequestOutput
from .chat_job import ChatJob
from .context import tokenizer_of
from .responses_events import Event, OutputItems, call_id, no_logprobs
from .responses_input import Item, to_messages, turns
from .responses_logprobs import MessageLogprobs
from .responses_protocol import ResponsesRequest, renamed

logger = logging.getLogger("jackfield.server")
STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled", "error": "failed"}
"""The engine's finish_reason → a response's status."""
TERMINAL = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
"""Status → the last event. OpenAI has none for a cancelled response."""


class ResponseJob(ChatJob):
    """A response from its request to its end."""

    def __init__(
        self,
        engine: AsyncEngine,
        wanted: ResponsesRequest,
        earlier: list[Item],
        own: list[Item],
        *,
        stored: bool,
    ) -> None:
        """earlier: items of the responses that this one goes on from; own: those of its input.

        stored: whether it will be kept. Raises InvalidRequest with the field's name.
        """
        self.wanted = wanted
        self.own = own
        self.input = earlier + own
        self.stored = stored
        switch: tuple[str, bool] | None = None
        if (name := engine.config.reasoning_parser) is not None:
            parser = engine.plugins["reasoning_parser"].load(name)
            switch = getattr(parser, "thinking_switch", ("enable_thinking", True))
        try:
            super().__init__(
                engine, wanted.chat(to_messages(self.input, wanted.instructions), switch)
            )
        except JackfieldError as error:
            raise renamed(error) from None
        self.id = f"resp_{uuid.uuid4().hex}"
        self.status = "queued" if wanted.background else "in_progress"
        self.error: str | None = None
        self.completed_at: int | None = None
        self._usage_body: dict[str, Any] | None = None
        self._kv_transfer_params: dict[str, Any] | None = None
        self._sequence = 0
        self._answer = self.new_choice()
        self._logprobs_of: MessageLogprobs | None = None
        if wanted.wants_logprobs:
            self._logprobs_of = MessageLogprobs(
                self.new_choice().parser,
                tokenizer_of(engine),
                wanted.top_logprobs or 0,
                skip_special_tokens=self.params.skip_special_tokens,
            )
        self._items = OutputItems(
            getattr(self.tools, "new_id", call_id),
            no_logprobs if self._logprobs_of is None else self._logprobs_of.take,
        )

    async def fit(self) -> None:
        """With `truncation: auto`, leave out the oldest turns until the prompt fits, and
        `max_output_tokens` besides, up to half of the context."""
        if self.wanted.truncation != "auto":
            return
        context = self.engine.model_config.max_model_len
        room = context - min(self.wanted.max_output_tokens or 1, context // 2)
        told, starts = turns(self.input)
        # No prompt fits that has more items than tokens.
        least = bisect_left(starts, len(self.input) + told - room)
        begins = [told, *starts[1:]][min(least, max(len(starts) - 1, 0)) :]
        first, last = 0, len(begins) - 1
        while first < last:
            middle = (first + last) // 2
            if await self._fits(told, begins[middle], room):
                last = middle
            else:
                first = middle + 1
        self.asked.messages = self._messages(told, begins[first])

    def _messages(self, told: int, begin: int) -> list[dict[str, Any]]:
        """What is told first, and the conversation from an item on."""
        items = self.input[:told] + self.input[begin:]
        return to_messages(items, self.wanted.instructions)

    async def _fits(self, told: int, begin: int, room: int) -> bool:
        context = self.engine.model_config.max_model_len
        limit = TokenLimit(tokens=room, context=context, param="messages")

        def fits() -> bool:
            messages = self._messages(told, begin)
            return len(self.engine.render_chat(messages, **self._rendering(), limit=limit)) <= room

        try:
            return await self.engine.in_text_threads(self._size, fits)
        except ContextLengthExceeded:
            return False
        except JackfieldError as error:
            raise renamed(error) from None

    @functools.cached_property
    def _size(self) -> int:
        """About how many characters the input has."""
        return rough_size(self.input)

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    async def events(self) -> AsyncIterator[Event]:
        """What is told, in order. The first step raises what is wrong with the request; after it,
        failures are told, too, and the last event is always a terminal one."""
        outputs = self.outputs()
        try:
            try:
                await outputs.admit()
            except JackfieldError as error:
                raise renamed(error) from None
            yield self._lifecycle("response.created")
            if self.wanted.background:
                yield self._lifecycle("response.queued")
            else:
                yield self._lifecycle("response.in_progress")
            try:
                async for output in outputs:
                    if self.status == "queued":
                        self.status = "in_progress"
                        yield self._lifecycle("response.in_progress")
                    for event in await self._step(output):
                        yield self._numbered(event)
            except JackfieldError as error:
                self._fail(error.message)
            except Exception:
                logger.exception("response %s failed", self.id)
                self._fail("the request failed")
            for event in self._items.close(
                "completed" if self.status == "completed" else "incomplete"
            ):
                yield self._numbered(event)
            yield self._lifecycle(TERMINAL[self.status])
        finally:
            await outputs.aclose()

    async def whole(self) -> dict[str, Any]:
        """The response in one piece: what its events build up. Raises RequestFailed."""
        async for _ in self.events():
            pass
        if self.status == "failed":
            raise RequestFailed(self.error or "the request failed")
        return self.body()

    async def _step(self, output: RequestOutput) -> list[Event]:
        (completion,) = output.outputs
        self._answer.count(completion)
        self._count(output)
        if len(completion.text) < LONG_TEXT:
            events = self._items.feed(self._parse(completion))
        else:
            events = self._items.feed(await asyncio.to_thread(self._parse, completion))
        if completion.finish_reason is not None:
            self.status = STATUS[completion.finish_reason]
            if self.status == "failed":
                self.error = output.error or "the request failed"
            elif self.status == "completed":
                self.completed_at = int(time.time())
        return events

    def _parse(self, completion: CompletionOutput) -> list[ParserEvent]:
        if self._logprobs_of is not None:
            self._logprobs_of.push(completion)
        parsed = self._answer.feed(completion)
        if self.held is not None and self.held.named and completion.finish_reason != "stop":
            # The named call is all of the output, so its parser ends it wherever the output ends.
            parsed = [event for event in parsed if not isinstance(event, ToolCallEnd)]
        return parsed

    def _fail(self, message: str) -> None:
        self.status, self.error = "failed", message

    def _numbered(self, event: Event) -> Event:
        made = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return made

    def _lifecycle(self, kind: str) -> Event:
        return self._numbered({"type": kind, "response": self.body()})

    def _count(self, output: RequestOutput) -> None:
        self._kv_transfer_params = output.kv_transfer_params
        prompt, completion = len(output.prompt_token_ids), self._answer.num_tokens
        thought = self._answer.thought
        self._usage_body = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": completion,
            "output_tokens_details": {
                "reasoning_tokens": 0 if thought is None else thought.num_reasoning_tokens
            },
            "total_tokens": prompt + completion,
        }

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        wanted = self.wanted
        reasoning = wanted.reasoning
        text = wanted.text
        made = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": bool(wanted.background),
            "completed_at": self.completed_at,
            "error": (
                {"code": "server_error", "message": self.error} if self.error is not None else None
            ),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self.status == "incomplete" else None
            ),
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "max_tool_calls": wanted.max_tool_calls,
            "metadata": wanted.metadata or {},
            "model": self.model,
            "output": self._items.snapshot(),
            "parallel_tool_calls": wanted.parallel_tool_calls is not False,
            "previous_response_id": wanted.previous_response_id,
            "prompt_cache_key": wanted.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "safety_identifier": wanted.safety_identifier,
            "service_tier": "default",
            "store": self.stored,
            "temperature": self.params.temperature,
            "text": {
                "format": (text.format if text is not None else None) or {"type": "text"},
                "verbosity": (text.verbosity if text is not None else None) or "medium",
            },
            "tool_choice": wanted.tool_choice or "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool["name"],
                    "description": tool.get("description"),
                    "parameters": tool.get("parameters"),
                    "strict": bool(tool.get("strict")),
                }
                for tool in wanted.tools or ()
            ],
            "top_logprobs": wanted.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": wanted.truncation or "disabled",
            "usage": self._usage_body if self.ended else None,
            "user": wanted.user,
        }
        if self._kv_transfer_params is not None:
            made["kv_transfer_params"] = self._kv_transfer_params
        return made
