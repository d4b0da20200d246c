"""A message in progress: a chat completion as Anthropic's stream events."""

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
from ..http.streaming import Protocol, named_frame
from ..openai.chat.chat_template_kwargs import thinking_switch
from ..openai.chat.job import ChatJob, check_completion, new_job
from .blocks import ContentBlocks, Event, fold_events, tool_use_id
from .errors import error_body
from .protocol import CountTokensRequest, in_own_terms

PING: Event = {"type": "ping"}
PROTOCOL = Protocol(
    failure=lambda error: named_frame(error_body(in_own_terms(error))),
    end=b"",
)
"""A stream's errors; no frame follows message_stop."""


async def new_message_job(engine: AsyncEngine, body: CountTokensRequest) -> ChatJob:
    """Validate a request for a message. Raises InvalidRequest with the field's name, and
    EngineOverloaded if too many texts wait.
    """
    body.check()
    read = functools.partial(body.chat, thinking_switch(engine))
    size = rough_size(body.messages, body.system)
    if size < LONG_TEXT:
        chat = read()
    else:
        chat = await engine.in_text_threads(size, read)
    job = new_job(engine, chat, f"msg_{uuid.uuid4().hex}")
    # If the context has no room for max_tokens, the output ends at the end of the context.
    params = msgspec.structs.replace(job.params, max_tokens_field=None)
    return msgspec.structs.replace(job, params=params)


class MessageCompletion:
    """A validated request, and its growing message."""

    def __init__(self, job: ChatJob, *, shows_thinking: bool) -> None:
        self.job = job
        self._choice = job.new_choice(tool_use_id)
        self._blocks = ContentBlocks(self._choice.new_call_id, show_thinking=shows_thinking)
        self._started = False

    def encode(self, output: RequestOutput) -> bytes:
        return b"".join([named_frame(event) for event in self.events(output)])

    async def full_response(self) -> dict[str, Any]:
        output: RequestOutput | None = None
        async for output in self.job.outputs():  # noqa: B007
            pass
        assert output is not None
        if len(output.outputs[0].text) < LONG_TEXT:
            return fold_events(self.events(output))
        return fold_events(await asyncio.to_thread(self.events, output))

    def events(self, output: RequestOutput) -> list[Event]:
        (completion,) = output.outputs
        check_completion(output, completion)
        if completion.finish_reason == "abort":  # The protocol has no stop_reason for it.
            raise RequestFailed("the request was aborted")
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

    def _empty(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output),
        }

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        limit = self.job.params.max_tokens
        if sequence is not None:
            reason = "stop_sequence"
        elif completion.finish_reason == "length":
            filled = limit is None or self._choice.parser.num_tokens < limit
            reason = "model_context_window_exceeded" if filled else "max_tokens"
        else:
            reason = "tool_use" if self._choice.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return token counts; `input_tokens` excludes cached ones."""
        cached = output.num_cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": output.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.parser.num_tokens,
        }
        if self.job.parsers.reasoning is not None:
            usage["output_tokens_details"] = {
                "thinking_tokens": self._choice.parser.num_reasoning_tokens
            }
        if output.kv_compression is not None:
            usage["kv_cache_details"] = msgspec.structs.asdict(output.kv_compression)
        return usage
