"""A request as the scheduler sees it: tokens, progress, blocks."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..pooling import PooledRow, PoolingParams
from ..types import FinishReason, GrammarStart, SamplingParams, TokenLogprobs


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    """Waits for a KV connector; its place in the queue is kept."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to generate. `n > 1` is n of these, the first one leading."""

    request_id: str
    """The engine's own name, never a caller's: no two requests of a process share one."""
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved: never more than the context leaves."""
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    """Empty with ignore_eos."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarStart | None = None
    external_id: str = ""
    """What the caller calls the request, for messages: siblings share it, and it keys nothing."""
    priority: int = 0
    cache_salt: str | None = None
    cache_extra: tuple[str | int, ...] = ()
    """Whatever else the KV depends on (an adapter's name, an image's digest)."""
    pooling: PoolingParams | None = None
    """Of a request for a vector, which takes the place of one sampled token (`max_tokens` is 1)."""
    token_type_ids: tuple[int, ...] = ()
    """[num_prompt_tokens] or empty; see `SlotStart`."""
    reads_cache: bool = True
    """Off: every position must be computed here, so prefix hits are of no use."""
    arrival: float = field(default_factory=time.monotonic)
    leader: Request | None = None
    """Wait until this sibling's prompt is computed, then share its blocks."""

    status: Status = Status.WAITING
    order: tuple[Any, ...] = ()
    """The policy's key and a running number: the place in every queue, given by `add`."""
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Known tokens and those being sampled by steps in flight."""
    num_computed_tokens: int = 0
    """Tokens whose KV is written or being written by a step in flight."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    epoch: int = 0
    """Rises with each preemption, and at the end: results of an older epoch are dropped."""
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full block of known tokens, made as needed."""
    num_registered_blocks: int = 0
    """Blocks of `block_ids` that prefix hits can find."""
    external_end: int | None = None
    """Tokens up to which a KV connector has blocks; 0: none, None: not known yet."""
    num_loaded_tokens: int = 0
    """Tokens that a KV connector brought."""
    num_offered_blocks: int = 0
    """Blocks of `block_ids` that a KV connector has been offered to save, or need not be."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector gave out at the end; what the caller gave is in `params`."""
    private_salt: str | None = None
    """Sibling sharing where prefix caching is off: hits stay among the siblings."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been passed on (not again after preemption)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    first_scheduled: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_known_tokens
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        """Prompt and output at their longest."""
        self.stop_ids = self.eos_token_ids.union(self.params.stop_token_ids)
        if self.params.prompt_logprobs is not None:
            self.reads_cache = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and received output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens being sampled by steps in flight: counted, but not yet known."""
        return self.num_tokens - self.num_known_tokens

    @property
    def prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens at positions start .. end - 1, prompt and received output as one sequence."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return self.prompt_token_ids[start:] + outputs

    def stop_on(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """(finish_reason, stop_reason) if the token just appended ends the output."""
        num_outputs = len(self.output_token_ids)
        # With a grammar, an early end was sampled only because nothing else was possible.
        early = num_outputs < self.params.min_tokens and self.grammar is None
        if token_id in self.stop_ids and not early:
            return "stop", None if token_id in self.eos_token_ids else token_id
        if self.num_known_tokens >= self.max_total_tokens:
            return "length", None
        return None


class Update(msgspec.Struct):
    """What one step, or a failure, brought to one request."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """[len(new_token_ids)]"""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The next prompt tokens', in order, each prompt token once."""
    pooled: PooledRow | None = None
    """A pooling request's result; it is finished then."""
    finished: bool = False
    error: str | None = None
