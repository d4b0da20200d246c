"""The routes of /v1/messages."""

from __future__ import annotations

from aiohttp import web

from ...core.errors import JackfieldError
from ..openai.body import decoded
from ..openai.context import ENGINE, OPTIONS, reply
from ..openai.openapi import documented
from ..openai.streaming import stream_outputs
from .answers import MessageAnswer, MessageError, MessageEvent, TokensAnswer
from .errors import ROOT, errors, repeat_request_id
from .message_job import PROTOCOL, MessageJob
from .protocol import CountTokensRequest, MessagesRequest, in_own_terms


def add_messages(app: web.Application) -> None:
    """The routes, and their errors in their own shape."""
    app.add_routes([web.post(ROOT, messages), web.post(f"{ROOT}/count_tokens", count_tokens)])
    app.middlewares.insert(0, errors)
    app.on_response_prepare.append(repeat_request_id)


@documented(
    "messages",
    request=MessagesRequest,
    answer=MessageAnswer,
    event=MessageEvent,
    error=MessageError,
    ends_with_done=False,
)
async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages: answer a conversation, in Anthropic's protocol."""
    try:
        wanted = await decoded(request, MessagesRequest)
        job = await MessageJob.of(request.app[ENGINE], wanted, request.app[OPTIONS])
        if wanted.stream:
            return await stream_outputs(
                request, job.outputs(), job.encode, lambda: b"", protocol=PROTOCOL
            )
        return reply(await job.whole())
    except JackfieldError as error:
        raise in_own_terms(error) from None


@documented("messages", request=CountTokensRequest, answer=TokensAnswer, error=MessageError)
async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: how many tokens the prompt of such a message has."""
    try:
        wanted = await decoded(request, CountTokensRequest)
        job = await MessageJob.of(request.app[ENGINE], wanted, request.app[OPTIONS])
        return reply({"input_tokens": await job.count_prompt()})
    except JackfieldError as error:
        raise in_own_terms(error) from None
