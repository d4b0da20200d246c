"""A chat request on its way: what the engine is asked, and how what it says is parsed.

Answered in one piece by chat.py, streamed by chat_pieces.py; a response (responses_job.py) is one,
too.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.engine.async_engine import AsyncEngine
from ...core.engine.output import OutputStream
from ...core.errors import InvalidRequest, RequestFailed
from ...core.protocols import ParserEvent, ReasoningParser, ToolCallStart, ToolParser
from ...core.text.parsing import OutputParser, ParsedMessage, fold, hides_markers
from ...core.text.reasoning import ReasoningTracker, lets_think, make_parser
from ...core.types import CompletionOutput, PositionLogprobs, RequestOutput
from .context import ServerOptions, check_model, check_priority, new_id, tokenizer_of, usage
from .held_calls import HeldCalls, forced_calls, free_calls
from .logprobs import chat_logprobs
from .protocol import ChatRequest
from .template_fields import template_arguments
from .tool_choice import apply_allowed_tools, check_tools, first_call_only


class Choice:
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


class ChatJob:
    """A checked request."""

    def __init__(
        self, engine: AsyncEngine, asked: ChatRequest, options: ServerOptions | None = None
    ) -> None:
        """Raises InvalidRequest with the field's name."""
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
        self.params = asked.sampling(asked.token_limit, logprobs, engine.model_config.sampling)
        self.uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        config, plugins = engine.config, engine.plugins
        self.prompt_end = ""
        self.reasoning: type[ReasoningParser] | None = None
        self.tools: Callable[..., ToolParser] | None = None
        if config.reasoning_parser is not None:
            self.reasoning = plugins["reasoning_parser"].load(config.reasoning_parser)
        if self.reasoning is not None and asked.chat_template is None:
            if asked.add_generation_prompt and not asked.continue_final_message:
                self.prompt_end = engine.prompt_end(self.template_arguments)
        dialects = engine.model_config.dialects
        unasked = (
            dialects.calls_without_tools
            and dialects.tool_call_parser == config.tool_call_parser
            and asked.tool_choice != "none"
            and self.params.structured_outputs is None
        )
        if (self.uses_tools or unasked) and config.tool_call_parser is not None:
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
        """The grammar that holds tool calls to their schemas, where one is asked for. A call that
        is forced wins over any other grammar."""
        format = self.params.structured_outputs
        config = self.engine.config.structured_outputs_config
        held = forced_calls(self.asked, self.tools, config)
        if held is not None:
            return held
        if not self.uses_tools:
            return None
        if self.tools is None:
            raise InvalidRequest(
                "tools: this server has no tool-call parser; start it with --tool-call-parser",
                param="tools",
            )
        return free_calls(self.asked, self.tools, config, format)

    def new_choice(self) -> Choice:
        """Parsers for one of the n answers."""
        config, plugins, names = self.engine.config, self.engine.plugins, self._parser_names()
        reasoning = tools = tracker = None
        if self.reasoning is not None:
            thinking = lets_think(self.reasoning, self.template_arguments)
            make = functools.partial(
                make_parser, self.reasoning, thinking=thinking, prompt_end=self.prompt_end
            )
            with plugins["reasoning_parser"].calling(config.reasoning_parser, "its constructor"):
                reasoning, tracked = make(), make()
            tracker = ReasoningTracker(tracked, tokenizer_of(self.engine), name=names[0])
        if self.tools is not None:
            with plugins["tool_parser"].calling(config.tool_call_parser, "its constructor"):
                tools = self.tools(tools=self.asked.tools or ())
        new_call_id = getattr(self.tools, "new_id", _call_id)
        one_call = self.asked.parallel_tool_calls is False
        parser = OutputParser(reasoning, tools, names=names)
        return Choice(parser, tracker, new_call_id, one_call)

    def _parser_names(self) -> tuple[str, str]:
        """What errors call the parsers."""
        config, plugins = self.engine.config, self.engine.plugins
        named = (("reasoning_parser", config.reasoning_parser),
                 ("tool_parser", config.tool_call_parser))  # fmt: skip
        reasoning, tools = (plugins[kind].described(name or "none") for kind, name in named)
        return reasoning, tools

    def outputs(self) -> OutputStream:
        """What the engine makes of the request."""
        return self.engine.chat(
            self.asked.messages,
            self.params,
            **self._rendering(),
            request_id=self.id,
            priority=self.asked.priority,
            cache_salt=self.asked.cache_salt,
        )

    async def count_prompt(self) -> int:
        """Tokens of the prompt that `outputs` would start from. Raises InvalidRequest."""
        return len(await self.engine.tokenize_chat(self.asked.messages, **self._rendering()))

    def _rendering(self) -> dict[str, Any]:
        """How the messages become a prompt: arguments that `chat` and `render_chat` share."""
        asked = self.asked
        return {
            "tools": asked.tools if self.uses_tools else None,
            "chat_template_kwargs": self.template_arguments,
            "add_generation_prompt": (
                asked.add_generation_prompt and not asked.continue_final_message
            ),
            "continue_final_message": asked.continue_final_message,
            "documents": asked.documents,
            "chat_template": asked.chat_template,
            "add_special_tokens": asked.add_special_tokens,
        }

    def check(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Raises RequestFailed where the engine gave up on the completion."""
        if completion.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")

    def usage(self, output: RequestOutput, choices: list[Choice]) -> dict[str, Any]:
        """What the answer has cost so far."""
        counts = [c.thought.num_reasoning_tokens for c in choices if c.thought is not None]
        return usage(
            len(output.prompt_token_ids),
            sum(choice.num_tokens for choice in choices),
            output.num_cached_tokens,
            sum(counts) if self.reasoning is not None else None,
        )

    def finish_reason(self, completion: CompletionOutput, choice: Choice) -> str | None:
        """As OpenAI names it."""
        named = self.held is not None and self.held.named
        if choice.called and not named and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """What an answer and each of its pieces have around their choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        """As a choice shows them; None where they were not asked for."""
        if positions is None:
            return None
        return chat_logprobs(
            positions,
            self.asked.top_logprobs or 0,
            tokenizer_of(self.engine),
            self.asked.return_tokens_as_token_ids,
        )


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
