"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.engine.output import OutputStream
from ...core.errors import InvalidRequest, RequestFailed
from ...core.types import CompletionOutput, PositionLogprobs, RequestOutput, SamplingParams
from .answers import CompletionAnswer, CompletionChunk
from .body import decoded
from .context import (
    ENGINE,
    OPTIONS,
    check_completions,
    check_model,
    check_priority,
    new_id,
    part_id,
    reply,
    tokenizer_of,
    usage,
)
from .logprobs import completion_logprobs, prompt_logprobs
from .openapi import documented
from .protocol import CompletionRequest
from .streaming import Template, frame, stream, stream_outputs

STARTED_AT_ONCE = 4
"""Prompts whose completions are entered in one turn of the event loop."""


@documented(
    "completions", request=CompletionRequest, answer=CompletionAnswer, event=CompletionChunk
)
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    engine = request.app[ENGINE]
    asked = await decoded(request, CompletionRequest)
    asked.check()
    model = check_model(engine, asked.model)
    check_priority(engine, asked.priority)
    job = _Job(engine, asked, model)
    check_completions(len(job.given), job.params.n, request.app[OPTIONS])
    await job.tokenize()
    if asked.stream:
        if len(job.given) > 1:
            frames = job.frames()
            return await stream(request, frames, frames.__anext__)
        (outputs,) = job.streams()
        pieces = CompletionPieces(job)
        return await stream_outputs(request, outputs, pieces.encode, pieces.last)
    return reply(await job.whole())


class _Job:
    """One request: its prompts, each with n choices."""

    def __init__(
        self,
        engine: AsyncEngine,
        asked: CompletionRequest,
        model: str,
    ) -> None:
        self.engine = engine
        self.asked = asked
        self.model = model
        self.given = asked.prompts()
        self.token_ids: list[list[int]] = []
        """Of each prompt, once `tokenize` was called."""
        self.id = new_id("cmpl", asked.request_id)
        self.created = int(time.time())
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise InvalidRequest("best_of: is not supported; use n", param="best_of")
        self.params = self._params()
        self.offsets: dict[int, int] = {}
        """Choice → where its next token stands in its text."""

    def _params(self) -> SamplingParams:
        asked = self.asked
        limit = 16 if asked.max_tokens is None else asked.max_tokens
        self.only_echo = limit == 0 and asked.echo
        self.shows_prompt_logprobs = asked.prompt_logprobs is not None
        if asked.echo and asked.logprobs is not None:
            asked.prompt_logprobs = max(asked.logprobs, asked.prompt_logprobs or 0)
        defaults = self.engine.model_config.sampling
        return asked.sampling(1 if self.only_echo else limit, asked.logprobs, defaults)

    async def tokenize(self) -> None:
        """Raises as `AsyncEngine.tokenize_texts`."""
        texts = [prompt for prompt in self.given if isinstance(prompt, str)]
        found: list[list[int]] = []
        if texts:
            found = await self.engine.tokenize_texts(
                texts,
                add_special_tokens=self.asked.add_special_tokens,
                limit=self.engine.prompt_limit(self.params),
            )
        encoded = iter(found)
        self.token_ids = [next(encoded) if isinstance(p, str) else p for p in self.given]

    def streams(self) -> list[OutputStream]:
        """What the engine makes of each prompt."""
        return [
            self.engine.generate(
                token_ids,
                self.params,
                request_id=self.id if len(self.token_ids) == 1 else part_id(self.id, index),
                priority=self.asked.priority,
                cache_salt=self.asked.cache_salt,
            )
            for index, token_ids in enumerate(self.token_ids)
        ]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        outputs = await _all(self.streams())
        choices = [
            self._choice(number, output, completion)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        generated = sum(len(c.token_ids) for o in outputs for c in o.outputs)
        body = self._body(choices)
        body["usage"] = usage(
            sum(len(o.prompt_token_ids) for o in outputs),
            0 if self.only_echo else generated,
            sum(o.num_cached_tokens for o in outputs),
        )
        # As vLLM: those of the first prompt.
        if outputs[0].kv_transfer_params is not None:
            body["kv_transfer_params"] = outputs[0].kv_transfer_params
        return body

    async def frames(self) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        pieces = CompletionPieces(self)
        async for number, output in merge(self.streams()):
            for piece in pieces.frames(output, number):
                yield piece
        if last := pieces.last():
            yield last

    def _body(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """One choice, or what an output adds to it."""
        if completion.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")
        index = number * self.params.n + completion.index
        first = index not in self.offsets
        offset = self.offsets.get(index, 0)
        text, made = completion.text, completion.token_ids
        token_ids = made
        positions: list[PositionLogprobs | None] = list(completion.logprobs or [])
        if self.only_echo:
            text, made, token_ids, positions = "", [], [], []
        if self.asked.echo and first:
            text = self._echoed(number, output) + text
            token_ids = output.prompt_token_ids + token_ids
            positions = list(output.prompt_logprobs or []) + positions
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.asked.logprobs is not None:
            choice["logprobs"], offset = completion_logprobs(
                token_ids,
                positions,
                self.asked.logprobs,
                offset,
                tokenizer_of(self.engine),
                self.asked.return_tokens_as_token_ids,
            )
        if self.shows_prompt_logprobs and first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.asked.return_token_ids:
            choice["token_ids"] = made
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        self.offsets[index] = offset
        return choice

    def _echoed(self, number: int, output: RequestOutput) -> str:
        """The prompt as it was given, unless it was given as ids or cut."""
        given = self.given[number]
        if isinstance(given, str) and len(output.prompt_token_ids) == len(self.token_ids[number]):
            return given
        tokenizer = tokenizer_of(self.engine)
        # A padded vocabulary has ids without a token.
        token_ids = [t for t in output.prompt_token_ids if t <= tokenizer.max_token_id]
        # All of it, as `text_offset` counts.
        return tokenizer.decode(token_ids, skip_special_tokens=False)


class CompletionPieces:
    """A streamed answer, output by output. Texts with nothing beside them go through templates."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._prompts, self._cached = [0] * len(job.token_ids), [0] * len(job.token_ids)
        self._generated = 0
        asked = job.asked
        self._plain = (
            job.params.n == 1
            and asked.logprobs is None
            and not (asked.continuous_usage or asked.return_token_ids or job.only_echo)
        )
        self._template: Template | None = None
        """The frame of a text in the middle of the only choice."""

    def encode(self, output: RequestOutput) -> bytes:
        """Frames of what the output of the only prompt brings."""
        if self._template is not None and len(output.outputs) == 1:
            completion = output.outputs[0]
            if completion.finish_reason is None:
                self._generated += len(completion.token_ids)
                return self._template.frame(completion.text)
        return b"".join(self.frames(output, 0))

    def frames(self, output: RequestOutput, number: int) -> list[bytes]:
        """The same, one by one, of prompt `number`."""
        job = self._job
        self._prompts[number] = len(output.prompt_token_ids)
        self._cached[number] = output.num_cached_tokens
        made: list[bytes] = []
        for completion in output.outputs:
            self._generated += 0 if job.only_echo else len(completion.token_ids)
            index = number * job.params.n + completion.index
            body = job._body([job._choice(number, output, completion)])
            if job.asked.continuous_usage:
                body["usage"] = self._usage()
            made.append(frame(body))
            if self._plain and self._template is None and index == 0:
                self._template = Template(lambda text: self._bare(output, text))
        return made

    def last(self) -> bytes:
        """The frame with the usage, if it was asked for."""
        if not self._job.asked.include_usage:
            return b""
        return frame(self._job._body([]) | {"usage": self._usage()})

    def _bare(self, output: RequestOutput, text: str) -> bytes:
        """The frame of a text in the middle of the only choice."""
        completion = CompletionOutput(index=0, text=text)
        return frame(self._job._body([self._job._choice(0, output, completion)]))

    def _usage(self) -> dict[str, Any]:
        return usage(sum(self._prompts), self._generated, sum(self._cached))


async def _all(streams: list[Any]) -> list[RequestOutput]:
    """The last output of each; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_last(one)) async for one in spread(streams)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def spread(streams: list[Any]) -> AsyncIterator[Any]:
    """Streams to be started, a few in a turn of the event loop: each takes time for its n."""
    for number, one in enumerate(streams, 1):
        yield one
        if number % STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _last(outputs: Any) -> RequestOutput:
    last: RequestOutput | None = None
    async for last in outputs:  # noqa: B007
        pass
    assert last is not None
    return last


async def merge(streams: list[Any]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting: dict[asyncio.Future[Any], int] = {}
    try:
        async for one in spread(streams):
            waiting[asyncio.ensure_future(anext(one))] = len(waiting)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task.exception() is None):
                number = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
                yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for one in streams:
            await one.aclose()
