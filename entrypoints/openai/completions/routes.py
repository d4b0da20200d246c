"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.engine.output_stream import OutputStream
from ....core.errors import InvalidRequest
from ....core.inputs import EmbedsPrompt
from ....core.outputs import (
    CompletionOutput,
    DraftUsage,
    KVCompressionUsage,
    PositionLogprobs,
    RequestOutput,
)
from ....core.sampling_params import SamplingParams
from ...http.auth.origin import EngineOptions
from ...http.context import (
    ENGINE,
    OPTIONS,
    check_completions,
    check_priority,
    new_id,
    part_id,
    reply,
    tokenizer_of,
    usage,
)
from ...http.large_responses import off_loop, routed_size
from ...http.model_names import model_name
from ...http.request_log import watched
from ...http.routing import route
from ...http.streaming import Template, frame, output_size, stream, stream_outputs
from ..common.logprobs import completion_logprobs, num_logprobs, prompt_logprobs
from ..common.openapi import documented
from ..common.protocol import CompletionRequest
from ..common.request_body import Call, decode_body
from ..common.response_schemas import CompletionChunk, CompletionResponse
from ..common.routed_experts import check_routed_experts, routed_experts

STARTED_AT_ONCE = 4
"""Prompts submitted per turn of the event loop."""


@route("POST /v1/completions", inference=True)
@documented(
    "completions", request=CompletionRequest, response=CompletionResponse, event=CompletionChunk
)
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    params = await decode_body(request, CompletionRequest)
    text_completion = await _completion(request.app, params)
    if params.stream:
        if len(text_completion.prompts) > 1:
            return await stream(request, text_completion.frames())
        (outputs,) = text_completion.streams()
        encoder = CompletionStream(text_completion)
        return await stream_outputs(request, outputs, encoder.encode, encoder.final_chunk)
    return reply(await text_completion.full_response())


async def completion_response(call: Call, params: CompletionRequest) -> dict[str, Any]:
    return await (await _completion(call.app, params)).full_response()


async def _completion(app: web.Application, params: CompletionRequest) -> TextCompletion:
    engine = app[ENGINE]
    params.check()
    model = model_name(engine, params.model)
    check_priority(engine, params.priority)
    check_routed_experts(engine, params)
    text_completion = TextCompletion(engine, params, model)
    check_completions(len(text_completion.prompts), text_completion.params.n, app[OPTIONS])
    await text_completion.tokenize()
    return text_completion


class TextCompletion:
    """A validated request: its prompts, with n choices each."""

    def __init__(
        self,
        engine: AsyncEngine,
        request: CompletionRequest,
        model: str,
    ) -> None:
        self.engine = engine
        self.request = request
        self.model = model
        self.prompts = request.prompts()
        self.token_ids: list[list[int] | EmbedsPrompt] = []
        """Each prompt's ids, set by `tokenize`; or its embeddings."""
        self.id = new_id("cmpl", request.request_id)
        self.created = int(time.time())
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise InvalidRequest("best_of: is not supported; use n", param="best_of")
        if request.echo and engine.model_config.source is not None:
            raise InvalidRequest(
                "echo: is not supported for an encoder-decoder model, whose output does not "
                "continue the prompt",
                param="echo",
            )
        self.params = self._params()
        self.offsets: dict[int, int] = {}
        """Choice → text offset of its next token."""

    def _params(self) -> SamplingParams:
        request = self.request
        limit = 16 if request.max_tokens is None else request.max_tokens
        self.only_echo = limit == 0 and request.echo
        self.shows_prompt_logprobs = request.prompt_logprobs is not None
        if request.echo and request.logprobs is not None:
            request.prompt_logprobs = max(request.logprobs, request.prompt_logprobs or 0)
        defaults = self.engine.model_config.sampling
        return request.sampling(1 if self.only_echo else limit, request.logprobs, defaults)

    async def tokenize(self) -> None:
        """Encode the prompts; raises as `AsyncEngine.tokenize_texts`."""
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        encoded_texts: list[list[int]] = []
        if texts:
            encoded_texts = await self.engine.tokenize_texts(
                texts,
                add_special_tokens=self.request.add_special_tokens,
                limit=self.engine.prompt_limit(self.params),
            )
        token_ids = iter(encoded_texts)
        self.token_ids = [next(token_ids) if isinstance(p, str) else p for p in self.prompts]
        lengths = [0 if isinstance(ids, dict) else len(ids) for ids in self.token_ids]
        self.engine.check_num_logprobs(lengths, self.params)

    def streams(self) -> list[OutputStream]:
        return [
            watched(self.engine.generate(token_ids, self.params, **options))
            for token_ids, options in zip(self.token_ids, self._engine_options(), strict=True)
        ]

    def _searches(self) -> list[AsyncIterator[RequestOutput]]:
        return [
            self.request.beam_search(self.engine, token_ids, self.params, options).outputs()
            for token_ids, options in zip(self.token_ids, self._engine_options(), strict=True)
            if not isinstance(token_ids, dict)
        ]

    def _engine_options(self) -> list[EngineOptions]:
        return [
            self.request.origin.engine_options(
                self.id if len(self.token_ids) == 1 else part_id(self.id, index),
                self.request.priority,
                self.request.cache_salt,
            )
            for index in range(len(self.token_ids))
        ]

    async def full_response(self) -> dict[str, Any]:
        outputs = await _all(self._searches() if self.request.use_beam_search else self.streams())
        choices = []
        for number, output in enumerate(outputs):
            in_prompt = num_logprobs(output.prompt_logprobs)
            for completion in output.outputs:
                size = in_prompt + num_logprobs(completion.logprobs) + routed_size(completion)
                choice = await off_loop(size, self._choice, number, output, completion)
                choices.append(choice)
        generated = sum(len(c.token_ids) for o in outputs for c in o.outputs)
        body = self._body(choices)
        body["usage"] = usage(
            sum(o.num_prompt_tokens for o in outputs),
            0 if self.only_echo else generated,
            sum(o.num_cached_tokens for o in outputs),
            compression=KVCompressionUsage.total(o.kv_compression for o in outputs),
            drafts=DraftUsage.total(o.drafts for o in outputs),
        )
        # As in vLLM, those of the first prompt.
        if outputs[0].kv_transfer_params is not None:
            body["kv_transfer_params"] = outputs[0].kv_transfer_params
        return body

    async def frames(self) -> AsyncIterator[bytes]:
        stream = CompletionStream(self)
        async for number, output in merge(self.streams()):
            first = not stream.has_begun(number)
            for piece in await off_loop(output_size(output, first), stream.frames, output, number):
                yield piece
        if last := stream.final_chunk():
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
        """Return a choice, or an output's addition to it."""
        if completion.finish_reason == "error":
            raise output.failure()
        index = number * self.params.n + completion.index
        first = index not in self.offsets
        offset = self.offsets.get(index, 0)
        text, choice_ids = completion.text, completion.token_ids
        token_ids = choice_ids
        positions: list[PositionLogprobs | None] = list(completion.logprobs or [])
        if self.only_echo:
            text, choice_ids, token_ids, positions = "", [], [], []
        if self.request.echo and first:
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
        if self.request.logprobs is not None:
            choice["logprobs"], offset = completion_logprobs(
                token_ids,
                positions,
                self.request.logprobs,
                offset,
                tokenizer_of(self.engine),
                self.request.return_tokens_as_token_ids,
            )
        if self.shows_prompt_logprobs and first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = choice_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        if self.request.return_weight_versions and completion.finish_reason is not None:
            choice["weight_versions"] = completion.weight_versions
        if (routed := routed_experts(self.request, completion)) is not None:
            choice["routed_experts"] = routed
        self.offsets[index] = offset
        return choice

    def _echoed(self, number: int, output: RequestOutput) -> str:
        """Return the prompt's text, unless it is ids or truncated."""
        prompt = self.prompts[number]
        if isinstance(prompt, str) and len(output.prompt_token_ids) == len(self.token_ids[number]):
            return prompt
        tokenizer = tokenizer_of(self.engine)
        # A padded vocabulary has ids without a token.
        token_ids = [t for t in output.prompt_token_ids if t <= tokenizer.max_token_id]
        # The whole text, as counted by `text_offset`.
        return tokenizer.decode(token_ids, skip_special_tokens=False)


class CompletionStream:
    """Encodes a text completion's outputs as server-sent events, from a template for mere text."""

    def __init__(self, text_completion: TextCompletion) -> None:
        self._completion = text_completion
        self._prompts, self._cached = (
            [0] * len(text_completion.token_ids),
            [0] * len(text_completion.token_ids),
        )
        self._compression: list[KVCompressionUsage | None] = [None] * len(text_completion.token_ids)
        self._drafts: list[DraftUsage | None] = [None] * len(text_completion.token_ids)
        self._generated = 0
        request = text_completion.request
        self._plain = (
            text_completion.params.n == 1
            and request.logprobs is None
            and not (
                request.continuous_usage or request.return_token_ids or text_completion.only_echo
            )
        )
        self._template: Template | None = None
        """Frame of a text within a single choice."""

    def encode(self, output: RequestOutput) -> bytes:
        if self._template is not None and len(output.outputs) == 1:
            completion = output.outputs[0]
            if completion.finish_reason is None:
                self._generated += len(completion.token_ids)
                return self._template.frame(completion.text)
        return b"".join(self.frames(output, 0))

    def has_begun(self, number: int) -> bool:
        """Return whether prompt `number` had an output."""
        return self._prompts[number] > 0

    def frames(self, output: RequestOutput, number: int) -> list[bytes]:
        text_completion = self._completion
        self._prompts[number] = output.num_prompt_tokens
        self._cached[number] = output.num_cached_tokens
        self._compression[number] = output.kv_compression
        self._drafts[number] = output.drafts
        frames: list[bytes] = []
        for completion in output.outputs:
            self._generated += 0 if text_completion.only_echo else len(completion.token_ids)
            index = number * text_completion.params.n + completion.index
            body = text_completion._body([text_completion._choice(number, output, completion)])
            if text_completion.request.continuous_usage:
                body["usage"] = self._usage()
            frames.append(frame(body))
            if self._plain and self._template is None and index == 0:
                self._template = Template(lambda text: self._bare(output, text))
        return frames

    def final_chunk(self) -> bytes:
        """Return the usage chunk, if requested."""
        if not self._completion.request.include_usage:
            return b""
        return frame(self._completion._body([]) | {"usage": self._usage()})

    def _bare(self, output: RequestOutput, text: str) -> bytes:
        completion = CompletionOutput(index=0, text=text)
        return frame(self._completion._body([self._completion._choice(0, output, completion)]))

    def _usage(self) -> dict[str, Any]:
        return usage(
            sum(self._prompts), self._generated, sum(self._cached),
            compression=KVCompressionUsage.total(self._compression),
            drafts=DraftUsage.total(self._drafts),
        )  # fmt: skip


async def _all(streams: list[Any]) -> list[RequestOutput]:
    """Return each stream's final output; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_last(output_stream)) async for output_stream in spread(streams)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def spread(streams: list[Any]) -> AsyncIterator[Any]:
    """Yield streams to start, a few per turn of the event loop, as each takes time proportional to
    n.
    """
    for number, output_stream in enumerate(streams, 1):
        yield output_stream
        if number % STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _last(outputs: Any) -> RequestOutput:
    last: RequestOutput | None = None
    async for last in outputs:  # noqa: B007
        pass
    assert last is not None
    return last


async def merge(streams: list[Any]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield several streams' outputs in order of arrival, with the stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    numbers: dict[asyncio.Future[Any], int] = {}
    try:
        async for output_stream in spread(streams):
            numbers[asyncio.ensure_future(anext(output_stream))] = len(numbers)
        while numbers:
            done, _ = await asyncio.wait(numbers, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task.exception() is None):
                number = numbers.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                numbers[asyncio.ensure_future(anext(streams[number]))] = number
                yield number, output
    finally:
        for task in numbers:
            task.cancel()
        await asyncio.gather(*numbers, return_exceptions=True)
        for output_stream in streams:
            await output_stream.aclose()
