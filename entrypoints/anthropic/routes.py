"""The routes of /v1/messages."""

from __future__ import annotations

from aiohttp import web

from ...core.errors import JackfieldError
from ..http.context import ENGINE, reply
from ..http.routing import add_routes, route
from ..http.streaming import stream_outputs
from ..openai.common.openapi import documented
from ..openai.common.request_body import decode_body
from .errors import ANTHROPIC, repeat_request_id
from .protocol import CountTokensRequest, MessagesRequest, in_own_terms
from .request import PROTOCOL, MessageCompletion, new_message_job
from .response_schemas import MessageEvent, MessageResponse, TokensResponse


def add_messages(app: web.Application) -> None:
    add_routes(app, messages, count_tokens)
    app.on_response_prepare.append(repeat_request_id)


@route("POST /v1/messages", dialect=ANTHROPIC, inference=True)
@documented(
    "messages",
    request=MessagesRequest,
    response=MessageResponse,
    event=MessageEvent,
    ends_with_done=False,
)
async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages: respond to a conversation, in Anthropic's protocol."""
    try:
        body = await decode_body(request, MessagesRequest)
        job = await new_message_job(request.app[ENGINE], body)
        message = MessageCompletion(job, shows_thinking=body.shows_thinking)
        if body.stream:
            return await stream_outputs(
                request, job.outputs(), message.encode, lambda: b"", protocol=PROTOCOL
            )
        return reply(await message.full_response())
    except JackfieldError as error:
        raise in_own_terms(error) from None


@route("POST /v1/messages/count_tokens", dialect=ANTHROPIC)
@documented("messages", request=CountTokensRequest, response=TokensResponse)
async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: count the tokens of such a message's prompt."""
    try:
        body = await decode_body(request, CountTokensRequest)
        job = await new_message_job(request.app[ENGINE], body)
        return reply({"input_tokens": await job.count_prompt()})
    except JackfieldError as error:
        raise in_own_terms(error) from None
