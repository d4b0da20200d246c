"""A response in progress: a chat completion as /v1/responses events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest, JackfieldError, RequestFailed
from ....core.output_parsing.events import merge_events
from ....core.outputs import CompletionOutput, RequestOutput
from ....core.protocols.parsers import ParserEvent, Reasoning, ToolCallEnd
from ....core.text.token_limit import LONG_TEXT
from ...http.context import draft_details, media_details, tokenizer_of
from ...http.large_responses import off_loop
from ..chat.chat_template_kwargs import thinking_switch
from ..chat.job import ChatJob, new_job
from ..common.logprobs import num_logprobs
from .events import Event, OutputItems, call_id, no_logprobs
from .input_items import to_messages
from .item_kinds import KINDS, Item
from .logprobs import MessageLogprobs
from .protocol import ResponsesRequest, renamed
from .tools import Tools, read_tools

logger = logging.getLogger("jackfield.server")
STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled", "error": "failed"}
"""finish_reason → a response's status."""
TERMINAL = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
"""Status → last event; OpenAI has none for cancelled responses."""


def new_response_job(
    engine: AsyncEngine, body: ResponsesRequest, items: list[Item], tools: Tools
) -> ChatJob:
    """Validate a request for a response. Raises InvalidRequest with the field's name.

    items: of continued responses, and of its input. tools: of `tools_of`.
    """
    try:
        messages = to_messages(items, body.instructions)
        chat = body.chat(messages, tools, thinking_switch(engine))
        return new_job(engine, chat, body.new_id(), schemas=tools.schemas)
    except JackfieldError as error:
        raise renamed(error) from None


class ResponseCompletion:
    """A validated request, and its growing response."""

    def __init__(
        self,
        job: ChatJob,
        body: ResponsesRequest,
        earlier: list[Item],
        own: list[Item],
        tools: Tools,
        *,
        stored: bool,
    ) -> None:
        """job: of `new_response_job`; earlier: items of continued responses; own: input items;
        tools: of `tools_of`; stored: whether it will be stored.
        """
        self.job = job
        self.body = body
        self.own = own
        self.input = earlier + own
        self.stored = stored
        self.created = int(time.time())
        self.status = "queued" if body.background else "in_progress"
        self.failure: JackfieldError | None = None
        self.completed_at: int | None = None
        self._output: RequestOutput | None = None
        self._sequence = 0
        self._choice = job.new_choice(call_id)
        self._logprobs: MessageLogprobs | None = None
        if body.wants_logprobs:
            self._logprobs = MessageLogprobs(tokenizer_of(job.engine), body.top_logprobs or 0)
        self._items = OutputItems(
            self._choice.new_call_id,
            no_logprobs if self._logprobs is None else self._logprobs.entries,
            tools,
        )

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events. The first step raises if the request is invalid; later failures are
        events, and the last event is terminal.
        """
        outputs = self.job.outputs()
        try:
            try:
                await outputs.admit()
            except JackfieldError as error:
                raise renamed(error) from None
            yield self._lifecycle("response.created")
            if self.body.background:
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
                self._fail(error)
            except Exception:
                logger.exception("response %s failed", self.job.id)
                self._fail(RequestFailed("the request failed"))
            for event in self._items.close(
                "completed" if self.status == "completed" else "incomplete"
            ):
                yield self._numbered(event)
            yield self._lifecycle(TERMINAL[self.status])
        finally:
            await outputs.aclose()

    async def full_response(self) -> dict[str, Any]:
        """Return the complete response. Raises its failure."""
        async for _ in self.events():
            pass
        if self.failure is not None:
            raise self.failure
        return self.snapshot()

    async def _step(self, output: RequestOutput) -> list[Event]:
        (completion,) = output.outputs
        self._output = output
        if len(completion.text) < LONG_TEXT:
            size = num_logprobs(completion.logprobs)
            events = self._items.add(await off_loop(size, self._parse, completion))
        else:
            events = self._items.add(await asyncio.to_thread(self._parse, completion))
        if completion.finish_reason is not None:
            self.status = STATUS[completion.finish_reason]
            if self.status == "failed":
                self._fail(output.failure())
            elif self.status == "completed":
                self.completed_at = int(time.time())
        return events

    def _parse(self, completion: CompletionOutput) -> list[ParserEvent]:
        if self._logprobs is None:
            events = self._shown(self._choice.parse(completion))
        else:
            tokens = [
                (token, self._shown(events))
                for token, events in self._choice.parse_tokens(completion)
            ]
            self._logprobs.add(completion, tokens)
            events = merge_events([event for _, events in tokens for event in events])
        if self.job.names_call and completion.finish_reason != "stop":
            # The parser of a named call ends the call where the output ends.
            events = [event for event in events if not isinstance(event, ToolCallEnd)]
        return events

    def _shown(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Drop the events of reasoning that is not shown."""
        if self.body.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _fail(self, error: JackfieldError) -> None:
        self.status, self.failure = "failed", renamed(error)

    def _numbered(self, event: Event) -> Event:
        numbered = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return numbered

    def _lifecycle(self, kind: str) -> Event:
        return self._numbered({"type": kind, "response": self.snapshot()})

    def _usage(self) -> dict[str, Any] | None:
        output = self._output
        if output is None or not self.ended:
            return None
        parser = self._choice.parser
        prompt, completion = output.num_prompt_tokens, parser.num_tokens
        usage: dict[str, Any] = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "cache_write_tokens": 0,
                **media_details(output.media_tokens),
            },
            "output_tokens": completion,
            "output_tokens_details": {
                "reasoning_tokens": parser.num_reasoning_tokens,
                **draft_details(output.drafts),
            },
            "total_tokens": prompt + completion,
        }
        if output.kv_compression is not None:
            usage["kv_cache_details"] = msgspec.structs.asdict(output.kv_compression)
        return usage

    def snapshot(self) -> dict[str, Any]:
        body = self.body
        reasoning = body.reasoning
        text = body.text
        response = {
            "id": self.job.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": bool(body.background),
            "completed_at": self.completed_at,
            "error": (None if self.failure is None else _error_object(self.failure)),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self.status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.job.model,
            "output": self._items.snapshot(),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.stored,
            "temperature": self.job.params.temperature,
            "text": {
                "format": (text.format if text is not None else None) or {"type": "text"},
                "verbosity": (text.verbosity if text is not None else None) or "medium",
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.job.params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage(),
            "user": body.user,
        }
        if self._output is not None and self._output.kv_transfer_params is not None:
            response["kv_transfer_params"] = self._output.kv_transfer_params
        return response


def tools_of(body: ResponsesRequest, items: list[Item]) -> Tools:
    """Return the tools of a request and its conversation's items. Raises InvalidRequest."""
    lists: list[tuple[str, Any]] = [("tools", body.tools or [])]
    for item in items:
        if (kind := KINDS.get(item["type"])) is not None and kind.tools:
            lists.append(("input", item["tools"]))
    return read_tools(lists)


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return tool
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }


def _error_object(error: JackfieldError) -> dict[str, Any]:
    code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
    return {"code": code, "message": error.message}
