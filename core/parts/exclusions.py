"""Mutually exclusive capabilities of a step, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from ..errors import ConfigError
from . import (
    adapters,
    encoder_decoder,
    input_embeds,
    kv_compression,
    kv_transfer,
    routed_experts,
    speculation,
    states,
)

TENSOR_PARALLEL = "tensor_parallel"
PIPELINE = "pipeline"
DATA_PARALLEL = "data_parallel"
COMMON_EXPERTS = "common_experts"
EXPERT_BALANCE = "expert_balance"
RECORDING = "recording"
CALCULATED_SCALES = "calculated_scales"
BATCH_INVARIANT = "batch_invariant"
KV_LEVELS = "kv_levels"

OPTIONS: Mapping[str, str] = {
    speculation.NAME: "speculative_config",
    kv_compression.NAME: "kv_compression",
    kv_transfer.NAME: "kv_transfer_config",
    adapters.NAME: "enable_lora",
    routed_experts.NAME: "enable_return_routed_experts",
    TENSOR_PARALLEL: "tensor_parallel_size",
    PIPELINE: "pipeline_parallel_size",
    DATA_PARALLEL: "data_parallel_size",
    COMMON_EXPERTS: "enable_expert_parallel",
    EXPERT_BALANCE: "enable_eplb",
    RECORDING: "record_steps",
    CALCULATED_SCALES: "calculate_kv_scales",
    BATCH_INVARIANT: "batch_invariant",
    KV_LEVELS: "kv_compression_levels",
}
"""Capability or mode → its option."""
MODELS: Mapping[str, str] = {
    states.NAME: "keeps states of sequences",
    encoder_decoder.NAME: "has an encoder",
    input_embeds.NAME: "reads pictures",
}
"""Capability of a model → what the model does."""
EXCLUDES: Mapping[str, Mapping[str, str]] = {
    kv_transfer.NAME: {
        states.NAME: "KV connectors move blocks alone",
        encoder_decoder.NAME: "KV connectors move the decoder's blocks alone",
    },
    kv_compression.NAME: {
        encoder_decoder.NAME: "only the decoder's keys and values are compacted",
    },
    adapters.NAME: {
        encoder_decoder.NAME: "sources are encoded without adapters yet",
        EXPERT_BALANCE: "experts that move are not adapted",
    },
    encoder_decoder.NAME: {
        PIPELINE: "its layers are not divided among stages yet",
        EXPERT_BALANCE: "it has no experts",
    },
    input_embeds.NAME: {
        RECORDING: "a recording has no pictures, so it could not be replayed; language_model_only "
        "serves text alone",
    },
    COMMON_EXPERTS: {
        speculation.NAME: "engines with common experts (data_parallel_size) do not draft in step "
        "with each other yet",
        adapters.NAME: "tokens of other engines would need their adapters",
        encoder_decoder.NAME: "it has no experts",
        PIPELINE: "engines with common experts (data_parallel_size) have no stages yet",
        EXPERT_BALANCE: "experts do not move between engines (data_parallel_size) yet",
        RECORDING: "steps of engines with common experts (data_parallel_size) could not be "
        "replayed alone",
        CALCULATED_SCALES: "engines with common experts (data_parallel_size) do not begin with the "
        "same step",
        BATCH_INVARIANT: "sums over engines' ranks (data_parallel_size) do not have one order",
    },
    EXPERT_BALANCE: {
        PIPELINE: "experts of stages do not move yet",
        DATA_PARALLEL: "experts do not move between engines (data_parallel_size) yet",
    },
    RECORDING: {
        kv_transfer.NAME: "what a KV connector loads is not in a recording, so it could not be "
        "replayed",
    },
    CALCULATED_SCALES: {
        kv_transfer.NAME: "keys and values from elsewhere were cached with other scales",
        encoder_decoder.NAME: "keys and values of sources are kept in the model's type",
    },
    routed_experts.NAME: {
        kv_transfer.NAME: "what a KV connector loads was routed elsewhere",
        kv_compression.NAME: "the places of compacted tokens say nothing of their routing",
        encoder_decoder.NAME: "it has no experts",
        PIPELINE: "the routers of other stages are not read",
    },
    BATCH_INVARIANT: {
        kv_compression.NAME: "which tokens are kept depends on scores, whose sums do not have one "
        "order",
        adapters.NAME: "products with adapters do not have one order of sums yet",
        states.NAME: "states are computed in another order where a prompt is in chunks",
        encoder_decoder.NAME: "sources that are encoded together share products",
        input_embeds.NAME: "pictures that are encoded together share products; "
        "language_model_only serves text alone",
        TENSOR_PARALLEL: "sums over ranks do not have one order",
        CALCULATED_SCALES: "the first step decides the scales",
        KV_LEVELS: "which tokens move together, and what is added up first, depends on the step",
    },
    KV_LEVELS: {
        encoder_decoder.NAME: "only the decoder's keys and values are compacted",
        CALCULATED_SCALES: "levels are of caches in the model's type, which has no scales",
    },
}
"""Capability → other or mode → reason. Each pair occurs once."""
NEEDS: Mapping[str, str] = {
    COMMON_EXPERTS: DATA_PARALLEL, EXPERT_BALANCE: TENSOR_PARALLEL,
}  # fmt: skip
"""Mode → a required other."""


def reason_against(
    one: str, other: str, more: Mapping[str, Mapping[str, str]] | None = None
) -> str | None:
    """Return why two capabilities or modes (or their needs) exclude each other, or None. more:
    external parts' exclusions.
    """
    for first, second in ((one, other), (NEEDS.get(one, one), NEEDS.get(other, other))):
        if (found := _exclusion(first, second, more or {})) is not None:
            return found[2]
    return None


def _exclusion(
    one: str, other: str, more: Mapping[str, Mapping[str, str]]
) -> tuple[str, str, str] | None:
    """Return which excludes which, and why."""
    for table in (EXCLUDES, more):
        for first, second in ((one, other), (other, one)):
            if (reason := table.get(first, {}).get(second)) is not None:
                return first, second, reason
    return None


def check_exclusions(
    active: Collection[str], more: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Raises ConfigError, naming an option, if two exclude each other."""
    for one, other in combinations(active, 2):
        if (found := _exclusion(one, other, more or {})) is None:
            continue
        first, second, reason = found
        if first in MODELS:
            first, second = second, first
        option = OPTIONS.get(first, f"parts.{first}")
        if second in MODELS:
            message = f"{option}: this model {MODELS[second]}, and {reason}"
        else:
            message = f"{option}: {reason} ({OPTIONS.get(second, second)}); leave one of them out"
        raise ConfigError(message, param=option)
