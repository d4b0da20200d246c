"""The KV cache: its blocks, memory and types, what moves it, and what compacts it."""

from __future__ import annotations

from typing import Annotated

from .annotations import AtLeastOne, AtLeastTwo, DType, KVCacheDType, Name, doc
from .kv_transfer_config import KVTransferConfig
from .scheduling_options import SchedulingOptions


class CacheOptions(SchedulingOptions, frozen=True, kw_only=True):
    """The KV cache: its blocks, memory and types, what moves it, and what compacts it."""

    block_size: Annotated[int, doc("Tokens in a KV-cache block.", ge=1, le=1024)] = 16
    enable_prefix_caching: Annotated[bool, doc("Reuse KV blocks of equal prefixes.")] = True
    gpu_memory_utilization: Annotated[
        float, doc("Share of the device's memory this engine may use.", gt=0.0, le=1.0)
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        AtLeastOne | None,
        doc(
            "Bytes of each device for the KV cache and states of sequences, instead of what "
            "gpu_memory_utilization, or cpu_kvcache_space, leaves for them; default: what they "
            "leave."
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        AtLeastTwo | None, doc("KV-cache blocks, instead of what profiling finds.")
    ] = None
    cpu_kvcache_space: Annotated[
        float, doc("GiB for the KV cache when the device is a CPU.", gt=0.0, le=1e6)
    ] = 1.0
    kv_cache_dtype: Annotated[
        KVCacheDType,
        doc(
            "Type of cached keys and values; auto: the model's. fp8 (which is fp8_e4m3) takes "
            "half the room of bfloat16. int8 (vLLM's int8_per_token_head) and int4 have a scale "
            "and a zero for each token and head, int8_int4 has keys in 8 bits and values in 4. Of "
            "the others, the model's alone."
        ),
    ] = "auto"
    kv_cache_dtype_skip_layers: Annotated[
        tuple[Name, ...],
        doc(
            "Layers that cache in the model's type, whatever kv_cache_dtype is: numbers of layers "
            "with attention from 0, or from the end with -1, or sliding_window for all with a "
            "window or chunks."
        ),
    ] = ()
    mamba_cache_dtype: Annotated[
        DType,
        doc(
            "Type of states of sequences (of state-space layers, gated delta nets and short "
            "convolutions); auto: the model's for inputs of convolutions, and float32 for the rest."
        ),
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        DType,
        doc(
            "Type of states of sequences but inputs of convolutions; auto: as mamba_cache_dtype. "
            "Sums are float32; a state is rounded where a step leaves it: once per generated token."
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        doc(
            "With an fp8 cache: take the scales that the checkpoint does not have from the first "
            "step's keys and values. Off: they are 1."
        ),
    ] = False
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        doc(
            "KV connector and its options: kv_connector, kv_role, kv_connector_extra_config, "
            "kv_load_failure_policy; default: none."
        ),
    ] = None
    kv_compression: Annotated[
        Name | None,
        doc(
            "KV compressor by name: it drops tokens from requests' caches, and their blocks become "
            "free; default: none."
        ),
    ] = None
    kv_compression_ratio: Annotated[
        float,
        doc(
            "Share of a request's tokens that kv_compression keeps, but at least 16 tokens.",
            gt=0.0,
            le=1.0,
        ),
    ] = 0.5
    kv_compression_budget: Annotated[
        AtLeastOne | None,
        doc(
            "Tokens of a request that kv_compression keeps, instead of a share, but at least 16; "
            "default: kv_compression_ratio decides."
        ),
    ] = None
    kv_compression_interval: Annotated[
        int,
        doc(
            "Generated tokens between two compactions of a request's cache; 0: its cache is "
            "compacted only once, after the prompt, and with kv_compression_levels every 256 "
            "tokens.",
            ge=0,
        ),
    ] = 0
    kv_compression_prompt_interval: Annotated[
        int,
        doc(
            "Prompt tokens between two compactions while a prompt is computed, so that a cache "
            "never holds all of it; 0: only once the prompt is computed.",
            ge=0,
        ),
    ] = 0
    kv_compression_on_pressure: Annotated[
        bool,
        doc(
            "Compact caches only when KV blocks run out, before a request is preempted or another "
            "one has to wait, instead of after each prompt."
        ),
    ] = False
    kv_compression_threshold: Annotated[
        float,
        doc(
            "With kv_compression_on_pressure: share of the KV blocks in use from which caches are "
            "compacted; 1: only when blocks run out.",
            gt=0.0,
            le=1.0,
        ),
    ] = 1.0
    kv_compression_levels: Annotated[
        Name | None,
        doc(
            "Levels to which a running request's tokens move as they age, as BITS:SHARE@AGE after "
            "commas: 8@1024,4:0.5@8192 keeps the newest 1024 tokens as they are computed, older "
            "ones in 8 bits, and of those with 8192 newer ones the more important half in 4. "
            "Which half kv_compression says; without shares it is not needed. Several levels with "
            "the last age divide tokens by importance: 8:0.25@1024,4:0.5@1024. At most three; "
            "default: none."
        ),
    ] = None
