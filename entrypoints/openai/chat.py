"""POST /v1/chat/completions

The streamed pieces are parser events as they come; the whole answer is the fold of the same events.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, RequestFailed
from ...core.protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ReasoningParser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from ...core.text.parsing import OutputParser, ParsedMessage, fold, hides_markers
from ...core.text.reasoning import ReasoningTracker, lets_think
from ...core.types import (
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from .answers import ChatAnswer, ChatChunk
from .context import ENGINE, LONG_TEXT, OPTIONS, check_model, new_id, reply, tokenizer_of, usage
from .logprobs import chat_logprobs, prompt_logprobs
from .openapi import documented
from .protocol import ChatRequest, decode
from .streaming import frame, stream
from .structured import forced_calls, strict_calls


@documented("chat", request=ChatRequest, answer=ChatAnswer, event=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    engine = request.app[ENGINE]
    asked = decode(await request.read(), ChatRequest)
    job = _Job(engine, asked, request.app[OPTIONS].response_role)
    if asked.stream:
        frames = job.frames()
        return await stream(request, frames, frames.__anext__)
    return reply(await job.whole())


class _Choice:
    """One of n answers as it is parsed."""

    def __init__(
        self,
        parser: OutputParser,
        thought: ReasoningTracker | None,
        new_call_id: Callable[[], str],
    ) -> None:
        self.parser = parser
        self.thought = thought
        self.new_call_id = new_call_id
        self.num_tokens = 0
        self.called = False

    def count(self, completion: CompletionOutput) -> None:
        """Count the completion's tokens, for `usage`."""
        self.num_tokens += len(completion.token_ids)
        if self.thought is not None:
            self.thought.push(completion.token_ids)

    def feed(self, completion: CompletionOutput) -> list[ParserEvent]:
        events = self.parser.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            events = events + self.parser.finish()
        for event in events:
            if isinstance(event, ToolCallStart):
                self.called = True
        return events

    def whole(self, completion: CompletionOutput) -> ParsedMessage:
        """A finished completion in one piece."""
        self.count(completion)
        return fold(self.feed(completion))


class _Job:
    def __init__(self, engine: AsyncEngine, asked: ChatRequest, role: str = "assistant") -> None:
        asked.check()
        self.role = role
        self.engine = engine
        self.asked = asked
        self.model = check_model(engine, asked.model)
        self.id = new_id("chatcmpl", asked.request_id)
        self.created = int(time.time())
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        self.params = asked.sampling(asked.token_limit, logprobs)
        self.uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        self.forced = forced_calls(asked, engine.config.structured_outputs_config)
        if self.uses_tools and self.forced is None and engine.config.tool_call_parser is None:
            raise InvalidRequest(
                "tools: this server has no tool-call parser; start it with --tool-call-parser",
                param="tools",
            )
        config, plugins = engine.config, engine.plugins
        self.reasoning: type[ReasoningParser] | None = None
        self.tools: Callable[..., ToolParser] | None = None
        if config.reasoning_parser is not None:
            self.reasoning = plugins["reasoning_parser"].load(config.reasoning_parser)
        if self.forced is not None:
            self.tools = self.forced.parser
        elif self.uses_tools:
            self.tools = plugins["tool_parser"].load(config.tool_call_parser or "")
        parsers: list[Any] = [
            parser for parser in (self.reasoning, self.tools) if parser is not None
        ]
        if parsers and hides_markers(tokenizer_of(engine), parsers):
            self.params = msgspec.structs.replace(self.params, skip_special_tokens=False)
        self.params = self._with_calls(self.params)

    def _with_calls(self, params: SamplingParams) -> SamplingParams:
        """With the grammar that holds tool calls to their schemas, where one is asked for."""
        if self.forced is not None:
            grammar: StructuredOutputsParams | None = self.forced.params
            if params.structured_outputs is not None:
                raise InvalidRequest(
                    "tool_choice: forces tool calls, so the output can follow no other grammar",
                    param="tool_choice",
                )
        elif self.uses_tools and params.structured_outputs is None:
            parser = self.engine.plugins["tool_parser"].load(
                self.engine.config.tool_call_parser or ""
            )
            config = self.engine.config.structured_outputs_config
            grammar = strict_calls(self.asked, parser, config)
        else:
            return params
        return msgspec.structs.replace(params, structured_outputs=grammar)

    def _choice(self) -> _Choice:
        reasoning = tools = tracker = None
        if self.reasoning is not None:
            thinking = lets_think(self.reasoning, self.asked.chat_template_kwargs or {})
            reasoning = self.reasoning(thinking=thinking)
            tracker = ReasoningTracker(self.reasoning(thinking=thinking), tokenizer_of(self.engine))
        if self.tools is not None:
            tools = self.tools(tools=self.asked.tools or ())
        new_call_id = getattr(self.tools, "new_id", _call_id)
        return _Choice(OutputParser(reasoning, tools), tracker, new_call_id)

    def _outputs(self) -> Any:
        asked = self.asked
        return self.engine.chat(
            asked.messages,
            self.params,
            tools=asked.tools if self.uses_tools else None,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            request_id=self.id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece: the fold of its events."""
        output: RequestOutput | None = None
        async for output in self._outputs():  # noqa: B007
            pass
        assert output is not None
        choices, parsed = [], []
        for completion in output.outputs:
            self._check(output, completion)
            choice = self._choice()
            if len(completion.text) < LONG_TEXT:
                message = choice.whole(completion)
            else:
                message = await asyncio.to_thread(choice.whole, completion)
            parsed.append(choice)
            body: dict[str, Any] = {"role": self.role, "content": message.content}
            if message.reasoning is not None and self.asked.include_reasoning:
                body["reasoning_content"] = body["reasoning"] = message.reasoning
            if message.tool_calls:
                body["tool_calls"] = [
                    {
                        "id": call.id or choice.new_call_id(),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in message.tool_calls
                ]
            elif message.content is None:
                body["content"] = ""
            made: dict[str, Any] = {
                "index": completion.index,
                "message": body,
                "logprobs": self._logprobs(completion.logprobs),
                "finish_reason": self._finish_reason(completion, choice),
                "stop_reason": completion.stop_reason,
            }
            if self.asked.return_token_ids:
                made["token_ids"] = completion.token_ids
            choices.append(made)
        body = self._body("chat.completion", choices)
        body["usage"] = self._usage(output, parsed)
        if self.asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.asked.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if output.kv_transfer_params is not None:
            body["kv_transfer_params"] = output.kv_transfer_params
        return body

    async def frames(self) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        choices = [self._choice() for _ in range(self.params.n)]
        opened = False
        output: RequestOutput | None = None
        async for output in self._outputs():
            for completion in output.outputs:
                choices[completion.index].count(completion)
            running = self._usage(output, choices) if self.asked.continuous_usage else None
            if not opened:
                opened = True
                for index in range(len(choices)):
                    yield self._frame(index, {"role": self.role, "content": ""}, running)
            for completion in output.outputs:
                self._check(output, completion)
                choice = choices[completion.index]
                events = choice.feed(completion)
                logprobs = self._logprobs(completion.logprobs)
                for event in events:
                    delta = _delta(event, choice, self.asked.include_reasoning)
                    if delta is not None:
                        yield self._frame(completion.index, delta, running, logprobs)
                        logprobs = None
                if logprobs is not None and logprobs["content"]:
                    yield self._frame(completion.index, {"content": ""}, running, logprobs)
                if completion.finish_reason is not None:
                    yield self._frame(
                        completion.index,
                        {},
                        running,
                        None,
                        self._finish_reason(completion, choice),
                        completion.stop_reason,
                    )
        if self.asked.include_usage and output is not None:
            body = self._body("chat.completion.chunk", [])
            body["usage"] = self._usage(output, choices)
            yield frame(body)

    def _check(self, output: RequestOutput, completion: CompletionOutput) -> None:
        if completion.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")

    def _usage(self, output: RequestOutput, choices: list[_Choice]) -> dict[str, Any]:
        counts = [c.thought.num_reasoning_tokens for c in choices if c.thought is not None]
        return usage(
            len(output.prompt_token_ids),
            sum(choice.num_tokens for choice in choices),
            output.num_cached_tokens,
            sum(counts) if self.reasoning is not None else None,
        )

    def _finish_reason(self, completion: CompletionOutput, choice: _Choice) -> str | None:
        named = self.forced is not None and self.forced.named
        if choice.called and not named and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def _body(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _frame(
        self,
        index: int,
        delta: dict[str, Any],
        running: dict[str, Any] | None,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        body = self._body("chat.completion.chunk", [choice])
        if running is not None:
            body["usage"] = running
        return frame(body)

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        return chat_logprobs(positions, self.asked.top_logprobs or 0, tokenizer_of(self.engine))


def _delta(event: ParserEvent, choice: _Choice, reasoning: bool) -> dict[str, Any] | None:
    """One event as OpenAI streams it."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text} if reasoning else None
        case ToolCallStart(index, name, id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id or choice.new_call_id(), "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case ToolCallEnd():
            return None


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
