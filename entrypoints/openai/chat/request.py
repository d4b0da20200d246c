"""A chat request in progress: what is requested of the engine, and how its output is parsed.

routes.py sends it as one response, stream.py as chunks; a response (../responses/request.py) and a
message of Anthropic's protocol are chat requests, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.engine.output_stream import OutputStream
from ....core.errors import InvalidRequest
from ....core.output_parsing.completion_parser import CompletionParser, TokenText
from ....core.output_parsing.output_parser import OutputParser, ParsedMessage, fold, hides_markers
from ....core.output_parsing.reasoning_parser import is_thinking, make_parser
from ....core.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ....core.protocols.parsers import (
    Content,
    ParserEvent,
    ReasoningParser,
    ToolCallStart,
    ToolParser,
)
from ...http.context import check_model, check_priority, new_id, tokenizer_of, usage
from ...http.options import ServerOptions
from ...http.request_log import watched
from ..common.logprobs import chat_logprobs
from ..common.protocol import ChatRequest
from .chat_template_kwargs import template_arguments
from .constrained_calls import ConstrainedCalls, required_calls, voluntary_calls
from .tool_choice import apply_allowed_tools, check_tools, first_call_only


class Choice:
    """One of the `n` completions of a request as it is parsed."""

    def __init__(
        self,
        parser: OutputParser,
        new_call_id: Callable[[], str],
        *,
        one_call: bool = False,
        only_calls: bool = False,
    ) -> None:
        """one_call: keep only the first tool call. only_calls: the output has no content; what
        looks like it is the markup of a call that was cut off before its name."""
        self.parser = CompletionParser(parser)
        self.new_call_id = new_call_id
        self.one_call = one_call
        self.only_calls = only_calls
        self.has_calls = False

    def parse(self, output: CompletionOutput) -> list[ParserEvent]:
        """Return the events of the next output. Raises RequestFailed if a parser fails."""
        return self._checked(self.parser.feed(output))

    def parse_tokens(
        self, output: CompletionOutput
    ) -> Iterator[tuple[TokenText, list[ParserEvent]]]:
        """Yield the events of each token of the next output; replaces `parse` for a whole
        completion."""
        for token, events in self.parser.feed_tokens(output):
            yield token, self._checked(events)

    def _checked(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self.one_call:
            events = first_call_only(events)
        if self.only_calls:
            events = [event for event in events if not isinstance(event, Content)]
        for event in events:
            if isinstance(event, ToolCallStart):
                self.has_calls = True
        return events

    def parse_message(self, output: CompletionOutput) -> ParsedMessage:
        """Parse a finished completion as a whole."""
        return fold(self.parse(output))


class ChatCompletion:
    """A validated request, with the fields that its responses share."""

    def __init__(
        self, engine: AsyncEngine, request: ChatRequest, options: ServerOptions | None = None
    ) -> None:
        """Validate a request. Raises InvalidRequest with the field's name."""
        options = options or ServerOptions()
        request.check()
        check_tools(request)
        apply_allowed_tools(request)
        self.role = options.response_role
        self.engine = engine
        self.request = request
        self.model = check_model(engine, request.model)
        check_priority(engine, request.priority)
        self.id = new_id("chatcmpl", request.request_id)
        self.created = int(time.time())
        self.template_arguments = template_arguments(
            engine, request, options.trust_request_chat_template
        )
        self.echoed = _echoed_text(request)
        logprobs = request.shown_logprobs(engine.config.max_logprobs)
        self.params = request.sampling(request.token_limit, logprobs, engine.model_config.sampling)
        self.uses_tools = bool(request.tools) and request.tool_choice != "none"
        config, plugins = engine.config, engine.plugins
        self.prompt_end = ""
        self.reasoning_parser: type[ReasoningParser] | None = None
        self.tool_parser: Callable[..., ToolParser] | None = None
        if config.reasoning_parser is not None:
            self.reasoning_parser = plugins["reasoning_parser"].load(config.reasoning_parser)
        if self.reasoning_parser is not None and request.chat_template is None:
            if request.add_generation_prompt and not request.continue_final_message:
                self.prompt_end = engine.prompt_end(self.template_arguments)
        dialects = engine.model_config.dialects
        without_tools = (
            dialects.calls_without_tools
            and dialects.tool_call_parser == config.tool_call_parser
            and request.tool_choice != "none"
            and self.params.structured_outputs is None
        )
        if (self.uses_tools or without_tools) and config.tool_call_parser is not None:
            self.tool_parser = plugins["tool_parser"].load(config.tool_call_parser)
        self.constrained_calls = self._constrained_calls()
        if self.constrained_calls is not None:
            self.tool_parser = self.constrained_calls.parser
            self.params = msgspec.structs.replace(
                self.params, structured_outputs=self.constrained_calls.params
            )
        parsers: list[Any] = [
            parser for parser in (self.reasoning_parser, self.tool_parser) if parser is not None
        ]
        if parsers and hides_markers(tokenizer_of(engine), parsers):
            self.params = msgspec.structs.replace(self.params, skip_special_tokens=False)

    def _constrained_calls(self) -> ConstrainedCalls | None:
        """Return the grammar of the tool calls, if they need one.

        A required call takes precedence over every other grammar. Raises InvalidRequest.
        """
        config = self.engine.config.structured_outputs_config
        calls = required_calls(self.request, self.tool_parser, config)
        if calls is not None:
            return calls
        if not self.uses_tools:
            return None
        if self.tool_parser is None:
            raise InvalidRequest(
                "tools: this server has no tool-call parser; start it with --tool-call-parser",
                param="tools",
            )
        return voluntary_calls(
            self.request, self.tool_parser, config, self.params.structured_outputs
        )

    def new_choice(self) -> Choice:
        """Create the parsers of one of the `n` completions."""
        config, plugins = self.engine.config, self.engine.plugins
        reasoning = tools = None
        if self.reasoning_parser is not None:
            thinking = is_thinking(self.reasoning_parser, self.template_arguments)
            with plugins["reasoning_parser"].calling(config.reasoning_parser, "its constructor"):
                reasoning = make_parser(
                    self.reasoning_parser,
                    thinking=thinking,
                    prompt_end=self.prompt_end,
                    template_arguments=self.template_arguments,
                )
        if self.tool_parser is not None:
            with plugins["tool_parser"].calling(config.tool_call_parser, "its constructor"):
                tools = self.tool_parser(tools=self.request.tools or ())
        new_call_id = getattr(self.tool_parser, "new_id", _call_id)
        one_call = self.request.parallel_tool_calls is False
        parser = OutputParser(reasoning, tools, names=self._parser_names())
        calls = self.constrained_calls
        return Choice(
            parser,
            new_call_id,
            one_call=one_call,
            only_calls=calls is not None and calls.required,
        )

    def _parser_names(self) -> tuple[str, str]:
        """Return the names of the parsers for error messages."""
        config, plugins = self.engine.config, self.engine.plugins
        named = (("reasoning_parser", config.reasoning_parser),
                 ("tool_parser", config.tool_call_parser))  # fmt: skip
        reasoning, tools = (plugins[kind].described(name or "none") for kind, name in named)
        return reasoning, tools

    def outputs(self) -> OutputStream:
        """Submit the request to the engine."""
        return watched(
            self.engine.chat(
                self.request.messages,
                self.params,
                **self._rendering(),
                **self.request.origin.engine_options(
                    self.id, self.request.priority, self.request.cache_salt
                ),
            )
        )

    async def count_prompt(self) -> int:
        """Return the number of prompt tokens. Raises InvalidRequest."""
        return len(await self.engine.tokenize_chat(self.request.messages, **self._rendering()))

    def _rendering(self) -> dict[str, Any]:
        """Return the arguments with which the engine renders the prompt."""
        request = self.request
        return {
            "tools": request.tools if self.uses_tools else None,
            "chat_template_kwargs": self.template_arguments,
            "add_generation_prompt": (
                request.add_generation_prompt and not request.continue_final_message
            ),
            "continue_final_message": request.continue_final_message,
            "documents": request.documents,
            "chat_template": request.chat_template,
            "add_special_tokens": request.add_special_tokens,
        }

    def check(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Raise an error if the engine aborted the completion because of an error."""
        if completion.finish_reason == "error":
            raise output.failure()

    def usage(self, output: RequestOutput, choices: list[Choice]) -> dict[str, Any]:
        """Return the tokens of prompt and output so far."""
        parsers = [choice.parser for choice in choices]
        reasoning = sum(parser.num_reasoning_tokens for parser in parsers)
        return usage(
            output.num_prompt_tokens,
            sum(parser.num_tokens for parser in parsers),
            output.num_cached_tokens,
            reasoning if self.reasoning_parser is not None else None,
            output.kv_compression,
        )

    def finish_reason(self, completion: CompletionOutput, choice: Choice) -> str | None:
        """Return OpenAI's name of the finish reason."""
        named = self.constrained_calls is not None and self.constrained_calls.named
        if choice.has_calls and not named and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """Return the body of a response or of a chunk, with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        """Return the log-probabilities in a choice's form; None if they were not requested."""
        if positions is None:
            return None
        return chat_logprobs(
            positions,
            self.request.top_logprobs or 0,
            tokenizer_of(self.engine),
            self.request.return_tokens_as_token_ids,
        )


def _echoed_text(request: ChatRequest) -> str:
    """Return the last message's text if `echo` is set and the message is the assistant's; the
    response continues it and begins with it."""
    last = request.messages[-1] if request.echo and request.messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
