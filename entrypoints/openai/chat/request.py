"""A chat completion in progress: its job, and the fields that its responses share.

routes.py sends it as one response, stream.py as chunks.
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
    """A validated request for a chat completion, and the fields that its responses share."""

    def __init__(self, job: ChatJob, role: str = "assistant") -> None:
        """role: the author of the message in the response."""
        self.job = job
        self.request = job.request
        self.role = role
        self.created = int(time.time())
        self.echoed = _echoed_text(job.request)

    def usage(self, output: RequestOutput, choices: list[Choice]) -> dict[str, Any]:
        """Return the tokens of prompt and output so far."""
        parsers = [choice.parser for choice in choices]
        reasoning = sum(parser.num_reasoning_tokens for parser in parsers)
        return usage(
            output.num_prompt_tokens,
            sum(parser.num_tokens for parser in parsers),
            output.num_cached_tokens,
            reasoning if self.job.parsers.reasoning is not None else None,
            output.kv_compression,
        )

    def finish_reason(self, completion: CompletionOutput, choice: Choice) -> str | None:
        """Return OpenAI's name of the finish reason."""
        if choice.has_calls and not self.job.names_call and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """Return the body of a response or of a chunk, with these choices."""
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
        }

    def logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        """Return the log-probabilities in a choice's form; None if they were not requested."""
        if positions is None:
            return None
        return chat_logprobs(
            positions,
            self.request.top_logprobs or 0,
            tokenizer_of(self.job.engine),
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
