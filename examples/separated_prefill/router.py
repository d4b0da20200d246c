"""A router for trials of separated prefill: prompts to one set of servers, outputs from another.

    python router.py --prefill http://10.0.0.5:8000 --decode http://10.0.0.6:8000 --port 8080

A chat or completion goes to a prefill server first, for one token, then with that answer's
`kv_transfer_params` to a decode server, which streams to the client. Everything else, short
prompts, and what a prefill server does not answer, goes to a decode server alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("router")

PATHS = ("/v1/chat/completions", "/v1/completions")
OUTPUT_FIELDS = (
    "max_completion_tokens", "min_tokens", "n", "best_of", "stop", "stop_token_ids", "ignore_eos",
    "stream_options", "logprobs", "top_logprobs", "echo", "response_format", "structured_outputs",
    "structural_tag", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""What shapes outputs, and is not sent to a prefill server. `tools` are part of the prompt."""
OF_ONE_SERVER = ("use_beam_search", "prompt_logprobs")
"""A request with one of these needs its prompt computed where its outputs are."""
HOP_HEADERS = {
    "connection", "content-encoding", "content-length", "host", "keep-alive", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
MAX_BODY = 256 << 20


class Router:
    """Forwards requests, in turn to each server of a kind."""

    def __init__(
        self,
        prefill: list[str],
        decode: list[str],
        min_prompt: int = 2000,
        prefill_seconds: float = 120.0,
    ) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._min_prompt = min_prompt
        self._prefill_limit = aiohttp.ClientTimeout(total=prefill_seconds, sock_connect=5)

    def app(self) -> web.Application:
        """Return the application; its runner needs `handler_cancellation`, so that a client that
        leaves ends its requests at the servers."""
        app = web.Application(client_max_size=MAX_BODY)
        app.cleanup_ctx.append(self._session)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _session(self, app: web.Application) -> AsyncIterator[None]:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as self._client:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Let a prefill server compute the prompt, if that pays; answer from a decode server."""
        data = await request.read()
        headers = forwarded(request.headers)
        body = self._divisible(request, data)
        if body is not None and (params := await self._prefilled(request, headers, body)):
            data = json.dumps({**body, "kv_transfer_params": params}).encode()
        url = next(self._decode) + request.raw_path
        try:
            answer = await self._client.request(request.method, url, headers=headers, data=data)
        except aiohttp.ClientConnectionError as error:
            logger.warning("%s does not answer: %s", url, error)
            message = "the server does not answer, try again later"
            return web.json_response({"error": {"message": message, "code": 502}}, status=502)
        async with answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            response.headers.extend(forwarded(answer.headers))
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    def _divisible(self, request: web.Request, data: bytes) -> dict[str, Any] | None:
        """Return the body, if its prompt is worth computing elsewhere."""
        if request.method != "POST" or request.path not in PATHS:
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict) or any(body.get(field) for field in OF_ONE_SERVER):
            return None
        prompt = body.get("messages") or body.get("prompt")
        return body if len(json.dumps(prompt)) >= self._min_prompt else None

    async def _prefilled(
        self, request: web.Request, headers: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return a prefill server's `kv_transfer_params`; None: the decode server computes."""
        only_prompt = {name: body[name] for name in body if name not in OUTPUT_FIELDS}
        only_prompt |= {
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        if body.get("tool_choice") != "none":  # Which calls are allowed is no part of the prompt.
            only_prompt.pop("tool_choice", None)
        url = next(self._prefill) + request.raw_path
        try:
            async with self._client.post(
                url, headers=headers, json=only_prompt, timeout=self._prefill_limit
            ) as answer:
                answer.raise_for_status()
                params = (await answer.json()).get("kv_transfer_params")
                return params if isinstance(params, dict) else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("%s did not compute a prompt: %s", url, error or type(error).__name__)
            return None


def forwarded(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers that are not of one connection alone."""
    return [(name, value) for name, value in headers.items() if name.lower() not in HOP_HEADERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefill", action="append", required=True, help="URL; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--min-prompt", type=int, default=2000,
        help="characters; a shorter prompt is computed by the decode server (default: 2000)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-timeout", type=float, default=120.0,
        help="seconds, after which the decode server computes the prompt (default: 120)",
    )  # fmt: skip
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    router = Router(options.prefill, options.decode, options.min_prompt, options.prefill_timeout)
    web.run_app(router.app(), host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
