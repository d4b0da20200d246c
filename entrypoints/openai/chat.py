"""POST /v1/chat/completions

The streamed pieces are parser events as they come; the whole answer is the fold of the same events.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ...core.text.encoding import LONG_TEXT
from ...core.types import RequestOutput
from .answers import ChatAnswer, ChatChunk
from .body import decoded
from .chat_job import ChatJob
from .chat_pieces import ChatPieces
from .context import ENGINE, OPTIONS, check_completions, reply
from .logprobs import prompt_logprobs
from .openapi import documented
from .protocol import ChatRequest
from .streaming import stream_outputs


@documented("chat", request=ChatRequest, answer=ChatAnswer, event=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    engine = request.app[ENGINE]
    asked = await decoded(request, ChatRequest)
    job = ChatJob(engine, asked, request.app[OPTIONS])
    check_completions(1, job.params.n, request.app[OPTIONS])
    if asked.stream:
        pieces = ChatPieces(job)
        return await stream_outputs(request, job.outputs(), pieces.encode, pieces.last)
    return reply(await whole(job))


async def whole(job: ChatJob) -> dict[str, Any]:
    """The answer in one piece: the fold of its events."""
    output: RequestOutput | None = None
    async for output in job.outputs():  # noqa: B007
        pass
    assert output is not None
    choices, parsed = [], []
    for completion in output.outputs:
        job.check(output, completion)
        choice = job.new_choice()
        if len(completion.text) < LONG_TEXT:
            message = choice.whole(completion)
        else:
            message = await asyncio.to_thread(choice.whole, completion)
        parsed.append(choice)
        body: dict[str, Any] = {"role": job.role, "content": message.content}
        if message.reasoning is not None and job.asked.include_reasoning:
            body["reasoning_content"] = body["reasoning"] = message.reasoning
        if message.tool_calls:
            body["tool_calls"] = [
                {
                    "id": call.id or choice.new_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        elif message.content is None:
            body["content"] = ""
        if job.echoed:
            body["content"] = job.echoed + (message.content or "")
        made: dict[str, Any] = {
            "index": completion.index,
            "message": body,
            "logprobs": job.logprobs(completion.logprobs),
            "finish_reason": job.finish_reason(completion, choice),
            "stop_reason": completion.stop_reason,
        }
        if job.asked.return_token_ids:
            made["token_ids"] = completion.token_ids
        choices.append(made)
    body = job.envelope("chat.completion", choices)
    body["usage"] = job.usage(output, parsed)
    if job.asked.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if job.asked.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    if output.kv_transfer_params is not None:
        body["kv_transfer_params"] = output.kv_transfer_params
    return body
