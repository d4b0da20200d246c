"""Outputs of requests, and statistics of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from .errors import InvalidRequest, JackfieldError, RequestFailed
from .pooling_params import PoolingOutput

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token at one position."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Token id → Logprob: the position's own token, then the most likely ones."""


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens of a completion that weights of one version sampled."""

    version: str
    """As `AsyncEngine.update_weights` named them; "default" before the first update."""
    start: int
    """The first token, from 0."""
    end: int
    """The token behind the last."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the `n` completions of a request."""

    index: int
    """0 to n - 1."""
    text: str = ""
    """Generated text: all so far, or only the new text (`OutputKind`)."""
    token_ids: list[int] = []
    """The generated token ids, including the token that ended the output."""
    token_ends: list[int] = []
    """[len(token_ids)] Where the text of each token ends, in characters from the beginning of the
    completion, also in delta mode; past its end where a stop string is, or may be, cut off. Empty
    if no text was requested."""
    logprobs: list[PositionLogprobs] | None = None
    """[len(token_ids)], if `logprobs` were requested."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, if `logprobs` were requested."""
    finish_reason: FinishReason | None = None
    """None while the output is unfinished."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS and all other reasons."""
    weight_versions: list[WeightSpan] = []
    """Which weights sampled its tokens, once it has ended."""
    routed_experts: np.ndarray | None = None
    """[prompt and output tokens but the last, which was not computed; layers with a mixture; top_k]
    uint8 or uint16: the experts that computed each token, by descending score, once it has ended.
    Those of cached prompt tokens are what was chosen when they were computed. None without
    `EngineConfig.enable_return_routed_experts`."""


class RequestTimings(msgspec.Struct, kw_only=True):
    """Monotonic times in seconds (`time.monotonic`)."""

    arrival: float
    """When the engine received the request."""
    first_scheduled: float | None = None
    """When its first tokens were planned."""
    first_token: float | None = None
    """When the first token was received."""
    last_token: float | None = None
    """When the latest token was received."""
    finished: float | None = None
    """When the last completion ended."""
    num_preemptions: int = 0
    """How often its completions were preempted and computed again."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """What `AsyncEngine.generate` yields."""

    request_id: str
    """The caller's, or a random one."""
    prompt: str | None = None
    """The prompt's text, where text was given."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """[num_prompt_tokens]; the first is None, for nothing precedes it."""
    encoder_prompt: str | None = None
    """Of an encoder-decoder model: the encoder's text, where text was given; `prompt` is the
    decoder's."""
    encoder_prompt_token_ids: list[int] | None = None
    """What the encoder read; None: the model has none."""
    outputs: list[CompletionOutput]
    """All `n` completions; in delta mode those with something new."""
    finished: bool
    """Whether all completions have ended; the last output of a stream."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    media_tokens: dict[str, int] = {}
    """Modality → prompt tokens that stand for its items."""
    timings: RequestTimings
    """When what happened."""
    error: str | None = None
    """Why, when a finish_reason is "error"."""
    error_param: str | None = None
    """The field of the request that is at fault for `error`, such as a schema that led to a dead
    end; None: it is not the request's."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters that the KV connector returned when the request ended."""
    kv_compression: KVCompressionUsage | None = None
    """What compactions have left of the caches of the completions that have ended, in sum; None:
    none of them was compacted."""
    drafts: DraftUsage | None = None
    """Of the completions that have ended, in sum; None: none of them had any."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, those of an encoder included."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())

    def failure(self) -> JackfieldError:
        """Return the exception for a finish_reason "error"."""
        if self.error is not None and self.error_param is not None:
            return InvalidRequest(self.error, param=self.error_param)
        return RequestFailed(self.error or "the request failed")


class KVCompressionUsage(msgspec.Struct, frozen=True):
    """What compactions have left of the cache of a request, at its end."""

    kept_tokens: int
    """Tokens in the cache."""
    dropped_tokens: int
    """Computed tokens that are not in it any more."""
    compactions: int
    """Compactions of the request, those before a preemption included."""
    saved_bytes: int = 0
    """Bytes, on each rank, of the blocks that its compactions gave back, less those they took."""

    @classmethod
    def total(cls, parts: Iterable[KVCompressionUsage | None]) -> KVCompressionUsage | None:
        """Return the sum of several requests; None: none of them was compacted."""
        used = [part for part in parts if part is not None]
        if not used:
            return None
        return cls(
            sum(part.kept_tokens for part in used),
            sum(part.dropped_tokens for part in used),
            sum(part.compactions for part in used),
            sum(part.saved_bytes for part in used),
        )


class DraftUsage(msgspec.Struct, frozen=True):
    """Drafts of a request that were verified."""

    accepted_tokens: int
    """Those that are tokens of its output."""
    rejected_tokens: int
    steps: int
    """Steps that verified any."""

    @classmethod
    def total(cls, parts: Iterable[DraftUsage | None]) -> DraftUsage | None:
        """Return the sum of several requests; None: none of them had drafts."""
        used = [part for part in parts if part is not None]
        if not used:
            return None
        return cls(
            sum(part.accepted_tokens for part in used),
            sum(part.rejected_tokens for part in used),
            sum(part.steps for part in used),
        )


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """What `AsyncEngine.encode` yields, once per request."""

    request_id: str
    """The caller's, or a random one."""
    prompt: str | None = None
    """The prompt's text, where text was given."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    outputs: PoolingOutput
    """One request, one result; the name is vLLM's."""
    finished: bool = True
    """Always true: a pooling request has a single output."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    timings: RequestTimings
    """When what happened."""


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine, cheap to take."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_deferred: int = 0
    """Of those waiting, the ones for which a KV connector loads."""
    num_slots: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Blocks in use by requests. Cached blocks that no request uses count as free."""
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, since the start."""
    prefix_cache_hits: int = 0
    """Prompt tokens found, since the start."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens for which the KV connector was queried, since the start."""
    external_prefix_cache_hits: int = 0
    """Tokens that the KV connector loaded, since the start."""
    num_kv_load_failures: int = 0
    """Loads of the KV connector that delivered fewer blocks than promised, since the start."""
    num_preemptions: int = 0
    preempted_tokens_restored: int = 0
    """Tokens of preempted requests that were found in the prefix cache, or loaded into it by the KV
    connector, when they ran again, since the start."""
    preempted_tokens_recomputed: int = 0
    """Tokens of preempted requests that were computed again, since the start."""
    kv_compactions: int = 0
    """Requests whose cache was compacted, since the start; again after a preemption."""
    kv_blocks_returned: int = 0
    """Blocks that compactions have made free, less those that they took, since the start."""
    kv_tokens_compacted: int = 0
    """Tokens in the caches that were compacted, before that, since the start."""
    kv_tokens_dropped: int = 0
    """Of `kv_tokens_compacted`, those that compactions have dropped."""
    kv_bytes_returned: int = 0
    """Bytes of `kv_blocks_returned`, on each rank."""
    kv_bytes_saved: int = 0
    """Of `kv_bytes_returned`, those of requests that run: what their caches would take besides."""
    kv_level_bytes_saved: dict[str, int] = {}
    """Level (`CacheLevel.name`) → of `kv_bytes_saved`, what tokens that moved there would take
    besides, those that were dropped on the way there included; empty without levels."""
    kv_tokens_missing: int = 0
    """Computed tokens of running requests that compactions have dropped from their caches."""
    kv_tokens_computed: int = 0
    """Computed tokens of running requests, whether cached or dropped; only with KV compression."""
    kv_compaction_seconds: float = 0.0
    """Time that compactions took on the device, since the start."""
    late_preparations: int = 0
    """Kernels compiled or loaded, and graphs recorded, in steps that waited for it, since the
    start."""
    graph_recording_failures: int = 0
    """Failed attempts to record a step as a CUDA graph, since the start."""
    spec_decode_num_drafts: int = 0
    """Rows whose drafts were verified, since the start."""
    spec_decode_num_draft_tokens: int = 0
    """Drafts that were verified, since the start."""
    spec_decode_num_accepted_tokens: int = 0
    """Of those, the ones that requests kept."""
    spec_decode_num_accepted_tokens_per_pos: dict[int, int] = {}
    """The same by their place among a row's drafts, from 0; empty without speculative decoding."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    requests_finished: dict[str, int] = {}
    """finish_reason → count, since the start."""
    part_counts: dict[str, float] = {}
    """What parts from plugins count (`SchedulerPart.counts`), since the start: `NAME.count`."""

    @property
    def kv_compression_ratio(self) -> float:
        """Return the share of running requests' computed tokens that their caches have, in the
        layers that are compacted; 1 without compactions."""
        if not self.kv_tokens_computed:
            return 1.0
        return 1 - self.kv_tokens_missing / self.kv_tokens_computed
