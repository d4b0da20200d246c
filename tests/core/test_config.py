"""Every option refuses nonsense with its own name."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins

NONSENSE: dict[str, list[Any]] = {
    "int": ["many", 1.5],
    "float": ["half"],
    "bool": ["yes", 2],
    "str": [7, ["a"]],
}


def kind(name: str) -> str:
    """The plain kind of an option, from its default; '' when it has none."""
    default = getattr(EngineConfig(), name)
    for result in ("bool", "int", "float", "str"):
        if type(default).__name__ == result:
            return result
    return ""


@pytest.mark.parametrize("name", EngineConfig.__struct_fields__)
def test_an_option_of_a_wrong_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: object()})
    assert caught.value.param == name
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in EngineConfig.__struct_fields__
        for value in NONSENSE.get(kind(name), [])
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"cpu_kvcache_space": float("nan")}, "cpu_kvcache_space"),
        ({"cpu_kvcache_space": float("inf")}, "cpu_kvcache_space"),
        ({"cpu_kvcache_space": 0}, "cpu_kvcache_space"),
        ({"block_size": 4096}, "block_size"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_waiting_requests": 0}, "max_waiting_requests"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"ttft_target_ms": -1.0}, "ttft_target_ms"),
        ({"max_logprobs": -2}, "max_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**64)}, "seed"),
        ({"served_model_name": ("a", "")}, "served_model_name"),
        ({"served_model_name": ("a", 3)}, "served_model_name"),
        ({"disable_plugins": ("a", None)}, "disable_plugins"),
        ({"hf_overrides": ["a"]}, "hf_overrides"),
        ({"hf_overrides": {3: 4}}, "hf_overrides"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"kv_cache_dtype_skip_layers": (0.5,)}, "kv_cache_dtype_skip_layers"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        (
            {
                "calculate_kv_scales": True,
                "kv_transfer_config": {"kv_connector": "cpu_offload"},
            },
            "calculate_kv_scales",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 10,
                "max_model_len": 20,
            },
            "max_num_batched_tokens",
        ),
    ],
)
def test_values_out_of_range_or_at_odds_are_refused_by_name(
    options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert caught.value.param == name


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineConfig.from_options({"max_num_seq": 3})


@pytest.mark.parametrize(
    "name",
    ["executor", "scheduling_policy", "reasoning_parser", "tool_call_parser", "attention_backend",
     "operations", "load_format"],
)  # fmt: skip
async def test_the_name_of_no_plugin_is_refused_before_anything_runs(name: str) -> None:
    """With the option's name and what there is."""
    before = {thread.name for thread in threading.enumerate()}
    engine = AsyncEngine(EngineConfig(**{"device": "cpu", name: "zebra"}))
    with pytest.raises(ConfigError, match=f"^{name}: no .* named 'zebra' .there are: ") as caught:
        await engine.start()
    assert caught.value.param == name
    remaining = {thread.name for thread in threading.enumerate()} - before
    assert not [thread for thread in remaining if "jackfield" in thread]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("TRITON_ATTN", "triton"), ("FLASH_ATTN", "triton"), ("FLASHINFER", "flashinfer"),
        ("TORCH_SDPA", "torch"), ("CPU_ATTN", "torch"), ("torch", "torch"),
    ],
)  # fmt: skip
def test_attention_backends_have_the_names_of_vllm(name: str, own: str) -> None:
    assert load_plugins()["attention_backend"].canonical(name) == own


@pytest.mark.parametrize("name", ["flex", "FLEX_ATTENTION"])
async def test_an_attention_backend_that_is_gone_names_what_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention_backend: .*'{name}': torch and triton"):
        await AsyncEngine(EngineConfig(device="cpu", attention_backend=name)).start()


async def test_an_engine_starts_with_another_name_of_its_backend() -> None:
    config = EngineConfig(
        device="cpu", dtype="float", attention_backend="CPU_ATTN", num_gpu_blocks_override=20
    )
    async with AsyncEngine(config) as engine:
        assert engine.info.attention_backend == "torch"
        assert engine.info.dtype == "float32"


def test_lists_and_single_strings_become_tuples() -> None:
    engine_config = EngineConfig(served_model_name="one", disable_plugins=["a", "b"])  # type: ignore[arg-type]
    assert (engine_config.served_model_name, engine_config.disable_plugins) == (
        ("one",),
        ("a", "b"),
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("device", "gpu", "auto, cuda, cpu"),
        ("dtype", "halff", "auto, bfloat16, float16, float32, half, float"),
        ("max_model_len", "atuo", "auto"),
    ],
)
def test_an_unknown_word_is_answered_with_those_that_there_are(
    option: str, value: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"words that it takes: {words}$") as caught:
        EngineConfig(**{option: value})
    assert caught.value.param == option


@pytest.mark.parametrize(("word", "same"), [("half", "float16"), ("float", "float32")])
def test_vllms_words_for_types_are_taken(word: str, same: str) -> None:
    assert EngineConfig(dtype=word).dtype == same
