"""POST /v1/chat/completions

The chunks of a stream are parser events; a full response is the fold of the same events.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ....core.outputs import RequestOutput
from ....core.text.token_limit import LONG_TEXT
from ...http.context import ENGINE, OPTIONS, check_completions, new_id, reply
from ...http.large_responses import off_loop, routed_size
from ...http.routing import route
from ...http.streaming import stream_outputs
from ..common.logprobs import num_logprobs, prompt_logprobs
from ..common.openapi import documented
from ..common.protocol import ChatRequest
from ..common.request_body import Call, decode_body
from ..common.response_schemas import ChatChunk, ChatResponse
from ..common.routed_experts import check_routed_experts, routed_experts
from .job import check_completion, new_job
from .request import ChatCompletion
from .stream import ChatStream


@route("POST /v1/chat/completions", inference=True)
@documented("chat", request=ChatRequest, response=ChatResponse, event=ChatChunk)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Complete a conversation."""
    params = await decode_body(request, ChatRequest)
    chat = _completion(request.app, params)
    if params.stream:
        stream, outputs = ChatStream(chat), chat.job.outputs()
        return await stream_outputs(request, outputs, stream.encode, stream.final_chunk)
    return reply(await full_response(chat))


async def chat_response(call: Call, params: ChatRequest) -> dict[str, Any]:
    return await full_response(_completion(call.app, params))


def _completion(app: web.Application, params: ChatRequest) -> ChatCompletion:
    options = app[OPTIONS]
    check_routed_experts(app[ENGINE], params)
    id = new_id("chatcmpl", params.request_id)
    trusted = options.trust_request_chat_template
    job = new_job(app[ENGINE], params, id, trust_template=trusted)
    check_completions(1, job.params.n, options)
    return ChatCompletion(job, options.response_role)


async def full_response(chat: ChatCompletion) -> dict[str, Any]:
    output: RequestOutput | None = None
    job = chat.job
    async for output in job.searched() if job.request.use_beam_search else job.outputs():  # noqa: B007
        pass
    assert output is not None
    bodies, choices = [], []
    for completion in output.outputs:
        check_completion(output, completion)
        choice = chat.job.new_choice()
        if len(completion.text) < LONG_TEXT:
            message = choice.parse_message(completion)
        else:
            message = await asyncio.to_thread(choice.parse_message, completion)
        choices.append(choice)
        body: dict[str, Any] = {"role": chat.role, "content": message.content}
        if message.reasoning is not None and chat.request.include_reasoning:
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
        if chat.echoed:
            body["content"] = chat.echoed + (message.content or "")
        choice_body: dict[str, Any] = {
            "index": completion.index,
            "message": body,
            "logprobs": await off_loop(
                num_logprobs(completion.logprobs), chat.logprobs, completion.logprobs
            ),
            "finish_reason": chat.finish_reason(completion, choice),
            "stop_reason": completion.stop_reason,
        }
        if chat.request.return_token_ids:
            choice_body["token_ids"] = completion.token_ids
        if chat.request.return_weight_versions:
            choice_body["weight_versions"] = completion.weight_versions
        size = routed_size(completion)
        routed = await off_loop(size, routed_experts, chat.request, completion)
        if routed is not None:
            choice_body["routed_experts"] = routed
        bodies.append(choice_body)
    body = chat.envelope("chat.completion", bodies)
    body["usage"] = chat.usage(output, choices)
    if chat.request.prompt_logprobs is not None:
        positions = output.prompt_logprobs
        body["prompt_logprobs"] = await off_loop(
            num_logprobs(positions), prompt_logprobs, positions
        )
    if chat.request.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    if output.kv_transfer_params is not None:
        body["kv_transfer_params"] = output.kv_transfer_params
    return body
