"""Calls inference routes in this process.

There is no connection or middleware: a batch was authenticated when created, and its runner counts
lines against the tenant's limits.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from ...core.errors import BodyTooLarge, InvalidRequest, JackfieldError, RequestFailed
from ...core.tenancy import ANYONE, Tenant
from ..http.context import OPTIONS, encoder, error_body
from ..openai.chat.routes import chat_completions, chat_response
from ..openai.common.protocol import ChatRequest, CompletionRequest
from ..openai.common.request_body import Call, decode_call
from ..openai.completions.routes import completion_response, completions
from ..openai.pooling.embeddings import embeddings, embeddings_response
from ..openai.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from ..openai.pooling.routes import classify, classify_response, pooling, pooling_response
from ..openai.pooling.scoring import rerank, rerank_response, score, score_response
from ..openai.responses.protocol import ResponsesRequest
from ..openai.responses.routes import create, responses_response

logger = logging.getLogger("jackfield.server")
Line = tuple[type[Any], Callable[[Call, Any], Awaitable[Any]]]
"""Body type, and the function that creates the response."""
FUNCTIONS: tuple[tuple[Any, Line], ...] = (
    (chat_completions, (ChatRequest, chat_response)),
    (completions, (CompletionRequest, completion_response)),
    (create, (ResponsesRequest, responses_response)),
    (embeddings, (EmbeddingRequest, embeddings_response)),
    (pooling, (PoolingRequest, pooling_response)),
    (classify, (ClassifyRequest, classify_response)),
    (score, (ScoreRequest, score_response)),
    (rerank, (RerankRequest, rerank_response)),
)
LINES: dict[str, Line] = {
    path: line for handler, line in FUNCTIONS for _, path in handler.route.places
}
"""Paths for lines of a batch."""


class RouteResponse(NamedTuple):
    status: int
    body: bytes


async def call_route(
    app: web.Application, route: str, body: bytes, tenant: Tenant = ANYONE
) -> RouteResponse:
    """Return the response of one of LINES to a JSON body, for a tenant.

    Errors become the same responses as over HTTP.
    """
    kind, function = LINES[route]
    call = Call(app, route, tenant, CIMultiDict())
    try:
        if len(body) > (limit := app[OPTIONS].max_body_bytes):
            raise BodyTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes)")
        params = await decode_call(call, body, kind)
        return RouteResponse(200, encoder.encode(await function(call, params)))
    except JackfieldError as error:
        return _refusal(error, error.status)
    except web.HTTPException as error:  # Raised by a plugin.
        return _refusal(InvalidRequest(f"POST {route}: {error.reason}"), error.status)
    except Exception:
        logger.exception("%s failed in a batch", route)
        return _refusal(RequestFailed("the server failed on this request"), RequestFailed.status)


def _refusal(error: JackfieldError, status: int) -> RouteResponse:
    return RouteResponse(status, encoder.encode(error_body(error, status)))
