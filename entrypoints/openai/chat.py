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
from ...core.engine.output import OutputStream
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
)
from .answers import ChatAnswer, ChatChunk
from .context import (
    ENGINE,
    LONG_TEXT,
    OPTIONS,
    ServerOptions,
    check_model,
    check_priority,
    new_id,
    reply,
    tokenizer_of,
    usage,
)
from .held_calls import HeldCalls, forced_calls, free_calls
from .logprobs import chat_logprobs, prompt_logprobs
from .openapi import documented
from .protocol import ChatRequest, decode
from .streaming import Template, frame, stream_outputs
from .template_fields import template_arguments
from .tool_choice import apply_allowed_tools, check_tools, first_call_only


@documented("chat", request=ChatRequest, answer=ChatAnswer, event=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    engine = request.app[ENGINE]
    asked = decode(await request.read(), ChatRequest)
    job = _Job(engine, asked, request.app[OPTIONS])
    if asked.stream:
        pieces = ChatPieces(job)
        return await stream_outputs(request, job.outputs(), pieces.encode, pieces.last)
    return reply(await job.whole())


class _Choice:
    """One of n answers as it is parsed."""

    def __init__(
        self,
        parser: OutputParser,
        thought: ReasoningTracker | None,
        new_call_id: Callable[[], str],
        one_call: bool = False,
    ) -> None:
        """`one_call`: show the first tool call alone."""
        self.parser = parser
        self.thought = thought
        self.new_call_id = new_call_id
        self.one_call = one_call
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
        if self.one_call:
            events = first_call_only(events)
        for event in events:
            if isinstance(event, ToolCallStart):
                self.called = True
        return events

    def whole(self, completion: CompletionOutput) -> ParsedMessage:
        """A finished completion in one piece."""
        self.count(completion)
        return fold(self.feed(completion))


class _Job:
    def __init__(
        self, engine: AsyncEngine, asked: ChatRequest, options: ServerOptions | None = None
    ) -> None:
        options = options or ServerOptions()
        asked.check()
        check_tools(asked)
        apply_allowed_tools(asked)
        self.role = options.response_role
        self.engine = engine
        self.asked = asked
        self.model = check_model(engine, asked.model)
        check_priority(engine, asked.priority)
        self.id = new_id("chatcmpl", asked.request_id)
        self.created = int(time.time())
        self.template_arguments = template_arguments(
            engine, asked, options.trust_request_chat_template
        )
        self.echoed = _last_words(asked)
        logprobs = asked.shown_logprobs(engine.config.max_logprobs)
        self.params = asked.sampling(asked.token_limit, logprobs)
        self.uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        config, plugins = engine.config, engine.plugins
        self.reasoning: type[ReasoningParser] | None = None
        self.tools: Callable[..., ToolParser] | None = None
        if config.reasoning_parser is not None:
            self.reasoning = plugins["reasoning_parser"].load(config.reasoning_parser)
        if self.uses_tools and config.tool_call_parser is not None:
            self.tools = plugins["tool_parser"].load(config.tool_call_parser)
        self.held = self._held_calls()
        if self.held is not None:
            self.tools = self.held.parser
            self.params = msgspec.structs.replace(self.params, structured_outputs=self.held.params)
        parsers: list[Any] = [
            parser for parser in (self.reasoning, self.tools) if parser is not None
        ]
        if parsers and hides_markers(tokenizer_of(engine), parsers):
            self.params = msgspec.structs.replace(self.params, skip_special_tokens=False)

    def _held_calls(self) -> HeldCalls | None:
        """The grammar that holds tool calls to their schemas, where one is asked for."""
        format = self.params.structured_outputs
        config = self.engine.config.structured_outputs_config
        held = forced_calls(self.asked, self.tools, config)
        if held is not None:
            if format is not None:
                raise InvalidRequest(
                    "tool_choice: forces tool calls, so the output can follow no other grammar",
                    param="tool_choice",
                )
            return held
        if not self.uses_tools:
            return None
        if self.tools is None:
            raise InvalidRequest(
                "tools: this server has no tool-call parser; start it with --tool-call-parser",
                param="tools",
            )
        return free_calls(self.asked, self.tools, config, format)

    def _choice(self) -> _Choice:
        reasoning = tools = tracker = None
        if self.reasoning is not None:
            thinking = lets_think(self.reasoning, self.template_arguments)
            reasoning = self.reasoning(thinking=thinking)
            tracker = ReasoningTracker(self.reasoning(thinking=thinking), tokenizer_of(self.engine))
        if self.tools is not None:
            tools = self.tools(tools=self.asked.tools or ())
        new_call_id = getattr(self.tools, "new_id", _call_id)
        one_call = self.asked.parallel_tool_calls is False
        return _Choice(OutputParser(reasoning, tools), tracker, new_call_id, one_call)

    def outputs(self) -> OutputStream:
        """What the engine makes of the request."""
        asked = self.asked
        return self.engine.chat(
            asked.messages,
            self.params,
            tools=asked.tools if self.uses_tools else None,
            chat_template_kwargs=self.template_arguments,
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            documents=asked.documents,
            chat_template=asked.chat_template,
            add_special_tokens=asked.add_special_tokens,
            request_id=self.id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece: the fold of its events."""
        output: RequestOutput | None = None
        async for output in self.outputs():  # noqa: B007
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
            if self.echoed:
                body["content"] = self.echoed + (message.content or "")
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
        pieces = ChatPieces(self)
        async for output in self.outputs():
            for piece in pieces.frames(output):
                yield piece
        if last := pieces.last():
            yield last

    def _opening(self, output: RequestOutput, running: dict[str, Any] | None) -> list[bytes]:
        """The first frames: each answer's role, what is echoed, and what is told of the prompt."""
        prompt: dict[str, Any] = {}
        if self.asked.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.asked.return_token_ids:
            prompt["prompt_token_ids"] = output.prompt_token_ids
        frames = []
        for index in range(self.params.n):
            delta = {"role": self.role, "content": ""}
            frames.append(self._frame(index, delta, running, body=prompt if index == 0 else None))
            if self.echoed:
                frames.append(self._frame(index, {"content": self.echoed}, running))
        return frames

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
        named = self.held is not None and self.held.named
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
        token_ids: list[int] | None = None,
        body: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        body = self._body("chat.completion.chunk", [choice]) | (body or {})
        if running is not None:
            body["usage"] = running
        return frame(body)

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        return chat_logprobs(
            positions,
            self.asked.top_logprobs or 0,
            tokenizer_of(self.engine),
            self.asked.return_tokens_as_token_ids,
        )


_TEXTS = (Content, Reasoning, ToolCallArguments)
"""Events that are one text."""


class ChatPieces:
    """A streamed answer, output by output. Texts with nothing beside them go through templates."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._choices = [job._choice() for _ in range(job.params.n)]
        asked = job.asked
        self._plain = not (asked.logprobs or asked.continuous_usage or asked.return_token_ids)
        """Whether pieces carry nothing but their text."""
        self._texts = _TEXTS if asked.include_reasoning else (Content, ToolCallArguments)
        self._opened = False
        self._output: RequestOutput | None = None
        self._content: Template | None = None
        """Where there is one choice and no parser."""
        self._templates: dict[tuple[int, Any], Template] = {}
        """(Choice, kind of event or index of the call) → its frame."""

    def encode(self, output: RequestOutput) -> bytes:
        """Frames of what the output brings."""
        if not self._plain or not self._opened or len(output.outputs) > 1:
            return b"".join(self.frames(output))
        completion = output.outputs[0]
        if completion.finish_reason is not None:
            return b"".join(self.frames(output))
        # What most outputs are: more text of one choice, in the middle of it.
        self._output = output
        index = completion.index
        choice = self._choices[index]
        choice.count(completion)
        if choice.parser.plain:
            if not completion.text:
                return b""
            if self._content is None:
                self._content = self._template(index, Content(""))
            return self._content.frame(completion.text)
        events = choice.feed(completion)
        if len(events) == 1 and isinstance(events[0], self._texts):
            return self._text(index, events[0])
        return b"".join(self._event_frames(choice, index, events, None, None))

    def frames(self, output: RequestOutput) -> list[bytes]:
        """The same, one by one."""
        job, choices = self._job, self._choices
        self._output = output
        for completion in output.outputs:
            choices[completion.index].count(completion)
        running = job._usage(output, choices) if job.asked.continuous_usage else None
        made: list[bytes] = []
        if not self._opened:
            self._opened = True
            made += job._opening(output, running)
        for completion in output.outputs:
            job._check(output, completion)
            choice, index = choices[completion.index], completion.index
            logprobs = job._logprobs(completion.logprobs)
            token_ids = completion.token_ids if job.asked.return_token_ids else None
            events = choice.feed(completion)
            made += self._event_frames(choice, index, events, running, logprobs, token_ids)
            if completion.finish_reason is not None:
                reason = job._finish_reason(completion, choice)
                end = completion.stop_reason
                made.append(job._frame(index, {}, running, None, reason, end))
        return made

    def _event_frames(
        self,
        choice: _Choice,
        index: int,
        events: list[ParserEvent],
        running: dict[str, Any] | None,
        logprobs: dict[str, Any] | None,
        token_ids: list[int] | None = None,
    ) -> list[bytes]:
        job = self._job
        made: list[bytes] = []
        for event in events:
            if self._plain and isinstance(event, self._texts):
                made.append(self._text(index, event))
                continue
            delta = _delta(event, choice, job.asked.include_reasoning)
            if delta is not None:
                made.append(job._frame(index, delta, running, logprobs, token_ids=token_ids))
                logprobs = token_ids = None
        if (logprobs is not None and logprobs["content"]) or token_ids:
            empty = {"content": ""}
            made.append(job._frame(index, empty, running, logprobs, token_ids=token_ids))
        return made

    def last(self) -> bytes:
        """The frame with the usage, if it was asked for."""
        job = self._job
        if not job.asked.include_usage or self._output is None:
            return b""
        body = job._body("chat.completion.chunk", [])
        body["usage"] = job._usage(self._output, self._choices)
        return frame(body)

    def _text(self, index: int, event: Content | Reasoning | ToolCallArguments) -> bytes:
        """The frame of an event that is one text."""
        key: tuple[int, Any]
        if isinstance(event, ToolCallArguments):
            text, key = event.fragment, (index, event.index)
        else:
            text, key = event.text, (index, type(event))
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._template(index, event)
        return template.frame(text)

    def _template(self, index: int, event: Content | Reasoning | ToolCallArguments) -> Template:
        return Template(lambda text: self._job._frame(index, _text_delta(event, text), None))


def _text_delta(event: Content | Reasoning | ToolCallArguments, text: str) -> dict[str, Any]:
    """The delta of an event that is one text, with another text."""
    match event:
        case Content():
            return {"content": text}
        case Reasoning():
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallArguments(index):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(event: ParserEvent, choice: _Choice, reasoning: bool) -> dict[str, Any] | None:
    """One event as OpenAI streams it."""
    match event:
        case Content(text):
            return _text_delta(event, text)
        case Reasoning(text):
            return _text_delta(event, text) if reasoning else None
        case ToolCallStart(index, name, id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id or choice.new_call_id(), "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case ToolCallArguments(_, fragment):
            return _text_delta(event, fragment)
        case ToolCallEnd():
            return None


def _last_words(asked: ChatRequest) -> str:
    """With `echo`, the last message's text, if it is the assistant's: the answer goes on from it,
    and shows it."""
    last = asked.messages[-1] if asked.echo and asked.messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
