"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, RequestFailed
from ...core.types import CompletionOutput, PositionLogprobs, RequestOutput, SamplingParams
from .context import ENGINE, check_model, new_id, prompt_logprobs_body, reply, tokenizer_of, usage
from .protocol import CompletionRequest, decode
from .streaming import frame, stream


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    engine = request.app[ENGINE]
    asked = decode(await request.read(), CompletionRequest)
    job = _Job(engine, asked)
    if asked.stream:
        frames = job.frames()
        return await stream(request, frames, frames.__anext__)
    return reply(await job.whole())


class _Job:
    """One request: its prompts, each with n choices."""

    def __init__(self, engine: AsyncEngine, asked: CompletionRequest) -> None:
        self.engine = engine
        self.asked = asked
        self.model = check_model(engine, asked.model)
        self.id = new_id("cmpl", asked.request_id)
        self.created = int(time.time())
        self.prompts = [self._tokens(prompt) for prompt in asked.prompts()]
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise InvalidRequest("best_of: is not supported; use n", param="best_of")
        self.params = self._params()
        self.n = self.params.n

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return tokenizer_of(self.engine).encode(
            prompt, add_special_tokens=self.asked.add_special_tokens
        )

    def _params(self) -> SamplingParams:
        asked = self.asked
        limit = 16 if asked.max_tokens is None else asked.max_tokens
        self.only_echo = limit == 0 and asked.echo
        if asked.echo and asked.logprobs is not None and asked.prompt_logprobs is None:
            asked.prompt_logprobs = asked.logprobs
        return asked.sampling(1 if self.only_echo else limit, asked.logprobs)

    def _streams(self) -> list[Any]:
        return [
            self.engine.generate(
                tokens,
                self.params,
                request_id=self.id if len(self.prompts) == 1 else f"{self.id}-{index}",
                priority=self.asked.priority,
                cache_salt=self.asked.cache_salt,
            )
            for index, tokens in enumerate(self.prompts)
        ]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        outputs = await _gather([_last(one) for one in self._streams()])
        choices = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                choices.append(self._choice(number, output, completion, first=True))
        generated = 0 if self.only_echo else sum(
            len(c.token_ids) for o in outputs for c in o.outputs
        )  # fmt: skip
        return self._body(choices) | {
            "usage": usage(
                sum(len(o.prompt_token_ids) for o in outputs),
                generated,
                sum(o.num_cached_tokens for o in outputs),
            )
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        seen: set[int] = set()
        generated = cached = 0
        prompt_tokens = sum(len(p) for p in self.prompts)
        async for number, output in merge(self._streams()):
            cached = max(cached, output.num_cached_tokens)
            for completion in output.outputs:
                index = number * self.n + completion.index
                choice = self._choice(number, output, completion, first=index not in seen)
                seen.add(index)
                generated += 0 if self.only_echo else len(completion.token_ids)
                body = self._body([choice])
                if self.asked.continuous_usage:
                    body["usage"] = usage(prompt_tokens, generated, cached)
                yield frame(body)
        if self.asked.include_usage:
            yield frame(self._body([]) | {"usage": usage(prompt_tokens, generated, cached)})

    def _body(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> dict[str, Any]:
        if completion.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")
        text, token_ids = completion.text, completion.token_ids
        positions: list[PositionLogprobs | None] = list(completion.logprobs or [])
        prompt = output.prompt_token_ids
        if self.only_echo:
            text, token_ids, positions = "", [], []
        if self.asked.echo and first:
            echoed = tokenizer_of(self.engine).decode(list(prompt), skip_special_tokens=True)
            text, token_ids = echoed + text, prompt + token_ids
            positions = list(output.prompt_logprobs or []) + positions
        choice: dict[str, Any] = {
            "index": number * self.n + completion.index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.asked.logprobs is not None:
            choice["logprobs"] = self._logprobs(token_ids, positions)
        if self.asked.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if self.asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = list(prompt) if first else None
        return choice

    def _logprobs(
        self, token_ids: list[int], positions: list[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """OpenAI's old shape: parallel lists, and the offset of each token in the text."""
        tokenizer = tokenizer_of(self.engine)
        count = self.asked.logprobs or 0
        made: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offset = 0
        for token, position in zip(token_ids, positions, strict=True):
            text = tokenizer.token_text(token)
            made["tokens"].append(text)
            made["text_offset"].append(offset)
            offset += len(text)
            if position is None:
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(max(position[token].logprob, -9999.0))
            top = sorted(position.items(), key=lambda item: item[1].rank or 0)[: count or None]
            shown = {token: position[token], **dict(top)} if count else {token: position[token]}
            made["top_logprobs"].append(
                {tokenizer.token_text(t): max(entry.logprob, -9999.0) for t, entry in shown.items()}
            )
        return made


async def _last(outputs: Any) -> RequestOutput:
    last: RequestOutput | None = None
    async for last in outputs:  # noqa: B007
        pass
    assert last is not None
    return last


async def _gather(jobs: list[Any]) -> list[RequestOutput]:
    """All of them, or the first error once the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_shielded(job)) for job in jobs]
    results = [task.result() for task in tasks]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


async def _shielded(job: Any) -> Any:
    try:
        return await job
    except Exception as error:
        return error


async def merge(streams: list[Any]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
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
