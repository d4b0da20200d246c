"""A chat's answer as it is streamed: a frame an event, from a template where it is only text."""

from __future__ import annotations

from typing import Any

from ...core.protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ...core.types import RequestOutput
from .chat_job import ChatJob, Choice
from .logprobs import prompt_logprobs
from .streaming import Template, frame

_TEXTS = (Content, Reasoning, ToolCallArguments)
"""Events that are one text."""


class ChatPieces:
    """A streamed answer, output by output. Texts with nothing beside them go through templates."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._choices = [job.new_choice() for _ in range(job.params.n)]
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
        running = job.usage(output, choices) if job.asked.continuous_usage else None
        made: list[bytes] = []
        if not self._opened:
            self._opened = True
            made += self._opening(output, running)
        for completion in output.outputs:
            job.check(output, completion)
            choice, index = choices[completion.index], completion.index
            logprobs = job.logprobs(completion.logprobs)
            token_ids = completion.token_ids if job.asked.return_token_ids else None
            events = choice.feed(completion)
            made += self._event_frames(choice, index, events, running, logprobs, token_ids)
            if completion.finish_reason is not None:
                reason = job.finish_reason(completion, choice)
                end = completion.stop_reason
                made.append(self._frame(index, {}, running, None, reason, end))
        return made

    def _event_frames(
        self,
        choice: Choice,
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
                made.append(self._frame(index, delta, running, logprobs, token_ids=token_ids))
                logprobs = token_ids = None
        if (logprobs is not None and logprobs["content"]) or token_ids:
            empty = {"content": ""}
            made.append(self._frame(index, empty, running, logprobs, token_ids=token_ids))
        return made

    def _opening(self, output: RequestOutput, running: dict[str, Any] | None) -> list[bytes]:
        """The first frames: each answer's role, what is echoed, and what is told of the prompt."""
        job = self._job
        prompt: dict[str, Any] = {}
        if job.asked.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if job.asked.return_token_ids:
            prompt["prompt_token_ids"] = output.prompt_token_ids
        frames = []
        for index in range(job.params.n):
            delta = {"role": job.role, "content": ""}
            frames.append(self._frame(index, delta, running, body=prompt if index == 0 else None))
            if job.echoed:
                frames.append(self._frame(index, {"content": job.echoed}, running))
        return frames

    def last(self) -> bytes:
        """The frame with the usage, if it was asked for."""
        job = self._job
        if not job.asked.include_usage or self._output is None:
            return b""
        body = job.envelope("chat.completion.chunk", [])
        body["usage"] = job.usage(self._output, self._choices)
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
        body = self._job.envelope("chat.completion.chunk", [choice]) | (body or {})
        if running is not None:
            body["usage"] = running
        return frame(body)


def _text_delta(event: Content | Reasoning | ToolCallArguments, text: str) -> dict[str, Any]:
    """The delta of an event that is one text, with another text."""
    match event:
        case Content():
            return {"content": text}
        case Reasoning():
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallArguments(index):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(event: ParserEvent, choice: Choice, reasoning: bool) -> dict[str, Any] | None:
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
