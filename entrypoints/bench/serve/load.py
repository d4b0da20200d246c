"""Load on an OpenAI-style server: a fixed number of open requests, or requests that arrive at a
rate.

To leave the machine to the server, the client only notes the time of chunks, and decodes the frames
that count tokens, or all of them if a chat needs the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from ..workloads import BenchRequest

DATA, DONE = b"data:", b"data: [DONE]"
TOKENS = (b'"choices":[{', b'"choices": [{')
USAGE = (b'"usage":{', b'"usage": {')
EMPTY_DELTAS = (b'"content":""', b'"content": ""', b'"delta":{}', b'"delta": {}')
"""A chat's first and last chunks, which have no tokens."""
CHAT_ENDPOINT = "/chat/completions"
TIMER_SECONDS = 0.002
"""Timers of an event loop may be off by this much."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and its form of requests."""

    url: str
    """Base URL, without /v1."""
    model: str
    endpoint: str = "/v1/completions"
    """Route: completions get token ids, chats synthetic words."""
    stream: bool = True
    ignore_eos: bool = True
    """Otherwise a response may end early."""
    api_key: str = ""
    extra_body: dict[str, Any] = {}
    """Further fields; None removes a field."""
    timeout: float = 600.0

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith(CHAT_ENDPOINT)

    @property
    def route(self) -> str:
        return f"{self.url.rstrip('/')}{self.endpoint}"

    def body(self, request: BenchRequest, *, token_ids: bool = False) -> bytes:
        """Return a request's JSON. `token_ids`: request the response's token ids."""
        fields: dict[str, Any] = {
            "model": self.model, "max_tokens": request.output, "temperature": request.temperature,
            "ignore_eos": self.ignore_eos, "stream": self.stream,
        }  # fmt: skip
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if token_ids:
            fields["return_token_ids"] = True
        if self.is_chat:
            words = " ".join(f"t{token}" for token in request.prompt)
            fields["messages"] = [{"role": "user", "content": words}]
        else:
            fields["prompt"] = request.prompt
        fields |= request.options | self.extra_body
        present = {name: value for name, value in fields.items() if value is not None}
        return msgspec.json.encode(present)


class RequestResult(msgspec.Struct, kw_only=True):
    """A request's outcome; times in `time.perf_counter`'s seconds."""

    sent: float
    times: list[float] = []
    """Time of each chunk with tokens, or of the response."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    closed_early: bool = False
    """Whether the client disconnected mid-stream, as planned."""
    token_ids: list[int] = []
    """If requested."""
    group: str = ""
    """The request's."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None with one chunk."""
        if len(self.times) < 2 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    chats: list[list[BenchRequest]]
    """Turns of each chat (mostly one); a later turn's prompt follows everything before it."""
    offsets: list[float]
    """Seconds after the start when each chat is due."""
    max_concurrency: int | None = None
    """Most open chats: others wait, and their time counts from their start. None: chats start when
    due, and their time counts from then."""

    def split(self, parts: int) -> Iterator[Load]:
        """Yield nonempty shares of the load for `parts` clients."""
        parts = min(parts, len(self.chats), self.max_concurrency or len(self.chats))
        for part in range(parts):
            places = self.max_concurrency
            if places is not None:
                places = places // parts + (part < places % parts)
            yield Load(
                chats=self.chats[part::parts],
                offsets=self.offsets[part::parts],
                max_concurrency=places,
            )


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return the seconds after the start when requests are due; 0 for an infinite rate.

    `burstiness`: shape of the intervals' gamma distribution: 1 is a Poisson process, less is
    burstier, infinity even.
    """
    if rate == float("inf"):
        return [0.0] * count
    source = random.Random(seed)
    offsets, due = [], 0.0
    for _ in range(count):
        offsets.append(due)
        if burstiness == float("inf"):
            due += 1.0 / rate
        else:
            due += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return offsets


Done = Callable[[RequestResult], object]


async def drive(
    target: Target, load: Load, *, begin: float | None = None, done: Done = lambda _: None
) -> list[RequestResult]:
    """Send a load; return the outcomes in order of completion.

    begin: start of the offsets by `time.perf_counter`; None: when ready.
    """
    token_ids = any(len(turns) > 1 for turns in load.chats)
    bodies = [target.body(turns[0], token_ids=token_ids) for turns in load.chats]
    results: list[RequestResult] = []
    chat_indices = iter(range(len(load.chats)))
    if begin is None:
        begin = time.perf_counter()

    async with client(target) as session:

        async def chat(index: int) -> None:
            due = begin + load.offsets[index]
            await asyncio.sleep(due - time.perf_counter())
            start = time.perf_counter()
            if load.max_concurrency is None and start - due > TIMER_SECONDS:
                # What a client that cannot keep up waits for must not be missing from its times.
                start = due
            history: list[int] = []
            for number, turn in enumerate(load.chats[index]):
                if number:
                    prompt = history + turn.prompt
                    request = BenchRequest(prompt, turn.output, turn.temperature)
                    start = time.perf_counter()
                    body = target.body(request, token_ids=True)
                else:
                    request, body = turn, bodies[index]
                result = await send(
                    session, target, request, body, start=start, token_ids=token_ids
                )
                result.group = turn.group
                results.append(result)
                done(result)
                if result.error is not None:
                    error = f"not sent: turn {number + 1} of its chat failed"
                    rest = len(load.chats[index]) - number - 1
                    results.extend(RequestResult(sent=start, error=error) for _ in range(rest))
                    return
                history = request.prompt + result.token_ids

        async def work() -> None:
            for index in chat_indices:
                await chat(index)

        await asyncio.gather(*(work() for _ in range(load.max_concurrency or len(load.chats))))
    return results


@contextlib.asynccontextmanager
async def client(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=target.timeout),
        headers=headers,
        read_bufsize=1 << 20,
    ) as session:
        yield session


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: BenchRequest,
    body: bytes | None = None,
    *,
    start: float | None = None,
    token_ids: bool = False,
) -> RequestResult:
    """Send one request and read its response; failures are recorded in `error`."""
    body = target.body(request, token_ids=token_ids) if body is None else body
    result = RequestResult(sent=time.perf_counter() if start is None else start)
    try:
        async with session.post(target.route, data=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                result.error = f"status {response.status}: {text}"
            elif target.stream:
                await _read_stream(response, result, token_ids, request.leave_after)
            else:
                _count(msgspec.json.decode(await response.read()), result)
                result.times.append(time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    if result.closed_early:
        result.output_tokens = len(result.times)
        result.prompt_tokens = len(request.prompt)
    elif result.error is None:
        result.error = _missing(target, request, result, token_ids)
    return result


def _missing(
    target: Target, request: BenchRequest, result: RequestResult, token_ids: bool
) -> str | None:
    if not result.times or not result.output_tokens:
        return "no tokens came, or no usage that counts them"
    may_stop = "stop_token_ids" in request.options
    if target.ignore_eos and result.output_tokens != request.output and not may_stop:
        return f"{result.output_tokens} tokens came instead of {request.output}"
    if token_ids and len(result.token_ids) != result.output_tokens:
        return f"{len(result.token_ids)} token ids came for {result.output_tokens} tokens"
    return None


async def _read_stream(
    response: aiohttp.ClientResponse,
    result: RequestResult,
    token_ids: bool,
    leave_after: int | None,
) -> None:
    """Record the time of each chunk, common to chunks of one read."""
    rest, finished = b"", False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(DATA):
                continue
            if line.startswith(DONE):
                finished = True
            elif TOKENS[0] in line or TOKENS[1] in line:
                if token_ids or USAGE[0] in line or USAGE[1] in line:
                    _count(msgspec.json.decode(line[len(DATA) :]), result)
                if b'"delta":' not in line or not any(mark in line for mark in EMPTY_DELTAS):
                    result.times.append(now)
                    if leave_after is not None and len(result.times) >= leave_after:
                        result.closed_early = True
                        response.close()
                        return
            else:
                frame = msgspec.json.decode(line[len(DATA) :])
                if "error" in frame:
                    result.error = str(frame["error"])[:300]
                    return
                _count(frame, result)
    if not finished:
        result.error = "the stream broke off"


def _count(frame: dict[str, Any], result: RequestResult) -> None:
    usage = frame.get("usage") or {}
    result.prompt_tokens = int(usage.get("prompt_tokens", result.prompt_tokens))
    result.output_tokens = int(usage.get("completion_tokens", result.output_tokens))
    for choice in frame.get("choices") or ():
        result.token_ids += choice.get("token_ids") or ()
