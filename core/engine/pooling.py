"""Pooling requests between caller and scheduler: admission, state, and the one output.

To the scheduler, it is a request for one token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import Context
from typing import Any, TypeAlias

from ..errors import ContextLengthExceeded, InvalidRequest, RequestFailed
from ..inputs import ChatPrompt, SinglePrompt, is_single, text_and_tokens
from ..loading.model_config import ModelConfig
from ..loading.pooling_config import PoolingConfig
from ..outputs import FinishReason, PoolingRequestOutput, RequestTimings
from ..parts.media import MediaItem
from ..pooling_params import TOKEN_TASKS, PooledRow, PoolingOutput, PoolingParams, TextPair
from ..request import Request, RequestSpec
from ..sampling_params import SamplingParams, all_ints
from ..scheduling.limits import RequestLimits
from ..text.token_limit import TokenLimit
from .admission import PreparedPrompt, check_limits, check_vocabulary
from .request_options import Envelope
from .text_processor import TextProcessor

PoolingPrompt: TypeAlias = SinglePrompt | TextPair | ChatPrompt
_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


class PoolingAdmission:
    """Validates pooling requests. Every refusal names the field."""

    def __init__(
        self,
        model_config: ModelConfig,
        pooling: PoolingConfig,
        texts: TextProcessor,
        limits: RequestLimits,
    ) -> None:
        self.model_config = model_config
        self.pooling = pooling
        self.texts = texts
        self.limits = limits

    async def prepare(
        self, prompt: PoolingPrompt, params: PoolingParams, add_special_tokens: bool
    ) -> PreparedPrompt:
        """Tokenize, truncate and check a prompt.

        Raises InvalidRequest, ContextLengthExceeded, EngineOverloaded.
        """
        limit = self._limit(params)
        if isinstance(prompt, Mapping) and is_single(prompt):
            content, token_ids = text_and_tokens(prompt)
            prompt = token_ids if token_ids is not None else content  # type: ignore[assignment]
        text: str | None = None
        pair: str | None = None
        types: tuple[int, ...] = ()
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text, pair = prompt.get("text"), prompt.get("text_pair")  # type: ignore[assignment]
            if not isinstance(text, str) or not isinstance(pair, str):
                raise InvalidRequest(
                    "prompt: a dict needs prompt, prompt_token_ids, or text and text_pair",
                    param="prompt",
                )
            if self.pooling.joins_pairs:
                text, pair = text + pair, None  # Decoders are trained to compare texts like this.
        elif not isinstance(prompt, list | tuple):
            raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")
        if text is not None:
            token_ids, types = await self._tokenize(text, pair, limit, add_special_tokens)
            self._check_count(token_ids)
        else:
            # Truncated and counted before every item is checked: it may be very long.
            assert isinstance(prompt, list | tuple)
            token_ids = list(prompt[:limit])
            self._check_count(token_ids)
            if not all_ints(token_ids):
                raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")
        check_vocabulary(token_ids, self.model_config.vocab_size)
        return PreparedPrompt(text if pair is None else None, token_ids, types)

    def place(
        self, prompt: PreparedPrompt, token_ids: list[int], items: tuple[MediaItem, ...]
    ) -> PreparedPrompt:
        """Return a prompt with items, whose tokens are among these. Raises
        ContextLengthExceeded."""
        self._check_count(token_ids)
        check_vocabulary(token_ids, self.model_config.vocab_size)
        return dataclasses.replace(prompt, token_ids=token_ids, media=items)

    def admit(
        self,
        prompt: PreparedPrompt,
        params: PoolingParams,
        envelope: Envelope,
    ) -> RequestSpec:
        """Accept a request. params: completed."""
        check_limits(self.limits, len(prompt.token_ids), 1)
        return RequestSpec(
            **envelope._asdict(),
            prompt_token_ids=prompt.token_ids,
            params=_NO_SAMPLING,
            max_tokens=1,
            pooling=params,
            token_type_ids=prompt.token_type_ids,
            media=prompt.media,
            reads_cache=params.task not in TOKEN_TASKS and self.pooling.pooling_type == "LAST",
        )

    def _limit(self, params: PoolingParams) -> int | None:
        num_kept, longest = params.truncate_prompt_tokens, self.model_config.max_model_len
        if num_kept is None:
            return None
        if num_kept > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {num_kept} is more than this model takes ({longest})",
                param="truncate_prompt_tokens",
            )
        return longest if num_kept == -1 else num_kept

    async def _tokenize(
        self, text: str, pair: str | None, limit: int | None, add_special_tokens: bool
    ) -> tuple[list[int], tuple[int, ...]]:
        tokenizer = self.texts.required_tokenizer()
        context = self.model_config.max_model_len
        most = TokenLimit(tokens=context, context=context)

        def encode() -> tuple[list[int], list[int]]:
            texts = [text] if pair is None else [text, pair]
            if self.pooling.lower_case:
                texts = [item.lower() for item in texts]
            return tokenizer.encode_texts(
                *texts, limit=limit, most=most, add_special_tokens=add_special_tokens
            )

        token_ids, types = await self.texts.run_if_long(len(text) + len(pair or ""), encode)
        # Tokenizers return token types of two texts also for models without a table of them.
        has_types = 0 < max(types, default=0) < self.pooling.num_token_types
        return token_ids, tuple(types) if has_types else ()

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
    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.row: PooledRow | None = None

    def set_finished(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason


class PoolingState:
    """A pooling request, with the members of `RequestState` that the engine reads."""

    announced = True
    """Its end is announced to this process's plugins."""
    listener = None
    only_final = True
    num_logprobs = 0

    def __init__(self, text: str | None, request: Request) -> None:
        self.request_id = request.external_id
        self.prompt = text
        self.requests = [request]
        self.pooled = Pooled()
        self.completions = [self.pooled]
        self.params = request.pooling
        self.context: Context | None = None
        """As in `RequestState`."""
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

    def final_output(self) -> PoolingRequestOutput | None:
        """Return the result; None: it failed, or was aborted."""
        return None if self.pooled.row is None else self.output()

    def output(self) -> PoolingRequestOutput:
        """Return the result. Raises RequestFailed."""
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
    """Result of `AsyncEngine.encode`: await it for the output, or iterate over the one output.

    Cancelling the waiting task, or `aclose()`, aborts the request.
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
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._state is not None and not self._state.finished:
                self._abort(self._state)

    def __del__(self) -> None:
        self._close()
