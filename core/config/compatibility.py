"""Which options of an engine exclude each other, or need each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cache.level_options import chooses
from ..errors import ConfigError
from ..parts import (
    adapters,
    exclusions,
    kv_compression,
    kv_transfer,
    routed_experts,
    speculation,
)
from ..parts.exclusions import check_exclusions
from .parallel_options import IN_PLACE

if TYPE_CHECKING:
    from .engine_config import EngineConfig


def check_compatible(config: EngineConfig) -> None:
    """Raises ConfigError, with the name of one, if options do not go together."""
    _check_parallel(config)
    check_exclusions(active_capabilities(config))
    _check_cache_size(config)
    _check_prompt_embeds(config)
    _check_kv_transfer(config)
    _check_compression(config)
    _check_prompt_length(config)
    _check_adapters(config)


def active_capabilities(config: EngineConfig) -> list[str]:
    """Return the capabilities and modes that a configuration turns on, by the names in
    `core.parts.exclusions`."""
    active = {
        speculation.NAME: config.speculative_config is not None,
        kv_compression.NAME: config.kv_compression is not None,
        exclusions.KV_LEVELS: config.kv_compression_levels is not None,
        kv_transfer.NAME: config.kv_transfer_config is not None,
        adapters.NAME: config.enable_lora,
        routed_experts.NAME: config.enable_return_routed_experts,
        exclusions.TENSOR_PARALLEL: config.tensor_parallel_size > 1,
        exclusions.PIPELINE: config.pipeline_parallel_size > 1,
        exclusions.DATA_PARALLEL: config.data_parallel_size > 1,
        exclusions.COMMON_EXPERTS: config.divides_experts_among_engines,
        exclusions.EXPERT_BALANCE: config.enable_eplb,
        exclusions.RECORDING: config.record_steps is not None,
        exclusions.CALCULATED_SCALES: config.calculate_kv_scales,
        exclusions.BATCH_INVARIANT: config.batch_invariant,
        **dict.fromkeys(config.parts, True),
    }
    return [name for name, is_on in active.items() if is_on]


def _check_parallel(config: EngineConfig) -> None:
    partition, stages = config.pipeline_layer_partition, config.pipeline_parallel_size
    if partition is not None and len(partition) != stages:
        raise ConfigError(
            f"pipeline_layer_partition: it has layers of {len(partition)} stages, and "
            f"pipeline_parallel_size is {stages}",
            param="pipeline_layer_partition",
        )
    if config.num_ranks % config.nnodes:
        raise ConfigError(
            f"nnodes: {config.num_ranks} ranks (tensor_parallel_size * pipeline_parallel_size) "
            f"cannot be divided evenly among {config.nnodes} hosts",
            param="nnodes",
        )
    if config.nnodes > 1 and config.data_parallel_size > 1:
        raise ConfigError(
            "nnodes: several engines (data_parallel_size) are on one host, or on those of a Ray "
            "cluster (executor ray)",
            param="nnodes",
        )
    if config.all2all_backend not in IN_PLACE and not config.enable_expert_parallel:
        raise ConfigError(
            f"all2all_backend: {config.all2all_backend!r} exchanges tokens between ranks that hold "
            "experts whole: it needs enable_expert_parallel",
            param="all2all_backend",
        )
    divided = config.enable_expert_parallel and config.tensor_parallel_size > 1
    if config.enable_eplb and not divided:
        raise ConfigError(
            "enable_eplb: experts move between ranks that hold them whole: it needs "
            "enable_expert_parallel and a tensor_parallel_size above 1",
            param="enable_eplb",
        )
    if config.eplb_config.num_redundant_experts and not config.enable_eplb:
        raise ConfigError(
            "eplb_config.num_redundant_experts: copies are placed by load; set enable_eplb",
            param="eplb_config",
        )


def _check_cache_size(config: EngineConfig) -> None:
    if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is not None:
        raise ConfigError(
            "kv_cache_memory_bytes: the size of the KV cache is either bytes or blocks "
            "(num_gpu_blocks_override); leave one of them out",
            param="kv_cache_memory_bytes",
        )


def _check_prompt_embeds(config: EngineConfig) -> None:
    if not config.enable_prompt_embeds:
        return
    for field, is_on, why in (
        ("pipeline_parallel_size", config.pipeline_parallel_size > 1,
         "later stages do not know where embeddings stand"),
        ("record_steps", config.record_steps is not None, "a recording has no embeddings"),
    ):  # fmt: skip
        if is_on:
            raise ConfigError(
                f"enable_prompt_embeds: does not go with {field}: {why}; leave one of them out",
                param="enable_prompt_embeds",
            )


def _check_kv_transfer(config: EngineConfig) -> None:
    if config.kv_transfer_config is None:
        return
    if not config.enable_prefix_caching:
        raise ConfigError(
            "kv_transfer_config: what a connector loads becomes part of the prefix cache, "
            "which enable_prefix_caching turns off",
            param="kv_transfer_config",
        )


WIDE_TYPES = ("auto", "bfloat16", "float16", "float32")
"""Values of `kv_cache_dtype` that store numbers as they are computed."""
COMPRESSION_OPTIONS = {
    "kv_compression_ratio": 0.5, "kv_compression_budget": None, "kv_compression_interval": 0,
    "kv_compression_prompt_interval": 0, "kv_compression_on_pressure": False,
    "kv_compression_threshold": 1.0,
}  # fmt: skip
"""Options of KV compression → their defaults."""


def _check_compression(config: EngineConfig) -> None:
    _check_levels(config)
    if not config.compresses_kv:
        for name, default in COMPRESSION_OPTIONS.items():
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}: no cache is compacted without a KV compressor; name one with "
                    "kv_compression, or levels with kv_compression_levels",
                    param=name,
                )
    own_ratio = config.kv_compression_ratio != COMPRESSION_OPTIONS["kv_compression_ratio"]
    if config.kv_compression_budget is not None and own_ratio:
        raise ConfigError(
            "kv_compression_budget: how many tokens stay is either a budget or a share "
            "(kv_compression_ratio); leave one of them out",
            param="kv_compression_budget",
        )
    for name in ("kv_compression_interval", "kv_compression_prompt_interval"):
        if config.kv_compression_on_pressure and getattr(config, name):
            raise ConfigError(
                f"{name}: caches are compacted only when blocks run out "
                "(kv_compression_on_pressure); leave one of them out",
                param=name,
            )
    if config.kv_compression_threshold < 1 and not config.kv_compression_on_pressure:
        raise ConfigError(
            "kv_compression_threshold: caches are compacted after each prompt, however many blocks "
            "are in use; set kv_compression_on_pressure, too",
            param="kv_compression_threshold",
        )
    if config.kv_compression_prompt_interval and not config.enable_chunked_prefill:
        raise ConfigError(
            "kv_compression_prompt_interval: prompts are computed in one step "
            "(enable_chunked_prefill is off), so their caches are compacted only after it",
            param="kv_compression_prompt_interval",
        )


def _check_levels(config: EngineConfig) -> None:
    levels = config.cache_levels
    if not levels:
        return
    for name in ("kv_compression_ratio", "kv_compression_budget"):
        if getattr(config, name) != COMPRESSION_OPTIONS[name]:
            raise ConfigError(
                f"{name}: the levels say how many tokens stay (kv_compression_levels); leave one "
                "of them out",
                param=name,
            )
    if chooses(levels) and config.kv_compression is None:
        raise ConfigError(
            f"kv_compression_levels: {config.kv_compression_levels} keeps some tokens, or puts "
            "them into levels by importance; name a KV compressor that chooses them with "
            "kv_compression",
            param="kv_compression_levels",
        )
    if config.kv_compression is not None and not chooses(levels):
        raise ConfigError(
            f"kv_compression: {config.kv_compression!r} would choose nothing, as all tokens stay "
            f"in one level of each age (kv_compression_levels {config.kv_compression_levels}); "
            "leave it out",
            param="kv_compression",
        )
    if config.kv_cache_dtype not in WIDE_TYPES:
        raise ConfigError(
            "kv_compression_levels: the newest tokens are cached in the model's type, and "
            f"kv_cache_dtype is {config.kv_cache_dtype}; leave one of them out",
            param="kv_compression_levels",
        )


def _check_prompt_length(config: EngineConfig) -> None:
    budget, length = config.max_num_batched_tokens, config.given_model_len
    if config.enable_chunked_prefill or budget is None or length is None:
        return
    if budget < length:
        raise ConfigError(
            f"max_num_batched_tokens: {budget} is below max_model_len ({length}), and "
            "enable_chunked_prefill is off: such prompts could never run",
            param="max_num_batched_tokens",
        )


def _check_adapters(config: EngineConfig) -> None:
    if not config.enable_lora and config.lora_modules:
        raise ConfigError(
            "lora_modules: adapters are served with enable_lora", param="lora_modules"
        )
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras: {config.max_cpu_loras} adapters in host memory are fewer than those "
            f"of running requests (max_loras, {config.max_loras})",
            param="max_cpu_loras",
        )
