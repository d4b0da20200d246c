"""A streamed chat completion: one chunk per parser event, from a template if it has only text."""

from __future__ import annotations

from typing import Any

from ....core.outputs import RequestOutput, WeightSpan
from ....core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ...http.streaming import Template, frame
from ..common.logprobs import prompt_logprobs
from ..common.routed_experts import routed_experts
from .job import check_completion
from .parsers import Choice
from .request import ChatCompletion

_TEXTS = (Content, Reasoning, ToolCallArguments)
"""Events that contain only a text."""


class ChatStream:
    def __init__(self, chat: ChatCompletion) -> None:
        self._chat = chat
        self._choices = [chat.job.new_choice() for _ in range(chat.job.params.n)]
        request = chat.request
        self._plain = not (request.logprobs or request.continuous_usage or request.return_token_ids)
        """Whether chunks have only their text."""
        self._texts = _TEXTS if request.include_reasoning else (Content, ToolCallArguments)
        self._has_opened = False
        self._output: RequestOutput | None = None
        self._content: Template | None = None
        """Frame of unparsed content in a single choice."""
        self._templates: dict[tuple[int, Any], Template] = {}
        """(choice index, kind of event or index of the call) → frame."""

    def encode(self, output: RequestOutput) -> bytes:
        if not self._plain or not self._has_opened or len(output.outputs) > 1:
            return b"".join(self.frames(output))
        completion = output.outputs[0]
        if completion.finish_reason is not None:
            return b"".join(self.frames(output))
        # The common case: more text of one choice.
        self._output = output
        index = completion.index
        choice = self._choices[index]
        if choice.parser.plain:
            choice.parser.count(completion)
            if not completion.text:
                return b""
            if self._content is None:
                self._content = self._template(index, Content(""))
            return self._content.frame(completion.text)
        events = choice.parse(completion)
        if len(events) == 1 and isinstance(events[0], self._texts):
            return self._text(index, events[0])
        return b"".join(self._event_frames(choice, index, events, None, None))

    def frames(self, output: RequestOutput) -> list[bytes]:
        chat, choices = self._chat, self._choices
        self._output = output
        parsed: list[list[ParserEvent]] = []
        for completion in output.outputs:
            check_completion(output, completion)
            parsed.append(choices[completion.index].parse(completion))
        running = chat.usage(output, choices) if chat.request.continuous_usage else None
        frames: list[bytes] = []
        if not self._has_opened:
            self._has_opened = True
            frames += self._opening(output, running)
        for completion, events in zip(output.outputs, parsed, strict=True):
            choice, index = choices[completion.index], completion.index
            logprobs = chat.logprobs(completion.logprobs)
            token_ids = completion.token_ids if chat.request.return_token_ids else None
            frames += self._event_frames(choice, index, events, running, logprobs, token_ids)
            if completion.finish_reason is not None:
                reason = chat.finish_reason(completion, choice)
                end = completion.stop_reason
                spans = None
                if chat.request.return_weight_versions:
                    spans = completion.weight_versions
                routed = routed_experts(chat.request, completion)
                frames.append(
                    self._frame(
                        index, {}, running, None, reason, end, versions=spans, routed=routed
                    )
                )
        return frames

    def _event_frames(
        self,
        choice: Choice,
        index: int,
        events: list[ParserEvent],
        running: dict[str, Any] | None,
        logprobs: dict[str, Any] | None,
        token_ids: list[int] | None = None,
    ) -> list[bytes]:
        chat = self._chat
        frames: list[bytes] = []
        for event in events:
            if self._plain and isinstance(event, self._texts):
                frames.append(self._text(index, event))
                continue
            delta = _delta(event, choice, chat.request.include_reasoning)
            if delta is not None:
                frames.append(self._frame(index, delta, running, logprobs, token_ids=token_ids))
                logprobs = token_ids = None
        if (logprobs is not None and logprobs["content"]) or token_ids:
            empty = {"content": ""}
            frames.append(self._frame(index, empty, running, logprobs, token_ids=token_ids))
        return frames

    def _opening(self, output: RequestOutput, running: dict[str, Any] | None) -> list[bytes]:
        """Return each choice's role and echoed text, and the prompt's fields."""
        chat = self._chat
        prompt: dict[str, Any] = {}
        if chat.request.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if chat.request.return_token_ids:
            prompt["prompt_token_ids"] = output.prompt_token_ids
        frames = []
        for index in range(chat.job.params.n):
            delta = {"role": chat.role, "content": ""}
            frames.append(self._frame(index, delta, running, body=prompt if index == 0 else None))
            if chat.echoed:
                frames.append(self._frame(index, {"content": chat.echoed}, running))
        return frames

    def final_chunk(self) -> bytes:
        """Return the usage chunk, if requested."""
        chat = self._chat
        if not chat.request.include_usage or self._output is None:
            return b""
        body = chat.envelope("chat.completion.chunk", [])
        body["usage"] = chat.usage(self._output, self._choices)
        return frame(body)

    def _text(self, index: int, event: Content | Reasoning | ToolCallArguments) -> bytes:
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
        return Template(lambda text: self._frame(index, _text_delta(event, text), None))

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
        versions: list[WeightSpan] | None = None,
        routed: str | None = None,
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
        if versions is not None:
            choice["weight_versions"] = versions
        if routed is not None:
            choice["routed_experts"] = routed
        body = self._chat.envelope("chat.completion.chunk", [choice]) | (body or {})
        if running is not None:
            body["usage"] = running
        return frame(body)


def _text_delta(event: Content | Reasoning | ToolCallArguments, text: str) -> dict[str, Any]:
    match event:
        case Content():
            return {"content": text}
        case Reasoning():
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallArguments(index):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(event: ParserEvent, choice: Choice, reasoning: bool) -> dict[str, Any] | None:
    """Return an event's delta, or None."""
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
