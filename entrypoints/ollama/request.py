"""A response in progress: a chat's or a completion's outputs as Ollama's lines of JSON."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...core.engine.async_engine import AsyncEngine
from ...core.engine.output_stream import OutputStream
from ...core.errors import ContextLengthExceeded, RequestFailed
from ...core.output_parsing.output_parser import OutputParser
from ...core.outputs import RequestOutput
from ...core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ...core.sampling_params import SamplingParams
from ...core.text.text_threads import rough_size
from ...core.text.token_limit import LONG_TEXT
from ..http.context import check_priority, encoder, new_id, tokenizer_of
from ..http.large_responses import off_loop
from ..http.request_log import watched
from ..http.streaming import Protocol, output_size
from ..openai.chat.call_arguments import as_object
from ..openai.chat.chat_template_kwargs import thinking_switch
from ..openai.chat.job import ChatJob, check_completion, new_job
from ..openai.chat.parsers import Choice
from ..openai.chat.truncation import fit_to_context, room_for_prompt
from ..openai.common.logprobs import chat_logprobs
from ..openai.common.protocol import CompletionRequest
from .errors import error_body
from .messages import turn_starts
from .protocol import GenerateRequest, OllamaChatRequest, TextRequest, in_own_terms

Line = dict[str, Any]


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:8]}"


def line_frame(line: Line) -> bytes:
    return encoder.encode(line) + b"\n"


def protocol(names: dict[str, str]) -> Protocol:
    """Return how a stream fails. names: as of `in_own_terms`."""
    return Protocol(
        failure=lambda error: line_frame(error_body(in_own_terms(error, names))),
        end=b"",
        content_type="application/x-ndjson",
    )


class RawJob(msgspec.Struct, frozen=True):
    """A prompt that is completed as it is."""

    engine: AsyncEngine
    model: str
    request: CompletionRequest
    params: SamplingParams

    def new_choice(self) -> Choice:
        return Choice(OutputParser(None, None), call_id)

    def outputs(self) -> OutputStream:
        request = self.request
        options = request.origin.engine_options(
            new_id("cmpl"), request.priority, request.cache_salt
        )
        prompt = request.prompt
        assert isinstance(prompt, str)
        return watched(self.engine.generate(prompt, self.params, **options))


async def new_chat_job(engine: AsyncEngine, body: OllamaChatRequest | GenerateRequest) -> ChatJob:
    """Raises InvalidRequest with the field of a chat request, and EngineOverloaded if too many
    texts wait.
    """
    read = functools.partial(body.chat, thinking_switch(engine))
    size = rough_size(body.messages if isinstance(body, OllamaChatRequest) else body.prompt)
    chat = read() if size < LONG_TEXT else await engine.in_text_threads(size, read)
    job = new_job(engine, chat, new_id("chatcmpl"))
    return msgspec.structs.replace(job, params=_until_context_ends(job.params))


def new_raw_job(engine: AsyncEngine, body: GenerateRequest) -> RawJob:
    request = body.completion()
    request.check()
    check_priority(engine, request.priority)
    defaults = engine.model_config.sampling
    params = request.sampling(request.max_tokens, request.logprobs, defaults)
    return RawJob(engine, body.model, request, _until_context_ends(params))


def _until_context_ends(params: SamplingParams) -> SamplingParams:
    """If the context has no room for `num_predict`, the output ends at the end of the context."""
    return msgspec.structs.replace(params, max_tokens_field=None)


class Reply:
    """A validated request, and the lines of its response."""

    def __init__(self, job: ChatJob | RawJob, body: TextRequest) -> None:
        self._job = job
        self._body = body
        self._choice = job.new_choice(call_id) if isinstance(job, ChatJob) else job.new_choice()
        self._in_message = isinstance(body, OllamaChatRequest)
        self._call: Line | None = None
        """The call that the output is in."""
        self._num_calls = 0
        self._arguments: list[str] = []
        self._start = time.monotonic()

    @property
    def streams(self) -> bool:
        return self._body.stream

    async def outputs(self) -> OutputStream:
        """Return the admitted request's outputs; a conversation that is too long loses its oldest
        turns (`truncate`). Raises as the engine.
        """
        job = self._job
        outputs = job.outputs()
        try:
            await outputs.admit()
        except ContextLengthExceeded:
            if not (self._body.truncate and isinstance(job, ChatJob)):
                raise
            job = await self._truncated(job)
            outputs = job.outputs()
            await outputs.admit()
        return outputs

    async def _truncated(self, job: ChatJob) -> ChatJob:
        messages = job.messages
        num_system, begins = turn_starts(messages)
        return await fit_to_context(
            job,
            begins,
            lambda begin: messages[:num_system] + messages[begin:],
            room=room_for_prompt(job.engine.model_config.max_model_len, job.params.max_tokens),
            size=rough_size(messages),
        )

    def encode(self, output: RequestOutput) -> bytes:
        return b"".join([line_frame(line) for line in self.lines(output)])

    async def full_response(self) -> Line:
        output: RequestOutput | None = None
        async for output in await self.outputs():  # noqa: B007
            pass
        assert output is not None
        if len(output.outputs[0].text) >= LONG_TEXT:
            return folded(await asyncio.to_thread(self.lines, output))
        return folded(await off_loop(output_size(output, first=True), self.lines, output))

    def lines(self, output: RequestOutput) -> list[Line]:
        (completion,) = output.outputs
        check_completion(output, completion)
        if completion.finish_reason == "abort":  # The protocol has no done_reason for it.
            raise RequestFailed("the request was aborted")
        lines = [
            line
            for event in self._choice.parse(completion)
            if (line := self._event_line(event)) is not None
        ]
        if completion.finish_reason is not None and self._call is not None:
            lines.append(self._end_call())  # The output was cut off in a call.
        if completion.logprobs is not None:
            entries = chat_logprobs(
                completion.logprobs, self._body.top_logprobs, tokenizer_of(self._job.engine)
            )
            lines = lines or [self._line()]
            lines[0]["logprobs"] = entries["content"]
        if completion.finish_reason is not None:
            lines.append(self._last_line(output, completion.finish_reason))
        return lines

    def _event_line(self, event: ParserEvent) -> Line | None:
        match event:
            case Content(text):
                return self._line(text)
            case Reasoning(text):
                return None if self._body.think is False else self._line(thinking=text)
            case ToolCallStart(_, name, id):
                self._call = {"id": id or self._choice.new_call_id(), "name": name}
                self._arguments = []
            case ToolCallArguments(_, fragment):
                self._arguments.append(fragment)
            case ToolCallEnd():
                return self._end_call()
        return None

    def _end_call(self) -> Line:
        """Return the line of the whole call: the protocol has no parts of arguments."""
        assert self._call is not None
        call, self._call = self._call, None
        function = {
            "index": self._num_calls,
            "name": call["name"],
            "arguments": as_object("".join(self._arguments)),
        }
        self._num_calls += 1
        return self._line(tool_calls=[{"id": call["id"], "function": function}])

    def _line(self, text: str = "", **fields: Any) -> Line:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line: Line = {"model": self._job.model, "created_at": created}
        if self._in_message:
            line["message"] = {"role": "assistant", "content": text, **fields}
        else:
            line |= {"response": text, **fields}
        line["done"] = False
        return line

    def _last_line(self, output: RequestOutput, reason: str) -> Line:
        timings = output.timings
        begin = timings.first_scheduled or timings.arrival
        first = timings.first_token or begin
        line = self._line() | {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(time.monotonic() - self._start),
            "load_duration": 0,
            "prompt_eval_count": output.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - begin),
            "eval_count": self._choice.parser.num_tokens,
            "eval_duration": _nanoseconds((timings.last_token or first) - first),
        }
        if output.kv_compression is not None:
            line["kv_cache_details"] = msgspec.structs.asdict(output.kv_compression)
        return line

    def loaded(self) -> Line:
        """Return the response to a request without a prompt: the model is loaded."""
        return self._line() | {"done": True, "done_reason": "load"}


def folded(lines: Iterable[Line]) -> Line:
    """Return one response of a stream's lines."""
    lines = list(lines)
    whole = lines[-1]
    place = whole.get("message", whole)
    for field in ("response", "content", "thinking", "tool_calls"):
        parts = [part for line in lines if (part := line.get("message", line).get(field))]
        if parts and field == "tool_calls":
            place[field] = [call for calls in parts for call in calls]
        elif parts:
            place[field] = "".join(parts)
    for line in lines:
        if "logprobs" in line:
            whole["logprobs"] = line["logprobs"]
    return whole


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
