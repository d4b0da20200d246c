"""A chat completion in progress: its job, and common fields.

routes.py sends it whole, stream.py in chunks.
"""

from __future__ import annotations

import time
from typing import Any

from ....core.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ...http.context import tokenizer_of, usage
from ..common.logprobs import chat_logprobs
from ..common.protocol import ChatRequest
from .job import ChatJob
from .parsers import Choice


class ChatCompletion:
    """A validated request, and its responses' common fields."""

    def __init__(self, job: ChatJob, role: str = "assistant") -> None:
        """role: the response's author."""
        self.job = job
        self.request = job.request
        self.role = role
        self.created = int(time.time())
        self.echoed = _echoed_text(job.request)

    def usage(self, output: RequestOutput, choices: list[Choice]) -> dict[str, Any]:
        parsers = [choice.parser for choice in choices]
        reasoning = sum(parser.num_reasoning_tokens for parser in parsers)
        return usage(
            output.num_prompt_tokens,
            sum(parser.num_tokens for parser in parsers),
            output.num_cached_tokens,
            reasoning if self.job.parsers.reasoning is not None else None,
            output.kv_compression,
            output.drafts,
            output.media_tokens,
        )

    def finish_reason(self, completion: CompletionOutput, choice: Choice) -> str | None:
        """Return OpenAI's finish reason."""
        if choice.has_calls and not self.job.names_call and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """Return a response's or chunk's body."""
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
        }

    def logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        """Return log-probabilities for a choice; None if not requested."""
        if positions is None:
            return None
        return chat_logprobs(
            positions,
            self.request.top_logprobs or 0,
            tokenizer_of(self.job.engine),
            self.request.return_tokens_as_token_ids,
        )


def _echoed_text(request: ChatRequest) -> str:
    """Return the assistant's last message if `echo` is set; the response begins with it."""
    last = request.messages[-1] if request.echo and request.messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
