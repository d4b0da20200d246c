"""The parsers of a chat's output: which ones a request needs, and those of one completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.output_parsing.completion_parser import CompletionParser, TokenText
from ....core.output_parsing.output_parser import OutputParser, ParsedMessage, fold
from ....core.output_parsing.reasoning_parser import is_thinking, make_parser
from ....core.outputs import CompletionOutput
from ....core.protocols.parsers import (
    Content,
    ParserEvent,
    ReasoningParser,
    ToolCallStart,
    ToolParser,
)
from ....core.registry import Plugins
from ....core.sampling_params import SamplingParams
from ..common.protocol import ChatRequest
from .tools import ChatTools, first_call_only


class Parsers(msgspec.Struct, frozen=True):
    """A request's parsers, and their arguments."""

    plugins: Plugins
    names: tuple[str | None, str | None]
    """Configured names of reasoning and tool parser, for errors."""
    template_arguments: Mapping[str, Any]
    reasoning: type[ReasoningParser] | None = None
    tools: Callable[..., ToolParser] | None = None
    prompt_end: str = ""
    """The prompt's end; "" if unknown."""

    @property
    def classes(self) -> list[Any]:
        return [parser for parser in (self.reasoning, self.tools) if parser is not None]

    def call_ids(self, default: Callable[[], str]) -> Callable[[], str]:
        """Return the creator of tool call ids: the tool parser's, or `default`."""
        new_id: Callable[[], str] = getattr(self.tools, "new_id", default)
        return new_id

    def new_parser(self, tools: ChatTools) -> OutputParser:
        """Create a completion's parser. Raises PluginError if a plugin's fails."""
        reasoning_name, tool_name = self.names
        reasoning = calls = None
        if self.reasoning is not None:
            thinking = is_thinking(self.reasoning, self.template_arguments)
            with self.plugins["reasoning_parser"].calling(reasoning_name, "its constructor"):
                reasoning = make_parser(
                    self.reasoning,
                    thinking=thinking,
                    prompt_end=self.prompt_end,
                    template_arguments=self.template_arguments,
                )
        if self.tools is not None:
            with self.plugins["tool_parser"].calling(tool_name, "its constructor"):
                calls = self.tools(tools=tools.definitions)
        described = (
            self.plugins["reasoning_parser"].described(reasoning_name or "none"),
            self.plugins["tool_parser"].described(tool_name or "none"),
        )
        return OutputParser(reasoning, calls, names=described)


def choose_parsers(
    engine: AsyncEngine,
    request: ChatRequest,
    tools: ChatTools,
    template_arguments: Mapping[str, Any],
    params: SamplingParams,
) -> Parsers:
    """Return the configured parsers that the output may need. Raises PluginError."""
    config, plugins = engine.config, engine.plugins
    dialects = engine.model_config.dialects
    reasoning = tool = None
    prompt_end = ""
    if config.reasoning_parser is not None:
        reasoning = plugins["reasoning_parser"].load(config.reasoning_parser)
        if request.chat_template is None and request.begins_message:
            prompt_end = engine.prompt_end(template_arguments)
    without_tools = (
        dialects.calls_without_tools
        and dialects.tool_call_parser == config.tool_call_parser
        and tools.choice != "none"
        and params.structured_outputs is None
    )
    if (tools.offered or without_tools) and config.tool_call_parser is not None:
        tool = plugins["tool_parser"].load(config.tool_call_parser)
    names = (config.reasoning_parser, config.tool_call_parser)
    return Parsers(plugins, names, template_arguments, reasoning, tool, prompt_end)


class Choice:
    """One of a request's `n` completions, as it is parsed."""

    def __init__(
        self,
        parser: OutputParser,
        new_call_id: Callable[[], str],
        *,
        one_call: bool = False,
        only_calls: bool = False,
    ) -> None:
        """one_call: keep only the first tool call. only_calls: content is the markup of a call cut
        off before its name.
        """
        self.parser = CompletionParser(parser)
        self.new_call_id = new_call_id
        self.one_call = one_call
        self.only_calls = only_calls
        self.has_calls = False

    def parse(self, output: CompletionOutput) -> list[ParserEvent]:
        """Return the next output's events. Raises RequestFailed if a parser fails."""
        return self._checked(self.parser.feed(output))

    def parse_tokens(
        self, output: CompletionOutput
    ) -> Iterator[tuple[TokenText, list[ParserEvent]]]:
        """Yield the events of each token; replaces `parse` for a whole completion."""
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
        return fold(self.parse(output))
