"""A request's completions, and how much of them the caller has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from itertools import count
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..output_parsing.output_text import OutputText
from ..outputs import (
    CompletionOutput,
    DraftUsage,
    FinishReason,
    KVCompressionUsage,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestTimings,
    WeightSpan,
)
from ..parts import encoder_decoder, input_embeds
from ..parts.encoder_decoder import Source
from ..request import Request, Update
from ..sampling_params import OutputKind
from ..step import TokenLogprobs
from ..text.tokenizer import Tokenizer

logger = logging.getLogger("jackfield.engine")


class Completion:
    """One of the `n` completions."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
    ) -> None:
        """stream_interval: tokens of an output, if the request does not say."""
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        params = request.params
        self.text = (
            OutputText(tokenizer, request.prompt_token_ids, params)
            if tokenizer is not None and params.detokenize
            else None
        )
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.failure: str | None = None
        """Why it ended with "error", if its text could not be ended."""
        self._num_taken_tokens = 0
        self._finish_taken = False
        self._stream_interval = params.stream_interval or stream_interval

    def apply(self, update: Update) -> str | None:
        """Append new tokens. Return a stop string that ends the completion."""
        request = update.request
        if self.logprobs is None and not update.finished:
            return self.apply_tokens(update.new_token_ids)
        ended_by_token = update.finished and request.finish_reason == "stop"
        for number, token in enumerate(update.new_token_ids):
            self.token_ids.append(token)
            if self.logprobs is not None and update.logprobs is not None:
                position = update.logprobs[number]
                self.logprobs.append(_position(position, self.tokenizer))
                self.cumulative_logprob += position.logprob
            if self.text is None:
                continue
            is_stop_token = ended_by_token and number == len(update.new_token_ids) - 1
            if is_stop_token and not request.params.include_stop_str_in_output:
                self.text.push_stop_token()
                continue
            stop = self.text.push_token(token, len(self.token_ids))
            if stop is not None and not is_stop_token:
                return stop
        return None

    def apply_tokens(self, new_token_ids: Sequence[int]) -> str | None:
        """As `apply`, without log-probabilities or a finish."""
        token_ids, text = self.token_ids, self.text
        if text is None:
            token_ids += new_token_ids
            return None
        for token in new_token_ids:
            token_ids.append(token)
            stop = text.push_token(token, len(token_ids))
            if stop is not None:
                return stop
        return None

    def set_finished(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Record the reason, once. Never raises: if the text cannot be ended, the reason becomes
        "error".
        """
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.text is None:
            return
        try:
            self.text.finish(reason)
        except Exception as error:
            logger.exception("the text of request %s failed", self.request.external_id)
            self.finish_reason, self.stop_reason = "error", None
            self.failure = output_failure(error)

    @property
    def has_new_output(self) -> bool:
        if self.finish_reason is not None:
            return not self._finish_taken
        taken = self._num_taken_tokens
        return len(self.token_ids) >= taken + (self._stream_interval if taken else 1)

    def take_output(self, delta: bool) -> CompletionOutput:
        """Return the caller's next output. delta: only what is new."""
        first = self._num_taken_tokens if delta else 0
        text = ""
        if self.text is not None:
            text = self.text.take_delta() if delta else self.text.text
        self._num_taken_tokens = len(self.token_ids)
        self._finish_taken = self.finish_reason is not None
        return self._output(text, first)

    def peek_output(self) -> CompletionOutput:
        """Return all output, not counting it as taken."""
        return self._output(self.text.text if self.text is not None else "", 0)

    def _output(self, text: str, first: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            token_ends=[] if self.text is None else self.text.token_ends[first:],
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=[] if self.finish_reason is None else self._weight_versions(),
            routed_experts=None if self.finish_reason is None else self._routed_experts(),
        )

    def _routed_experts(self) -> np.ndarray | None:
        """Return the choices of the tokens, of which late ones may have been dropped."""
        routed, prompt = self.request.routed_experts, len(self.request.prompt_token_ids)
        if routed is None:
            return None
        return routed[: max(prompt + len(self.token_ids) - 1, 0)]

    def _weight_versions(self) -> list[WeightSpan]:
        """Return which weights sampled the tokens, of which late ones may have been dropped."""
        starts, count = self.request.weight_versions, len(self.token_ids)
        ends = (*(start for start, _ in starts[1:]), count)
        return [
            WeightSpan(version, start, min(end, count))
            for (start, version), end in zip(starts, ends, strict=False)
            if start < min(end, count)
        ]


class RequestState:
    announced = True
    """Its end is announced to this process's plugins."""

    def __init__(
        self,
        prompt: str | None,
        requests: list[Request],
        tokenizer: Tokenizer | None,
        *,
        source: str | None = None,
        num_logprobs: int = 0,
        stream_interval: int = 1,
    ) -> None:
        """requests: one per completion; source: the encoder's text; num_logprobs: most of them."""
        params = requests[0].params
        self.request_id = requests[0].external_id
        self.prompt = prompt
        self.source = source
        self.num_logprobs = num_logprobs
        self.params = params
        self._delta = params.output_kind is OutputKind.DELTA
        self.only_final = params.output_kind is OutputKind.FINAL_ONLY
        """Whether its caller gets nothing before its end."""
        self.requests = requests
        self.tokenizer = tokenizer
        self.completions = [
            Completion(index, each, tokenizer, stream_interval)
            for index, each in enumerate(requests)
        ]
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.timings = RequestTimings(arrival=requests[0].arrival)
        self.error: str | None = None
        self.error_param: str | None = None
        self._unfinished: RequestOutput | None = None
        """The first output, of which later ones replace the completions until one ends."""
        self.changed = asyncio.Event()
        self.context: Context | None = None
        """The caller's, in which plugins hear of the end; None once they have."""
        self.listener: Callable[[], None] | None = None
        """Called on new output, instead of setting `changed`."""

    @property
    def finished(self) -> bool:
        for completion in self.completions:
            if completion.finish_reason is None:
                return False
        return True

    def add_prompt_logprobs(self, positions: list[TokenLogprobs]) -> None:
        """Append positions in order.

        A preempted prompt repeats some, which are dropped.
        """
        if self.prompt_logprobs is None:
            return
        room = len(self.requests[0].prompt_token_ids) - len(self.prompt_logprobs)
        self.prompt_logprobs.extend(_position(p, self.tokenizer) for p in positions[:room])

    def mark_tokens(self, now: float) -> float | None:
        """Record the time of tokens; return the previous time."""
        timings = self.timings
        before = timings.last_token
        if before is None:
            timings.first_token = now
            timings.first_scheduled = self.requests[0].first_scheduled
        timings.last_token = now
        return before

    def mark_finished(self) -> None:
        self.timings.finished = time.monotonic()
        self.timings.num_preemptions = sum(r.num_preemptions for r in self.requests)

    @property
    def has_output(self) -> bool:
        if self.only_final:
            return self.finished
        for completion in self.completions:
            if completion.has_new_output:
                return True
        return False

    def take_output(self) -> RequestOutput | None:
        """Return the caller's next output, or None."""
        if not self._delta:
            if not self.has_output:
                return None
            return self._output([c.take_output(delta=False) for c in self.completions])
        outputs = []
        for completion in self.completions:
            if completion.has_new_output:
                outputs.append(completion.take_output(delta=True))
        return self._output(outputs) if outputs else None

    def final_output(self) -> RequestOutput:
        """Return all output, not counting it as taken."""
        return self._output([c.peek_output() for c in self.completions])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        request = self.requests[0]
        num_ended = 0
        for completion in self.completions:
            num_ended += completion.finish_reason is not None
        if not num_ended and self._unfinished is not None:
            return replace(self._unfinished, outputs=outputs)
        source: Source | None = request.parts.get(encoder_decoder.NAME)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            encoder_prompt=self.source,
            encoder_prompt_token_ids=None if source is None else source.token_ids or None,
            outputs=outputs,
            finished=num_ended == len(self.completions),
            num_cached_tokens=request.num_cached_tokens,
            media_tokens=input_embeds.tokens_by_modality(request.parts.get(input_embeds.NAME)),
            timings=self.timings,
            error=self.error or next((c.failure for c in self.completions if c.failure), None),
            error_param=self.error_param,
            # These are known of completions that have ended.
            kv_transfer_params=self._kv_transfer_params() if num_ended else None,
            kv_compression=self._kv_compression() if num_ended else None,
            drafts=self._drafts() if num_ended else None,
        )
        if not num_ended:
            self._unfinished = output
        return output

    def _kv_compression(self) -> KVCompressionUsage | None:
        return KVCompressionUsage.total(request.compression_usage for request in self.requests)

    def _drafts(self) -> DraftUsage | None:
        return DraftUsage.total(request.draft_usage for request in self.requests)

    def _kv_transfer_params(self) -> dict[str, Any] | None:
        for request in self.requests:
            if request.kv_transfer_params:
                return request.kv_transfer_params
        return None


def output_failure(error: Exception) -> str:
    """Return the error of a request whose output failed."""
    return f"its output could not be processed: {type(error).__name__}: {error}"


def _position(position: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """Return the position's own token, then the most likely ones."""
    own, top_ids = position.token_id, position.top_ids
    text: Callable[[int], str | None] = _no_text if tokenizer is None else tokenizer.token_text
    entry = Logprob(position.logprob, position.rank, text(own))
    table = {own: entry}
    # A step may bring thousands of positions: no loop in Python.
    entries = map(Logprob, position.top_logprobs, count(1), map(text, top_ids))
    table.update(zip(top_ids, entries, strict=True))
    table[own] = entry
    return table


def _no_text(token: int) -> None:
    """Return no text, without a tokenizer."""
