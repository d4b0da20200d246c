"""How many requests and tokens a step has, and which requests go first."""

from __future__ import annotations

from typing import Annotated, Literal

from .annotations import AtLeastOne, doc
from .model_options import ModelOptions


class SchedulingOptions(ModelOptions, frozen=True, kw_only=True):
    """How many requests and tokens a step has, and which requests go first."""

    max_model_len: Annotated[
        AtLeastOne | Literal["auto"] | None,
        doc(
            "Context length in tokens; default: the model's. auto (or -1): the model's, or as much "
            "of it as fits in the KV cache."
        ),
    ] = None
    max_num_seqs: Annotated[int, doc("Requests that run at once (slots).", ge=1)] = 256
    max_num_batched_tokens: Annotated[
        AtLeastOne | None,
        doc("Token budget of one step; default: 8192 on a GPU, 2048 on a CPU."),
    ] = None
    max_waiting_requests: Annotated[
        AtLeastOne | None,
        doc("Refuse new requests (503) if this many are waiting; default: no limit."),
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        doc("Split long prompts over several steps. Off: a prompt must fit in one budget."),
    ] = True
    long_prefill_token_threshold: Annotated[
        int, doc("Most tokens of one prompt in a step; 0: no limit.", ge=0)
    ] = 0
    ttft_target_ms: Annotated[
        float,
        doc(
            "Milliseconds in which first tokens should come. Where one would come later, requests "
            "that generate wait while prompts are computed, at most one and a half times as long; "
            "0: they never wait.",
            ge=0.0,
            le=1e6,
        ),
    ] = 50.0
    itl_target_ms: Annotated[
        float,
        doc(
            "Milliseconds between two tokens of a stream (inter-token latency) that prompts beside "
            "it may cost: while streams decode, steps with prompts are no longer, nor do streams "
            "wait longer for first tokens, which give way. 0: no limit.",
            ge=0.0,
            le=1e6,
        ),
    ] = 45.0
    scheduling_policy: Annotated[
        str, doc("Who goes first: fcfs, priority (lower value first), or a plugin's.")
    ] = "fcfs"
