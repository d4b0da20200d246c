"""A validated chat request: the engine's request, and the parsing of its output.

Used by chat completions (request.py), responses (../responses/request.py) and Anthropic's messages.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.engine.output_stream import OutputStream
from ....core.engine.text_processor import ChatOptions
from ....core.output_parsing.output_parser import hides_markers
from ....core.outputs import CompletionOutput, RequestOutput
from ....core.sampling_params import SamplingParams
from ...http.auth.origin import EngineOptions
from ...http.context import check_priority, tokenizer_of
from ...http.model_names import model_name
from ...http.request_log import watched
from ..common.protocol import ChatRequest
from .chat_template_kwargs import template_arguments
from .constrained_calls import ConstrainedCalls, constrained_calls
from .parsers import Choice, Parsers, choose_parsers
from .tools import ChatTools, read_tools


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class ChatJob(msgspec.Struct, frozen=True):
    engine: AsyncEngine
    id: str
    model: str
    """Its name for the response."""
    request: ChatRequest
    messages: list[dict[str, Any]]
    rendering: ChatOptions
    """How messages become the prompt."""
    params: SamplingParams
    tools: ChatTools
    parsers: Parsers
    calls: ConstrainedCalls | None
    """The tool calls' grammar, if any."""

    @property
    def names_call(self) -> bool:
        return self.calls is not None and self.calls.named

    def new_choice(self, default_id: Callable[[], str] = _call_id) -> Choice:
        """Create one completion's parsers.

        default_id: creates tool call ids, unless the model's family has its own.
        """
        return Choice(
            self.parsers.new_parser(self.tools),
            self.parsers.call_ids(default_id),
            one_call=not self.tools.parallel,
            only_calls=self.calls is not None and self.calls.required,
        )

    def outputs(self) -> OutputStream:
        options, expected = self._engine_options(), self.request.predicted
        return watched(
            self.engine.chat(
                self.messages, self.params, prediction=expected, **self.rendering, **options
            )
        )

    async def searched(self) -> AsyncIterator[RequestOutput]:
        """Yield the output of a beam search. Raises as `outputs`."""
        token_ids = await self.engine.tokenize_chat(
            self.messages,
            limit=self.engine.prompt_limit(self.params, "messages"),
            **self.rendering,
        )
        options = self._engine_options()
        search = self.request.beam_search(self.engine, token_ids, self.params, options)
        async for output in search.outputs():
            yield output

    async def abort(self) -> None:
        await self.engine.abort(self._engine_options()["request_id"])

    def _engine_options(self) -> EngineOptions:
        request = self.request
        return request.origin.engine_options(self.id, request.priority, request.cache_salt)

    async def count_prompt(self) -> int:
        return len(await self.engine.tokenize_chat(self.messages, **self.rendering))


def new_job(
    engine: AsyncEngine,
    request: ChatRequest,
    id: str,
    *,
    trust_template: bool = False,
    schemas: Mapping[str, Any] | None = None,
) -> ChatJob:
    """Validate a request. Raises InvalidRequest with the field's name.

    trust_template: requests may bring a template. schemas: see `ChatTools`.
    """
    request.check()
    tools = read_tools(request, schemas or {})
    model = model_name(engine, request.model)
    check_priority(engine, request.priority)
    arguments = template_arguments(engine, request, trust_template)
    logprobs = request.shown_logprobs(engine.config.max_logprobs)
    params = request.sampling(request.token_limit, logprobs, engine.model_config.sampling)
    parsers = choose_parsers(engine, request, tools, arguments, params)
    calls = constrained_calls(
        tools, parsers.tools, engine.config.structured_outputs_config, params.structured_outputs
    )
    if calls is not None:
        parsers = msgspec.structs.replace(parsers, tools=calls.parser)
    return ChatJob(
        engine,
        id,
        model,
        request,
        request.messages,
        _rendering(engine, request, tools, arguments),
        _constrained(engine, params, parsers, calls),
        tools,
        parsers,
        calls,
    )


def _rendering(
    engine: AsyncEngine,
    request: ChatRequest,
    tools: ChatTools,
    template_arguments: Mapping[str, Any],
) -> ChatOptions:
    shown = tools.offered or not engine.config.exclude_tools_when_tool_choice_none
    return {
        "tools": (tools.definitions or None) if shown else None,
        "chat_template_kwargs": template_arguments,
        "add_generation_prompt": request.begins_message,
        "continue_final_message": request.continue_final_message,
        "documents": request.documents,
        "chat_template": request.chat_template,
        "add_special_tokens": request.add_special_tokens,
        "mm_processor_kwargs": request.mm_processor_kwargs,
    }


def _constrained(
    engine: AsyncEngine,
    params: SamplingParams,
    parsers: Parsers,
    calls: ConstrainedCalls | None,
) -> SamplingParams:
    """Return the parameters with the calls' grammar, and the parsers' special tokens."""
    changes: dict[str, Any] = {}
    if calls is not None:
        changes["structured_outputs"] = calls.params
    if parsers.classes and hides_markers(tokenizer_of(engine), parsers.classes):
        changes["skip_special_tokens"] = False
    return msgspec.structs.replace(params, **changes) if changes else params


def check_completion(output: RequestOutput, completion: CompletionOutput) -> None:
    """Raise an error if the engine aborted because of one."""
    if completion.finish_reason == "error":
        raise output.failure()
