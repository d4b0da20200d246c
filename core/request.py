"""A request as the scheduler sees it: tokens, progress, blocks."""

from __future__ import annotations

import enum
import random
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from .lora_request import AdapterRef
from .outputs import DraftUsage, FinishReason, KVCompressionUsage
from .parts import encoder_decoder, input_embeds, media, speculation
from .parts.encoder_decoder import Source
from .pooling_params import PooledRow, PoolingParams
from .sampling_params import SamplingParams
from .step import CompiledGrammar, TokenLogprobs

NEVER = sys.maxsize
"""A number of tokens that no sequence has."""


class Status(enum.Enum):
    """State of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    """Waits for a part, such as a load of a KV connector; its place in the queue is kept."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to generate. A call with `n > 1` has n of these; the first one is the leader."""

    request_id: str
    """The engine's own id, unique in the process; never the caller's."""
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved: at most what the context leaves."""
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    """Empty if `ignore_eos` is set."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: CompiledGrammar | None = None
    external_id: str = ""
    """The caller's id of the request, for messages only; siblings share it."""
    priority: int = 0
    cache_salt: str | None = None
    cache_extra: tuple[str | int, ...] = ()
    """Other inputs that the KV depends on (an adapter's digest)."""
    late_extra: tuple[tuple[int, str], ...] = ()
    """Positions, each with an input that the KV depends on from there on (an item's digest): a
    prefix before the first is that of requests without."""
    pooling: PoolingParams | None = None
    """Set for a pooling request; its result takes the place of one sampled token (`max_tokens` is
    1)."""
    token_type_ids: tuple[int, ...] = ()
    """[num_prompt_tokens] or empty; see `SlotStart`."""
    reads_cache: bool = True
    """False: every position must be computed here, so prefix hits are not used."""
    arrival: float = field(default_factory=time.monotonic)
    leader: Request | None = None
    """Wait until this sibling's prompt is computed, then share its blocks."""

    parts: dict[str, Any] = field(default_factory=dict)
    """Name of a part → what it must know of the request, or keeps of it."""

    status: Status = Status.WAITING
    order: tuple[Any, ...] = ()
    """The policy's key and a running number: the place in every queue, given by `add`."""
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Known tokens and those being sampled by steps in flight. While it decodes, `DecodeRows` may
    count those later."""
    num_computed_tokens: int = 0
    """Tokens whose KV is written or being written by a step in flight; the same is true."""
    num_unverified_tokens: int = 0
    """Drafts in steps in flight: counted in `num_tokens` and `num_computed_tokens`, which are upper
    bounds by as much."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    epoch: int = 0
    """Rises with each preemption, and at the end: results of an older epoch are dropped."""
    slot: int = -1
    tables: list[list[int]] = field(default_factory=list)
    """Block ids per group of layers: one block per column, the null block where the block was given
    back. Empty while the request holds no blocks."""
    num_released_blocks: list[int] = field(default_factory=list)
    """[len(tables)] Leading columns whose blocks were given back."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full block of known tokens, made as needed."""
    num_registered_blocks: int = 0
    """Columns of `tables` that prefix hits can find."""
    look_at: int = NEVER
    """Computed tokens from which parts are asked about its rows (`SchedulerPart.look_at`)."""
    compacted: bool = False
    """Whether its cache was compacted: neither its blocks nor later ones, which were computed from
    them, are what their tokens' hashes stand for."""
    compression_usage: KVCompressionUsage | None = None
    """What compactions have left of its cache, set at its end; None: it was not compacted."""
    stale: bool = False
    """Whether other weights than the present ones computed some of its cache: as with `compacted`,
    its blocks are not what their tokens' hashes stand for."""
    weight_versions: tuple[tuple[int, str], ...] = ()
    """(number of output tokens, version of the weights that sampled the tokens from there on), in
    order."""
    routed_experts: np.ndarray | None = None
    """[tokens computed, layers, top_k] What routers chose, set at its end; None: it is not kept."""
    draft_usage: DraftUsage | None = None
    """Its drafts that were verified; None: none yet."""
    num_dropped_tokens: int = 0
    """What is subtracted from a position for its place in the cache: computed tokens that the cache
    does not hold any more, less the room of blocks of levels, which count as whole ones."""
    level_tokens: tuple[int, ...] = ()
    """Tokens in each level of its cache (`core.cache.levels`) but the first; empty: none moved."""
    level_positions: tuple[int, ...] = ()
    """Tokens of the sequence that those stand for."""
    num_loaded_tokens: int = 0
    """Tokens that a KV connector loaded."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters that the KV connector returned at the end; the caller's are in `params`."""
    private_salt: str | None = None
    """Hash salt for siblings if prefix caching is off, so that only siblings hit each other's
    blocks."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been passed on (not again after preemption)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    """Tokens that were computed when it was preempted, until it runs again."""
    first_scheduled: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_known_tokens
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        """Maximum length of prompt and output."""
        self.stop_ids = self.eos_token_ids.union(self.params.stop_token_ids)
        if self.params.prompt_logprobs is not None:
            self.reads_cache = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt tokens and received output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens in the cache, those that steps in flight write included."""
        return self.num_computed_tokens - self.num_dropped_tokens

    @property
    def is_named(self) -> bool:
        """Whether its blocks are what the hashes of its tokens stand for."""
        return not (self.compacted or self.stale)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens being sampled by steps in flight: counted, but not yet known."""
        return self.num_tokens - self.num_known_tokens

    @property
    def block_ids(self) -> list[int]:
        """Block table of the only group: with a KV connector there is a single group."""
        return self.tables[0] if self.tables else []

    @property
    def prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens at positions start .. end - 1, prompt and received output as one
        sequence."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return self.prompt_token_ids[start:] + outputs

    def stop_on(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Return (finish_reason, stop_reason) if the token just appended ends the output."""
        num_outputs = len(self.output_token_ids)
        # With a grammar, an end token before min_tokens is sampled only if no other token was
        # allowed.
        too_early = num_outputs < self.params.min_tokens and self.grammar is None
        if token_id in self.stop_ids and not too_early:
            return "stop", None if token_id in self.eos_token_ids else token_id
        if self.num_known_tokens >= self.max_total_tokens:
            return "length", None
        return None

    def append_all_but_last(self, new: list[int]) -> int:
        """Append the tokens of one step up to the one before the last, and return the last.

        A token that ends the request is the last: those after it are removed from `new`.
        """
        outputs = self.output_token_ids
        for number, token_id in enumerate(new):
            outputs.append(token_id)
            if number == len(new) - 1 or self.stop_on(token_id) is not None:
                break
        del new[number + 1 :]
        return outputs.pop()

    def new_prompt_logprobs(
        self, first_position: int, positions: list[TokenLogprobs] | None
    ) -> list[TokenLogprobs] | None:
        """Return the positions not published yet: a preempted prompt is computed more than once.

        Position p is about prompt token p + 1. The first `num_prompt_logprobs` have been published.
        """
        if positions is None:
            return None
        new = positions[max(0, self.num_prompt_logprobs - first_position) :]
        self.num_prompt_logprobs += len(new)
        return new or None


def new_scheduler_id() -> str:
    """Return a new name for a request inside the engine."""
    return uuid.uuid4().hex


def draw_seed(seeds: random.Random) -> int:
    """Return the seed of a request that brings none."""
    return seeds.getrandbits(62)


class GrammarRequest(msgspec.Struct, frozen=True):
    """What compiling `SamplingParams.structured_outputs` depends on besides the parameters."""

    chat: bool
    """The prompt comes from the chat template: the grammar begins after the reasoning."""
    template_arguments: dict[str, Any] | None = None
    """`chat_template_kwargs`, which may turn reasoning off."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request that admission has accepted: all that a core needs to run it.

    Every limit that can be checked without the scheduler's state has been checked.
    """

    request_id: str
    """The caller's."""
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    """Of a request without a grammar, which has end tokens of its own."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarRequest = GrammarRequest(chat=False)
    """Read only if `params.structured_outputs` is set."""
    priority: int = 0
    cache_salt: str | None = None
    pooling: PoolingParams | None = None
    """Completed."""
    token_type_ids: tuple[int, ...] = ()
    reads_cache: bool = True
    source: Source | None = None
    """Of an encoder-decoder model, whose prompt is the decoder's."""
    prediction_token_ids: list[int] = []
    """What the caller expects of the output, for drafts."""
    cache_extra: tuple[str | int, ...] = ()
    late_extra: tuple[tuple[int, str], ...] = ()
    """These two: see `Request`."""
    media: tuple[media.MediaItem, ...] = ()
    """Items of the prompt, in order."""
    parts: dict[str, Any] = {}
    """Name of a part → what it must know of the request."""
    adapter: AdapterRef | None = None
    """The adapter that the caller asks for; the core finds it, and puts it into `parts`."""
    data_parallel_rank: int | None = None
    """The member that the caller has chosen; None: any."""
    drawn_seed: int | None = None
    """The seed of a request whose parameters have none; None: the core draws it."""

    def requests(self, *, seed: int = 0, grammar: CompiledGrammar | None = None) -> list[Request]:
        """Return `params.n` scheduler requests, the first one leading.

        Their ids are drawn here: none that a caller may choose can equal one of them.
        """
        eos = self.eos_token_ids if grammar is None else frozenset(grammar.start.eos_token_ids)
        extra: tuple[str | int, ...] = self.cache_extra
        parts = dict(self.parts)
        if self.source is not None:
            extra = (*extra, self.source.digest)
            parts[encoder_decoder.NAME] = self.source
        if self.media:
            parts[input_embeds.NAME] = input_embeds.RequestItems(self.media)
        if self.prediction_token_ids:
            parts[speculation.NAME] = tuple(self.prediction_token_ids)
        name, count = new_scheduler_id(), self.params.n
        requests: list[Request] = []
        for index in range(count):
            requests.append(
                Request(
                    request_id=name if count == 1 else f"{name}-{index}",
                    external_id=self.request_id,
                    prompt_token_ids=self.prompt_token_ids,
                    params=self.params,
                    max_tokens=self.max_tokens,
                    seed=seed + index,
                    eos_token_ids=eos,
                    bad_words_token_ids=self.bad_words_token_ids,
                    grammar=grammar,
                    priority=self.priority,
                    cache_salt=self.cache_salt,
                    pooling=self.pooling,
                    token_type_ids=self.token_type_ids,
                    reads_cache=self.reads_cache,
                    cache_extra=extra,
                    late_extra=(*media.late_extras(self.media), *self.late_extra),
                    parts=dict(parts),
                    leader=requests[0] if requests else None,
                )
            )
        return requests


class Update(msgspec.Struct, gc=False):
    """The effect of one step, or of a failure, on one request."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """[len(new_token_ids)]"""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the next prompt tokens, in order, each prompt token once."""
    pooled: PooledRow | None = None
    """A pooling request's result; the request is then finished."""
    finished: bool = False
    error: str | None = None
    error_param: str | None = None
    """The field of the request that is at fault for `error`; None: it is not the request's."""
