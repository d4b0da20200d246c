"""A request as the scheduler sees it: tokens, progress, blocks."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from ..types import FinishReason, SamplingParams


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to generate. `n > 1` is n of these, the first one leading."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved: never more than the context leaves."""
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    """Empty with ignore_eos."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    arrival: float = field(default_factory=time.monotonic)
    leader: Request | None = None
    """Wait until this sibling's prompt is computed, then share its blocks."""

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is written or being written by a step in flight."""
    num_pending_tokens: int = 0
    """Tokens being sampled by steps in flight: counted, but not yet known."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    epoch: int = 0
    """Rises with each preemption: results of an older epoch are dropped."""
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full block of known tokens, made as needed."""
    sort_key: tuple[Any, ...] = ()
    """From the schedule policy, set when the request is queued."""
    num_registered_blocks: int = 0
    """Leading blocks that the prefix index was told of."""
    shares_prompt: bool = False
    """One of several siblings: its prompt's blocks are shared even without prefix caching."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    first_scheduled: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and received output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_known_tokens + self.num_pending_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens start .. end."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]

    @property
    def prompt_computed(self) -> bool:
        """The whole prompt is in the cache, or being written by a step in flight."""
        return self.num_computed_tokens >= len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
