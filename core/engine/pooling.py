"""Pooling requests between caller and scheduler: admission, state, and the one output.

A pooling request is to the scheduler a request for one token, in whose place a vector comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import ContextLengthExceeded, InvalidRequest, RequestFailed
from ..loading.model_config import ModelConfig
from ..loading.pooling_config import PoolingConfig
from ..pooling import PooledRow, PoolingOutput, PoolingParams, TextPair
from ..scheduling.request import Request
from ..text.encoding import LONG_TEXT
from ..text.text_threads import TextThreads
from ..text.token_limit import TokenLimit
from ..text.tokenizer import Tokenizer
from ..types import (
    FinishReason,
    PoolingRequestOutput,
    Prompt,
    RequestTimings,
    SamplingParams,
    all_ints,
)
from .admission import new_scheduler_id

PoolingPrompt: TypeAlias = Prompt | TextPair
_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the scheduler takes it."""

    text: str | None
    token_ids: list[int]
    token_type_ids: tuple[int, ...]
    """Empty: all 0."""


class PoolingAdmission:
    """Makes scheduler requests of pooling requests. Every refusal names the field."""

    def __init__(
        self, model_config: ModelConfig, pooling: PoolingConfig, tokenizer: Tokenizer | None
    ) -> None:
        self.model_config = model_config
        self.pooling = pooling
        self.tokenizer = tokenizer

    async def prepare(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams,
        add_special_tokens: bool,
        threads: TextThreads,
    ) -> PreparedPrompt:
        """Tokenize and cut. Raises InvalidRequest, ContextLengthExceeded, EngineOverloaded."""
        limit = self._limit(params)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
        text: str | None = None
        pair: str | None = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text, pair = prompt.get("text"), prompt.get("text_pair")  # type: ignore[assignment]
            if not isinstance(text, str) or not isinstance(pair, str):
                raise InvalidRequest(
                    "prompt: a dict needs prompt_token_ids, or text and text_pair", param="prompt"
                )
            if self.pooling.joins_pairs:
                text, pair = text + pair, None  # As decoders are trained to compare texts.
        if text is None:
            token_ids = self._checked_ids(prompt, limit)
            types: tuple[int, ...] = ()
        else:
            token_ids, types = await self._tokenize(text, pair, limit, add_special_tokens, threads)
        self.check(token_ids)
        return PreparedPrompt(text if pair is None else None, token_ids, types)

    def request(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: PoolingParams,
        *,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        """`request_id` is the caller's; `params` are completed."""
        return Request(
            request_id=new_scheduler_id(),
            external_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=_NO_SAMPLING,
            max_tokens=1,
            seed=0,
            priority=priority,
            cache_salt=cache_salt,
            pooling=params,
            token_type_ids=prompt.token_type_ids,
            reads_cache=params.task != "token_embed" and self.pooling.pooling_type == "LAST",
        )

    def _limit(self, params: PoolingParams) -> int | None:
        keep, longest = params.truncate_prompt_tokens, self.model_config.max_model_len
        if keep is None:
            return None
        if keep > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {keep} is more than this model takes ({longest})",
                param="truncate_prompt_tokens",
            )
        return longest if keep == -1 else keep

    async def _tokenize(
        self,
        text: str,
        pair: str | None,
        limit: int | None,
        add_special_tokens: bool,
        threads: TextThreads,
    ) -> tuple[list[int], tuple[int, ...]]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                "prompt: this engine has no tokenizer (skip_tokenizer_init), send token ids",
                param="prompt",
            )

        def encode() -> tuple[list[int], list[int]]:
            texts = [text] if pair is None else [text, pair]
            if self.pooling.lower_case:
                texts = [one.lower() for one in texts]
            return tokenizer.encode_texts(
                *texts, limit=limit, most=most, add_special_tokens=add_special_tokens
            )

        context = self.model_config.max_model_len
        most = TokenLimit(tokens=context, context=context)
        size = len(text) + len(pair or "")
        token_ids, types = encode() if size < LONG_TEXT else await threads.run(size, encode)
        # Tokenizers number two texts for models, too, that have no table for it.
        known = 0 < max(types, default=0) < self.pooling.num_token_types
        return token_ids, tuple(types) if known else ()

    def _checked_ids(self, prompt: Any, limit: int | None) -> list[int]:
        """Cut or refused before all of it is looked at."""
        if isinstance(prompt, list | tuple):
            token_ids = list(prompt[:limit])
            self._check_count(token_ids)
            if all_ints(token_ids):
                return token_ids
        raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")

    def check(self, token_ids: list[int]) -> None:
        """Raises InvalidRequest, ContextLengthExceeded."""
        self._check_count(token_ids)
        vocab = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab:
            wrong = next(t for t in token_ids if not 0 <= t < vocab)
            raise InvalidRequest(
                f"prompt: token id {wrong} is not in the vocabulary (0 to {vocab - 1})",
                param="prompt",
            )

    def _check_count(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt: must have at least one token", param="prompt")
        longest = self.model_config.max_model_len
        if len(token_ids) > longest:
            raise ContextLengthExceeded.of(
                longest,
                len(token_ids),
                f"your prompt has {len(token_ids)} tokens. Shorten it or set "
                "truncate_prompt_tokens.",
                param="prompt",
            )


class Pooled:
    """What a pooling request has in place of completions."""

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.row: PooledRow | None = None

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason


class PoolingState:
    """A caller's pooling request. It has what the engine asks of a `RequestState`."""

    def __init__(self, text: str | None, request: Request) -> None:
        self.request_id = request.external_id
        self.prompt = text
        self.requests = [request]
        self.pooled = Pooled()
        self.completions = [self.pooled]
        self.timings = RequestTimings(arrival=request.arrival)
        self.error: str | None = None
        self.changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.pooled.finish_reason is not None

    def mark_finished(self) -> None:
        self.timings.finished = time.monotonic()
        self.timings.first_scheduled = self.requests[0].first_scheduled
        self.timings.num_preemptions = self.requests[0].num_preemptions

    def output(self) -> PoolingRequestOutput:
        """Raises RequestFailed when the request failed or was aborted."""
        row, request = self.pooled.row, self.requests[0]
        if row is None:
            raise RequestFailed(self.error or "the request was aborted")
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=PoolingOutput(row.array()),
            num_cached_tokens=request.num_cached_tokens,
            timings=self.timings,
        )


class PoolingStream:
    """What `AsyncEngine.encode` returns: await it for the output, or iterate over the one.

    Cancelling the task that waits, or `aclose()`, aborts the request at once.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[PoolingState]],
        abort: Callable[[PoolingState], None],
    ) -> None:
        self._start = start
        self._abort = abort
        self._state: PoolingState | None = None
        self._closed = False

    def __await__(self) -> Generator[Any, None, PoolingRequestOutput]:
        return self.__anext__().__await__()

    def __aiter__(self) -> PoolingStream:
        return self

    async def __anext__(self) -> PoolingRequestOutput:
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._state is None:
                self._state = await self._start()
            while not self._state.finished:
                self._state.changed.clear()
                await self._state.changed.wait()
            return self._state.output()
        finally:
            self._close()

    async def aclose(self) -> None:
        """Abort, if it is still running."""
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._state is not None and not self._state.finished:
                self._abort(self._state)

    def __del__(self) -> None:
        self._close()
