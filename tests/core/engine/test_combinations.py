"""Each pair of capabilities and modes starts and serves, or is refused with an option's name, as
`core/parts/exclusions.py` and docs/reference/combinations.md have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jackfield import AsyncEngine, EngineConfig, LoRARequest, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.parts import (
    adapters,
    encoder_decoder,
    input_embeds,
    kv_compression,
    kv_transfer,
    routed_experts,
    speculation,
    states,
)
from jackfield.core.parts.exclusions import (
    BATCH_INVARIANT,
    CALCULATED_SCALES,
    COMMON_EXPERTS,
    DATA_PARALLEL,
    EXCLUDES,
    EXPERT_BALANCE,
    KV_LEVELS,
    MODELS,
    OPTIONS,
    PIPELINE,
    RECORDING,
    TENSOR_PARALLEL,
    reason_against,
)
from jackfield.core.remote import processes as remote_processes

HERE: dict[str, dict[str, Any]] = {
    speculation.NAME: {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    },
    kv_compression.NAME: {"kv_compression": "key_norm"},
    kv_transfer.NAME: {
        "kv_transfer_config": {
            "kv_connector": "cpu_offload",
            "kv_connector_extra_config": {"kv_offloading_size": 0.01},
        },
    },
    adapters.NAME: {"enable_lora": True, "max_lora_rank": 4},
    states.NAME: {},
    encoder_decoder.NAME: {},
    input_embeds.NAME: {},
    routed_experts.NAME: {"enable_return_routed_experts": True},
    RECORDING: {"record_steps": "plans"},
    CALCULATED_SCALES: {"calculate_kv_scales": True, "kv_cache_dtype": "fp8"},
    BATCH_INVARIANT: {"batch_invariant": True, "attention_backend": "torch_invariant"},
    KV_LEVELS: {
        "kv_compression_levels": "8@8,4@12",
        "kv_compression_interval": 2,
    },
}
"""Capability → options that turn it on, within one process."""
PROCESSES: dict[str, dict[str, Any]] = {
    TENSOR_PARALLEL: {"tensor_parallel_size": 2},
    PIPELINE: {"pipeline_parallel_size": 2},
    DATA_PARALLEL: {"data_parallel_size": 2},
    COMMON_EXPERTS: {"data_parallel_size": 2, "enable_expert_parallel": True},
    EXPERT_BALANCE: {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
    },
}
ALL = {**HERE, **PROCESSES}
TOGETHER: dict[tuple[str, str], dict[str, Any]] = {
    (kv_compression.NAME, KV_LEVELS): {"kv_compression_levels": "8@8,4:0.5@12"},
}
"""Pair → options that it has instead of those of each."""
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES},
    EXPERT_BALANCE: {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], **SIZES,
    },
    states.NAME: {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"], "block_ff_dim": 32, "conv_bias": False,
        "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, **SIZES,
    },
    f"{states.NAME}-{EXPERT_BALANCE}": {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"], "conv_bias": False, "norm_eps": 1e-5,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_dense_layers": 0, "use_expert_bias": True, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, **SIZES,
    },
    encoder_decoder.NAME: {
        "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "vocab_size": 64,
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2, "is_encoder_decoder": True, "activation_function": "gelu",
    },
}  # fmt: skip
"""What has a model of its own → its configuration; weights are dummies."""
SEEING: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
    "image_token_id": 60,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    },
}  # fmt: skip
# All need a mixture.
for _name in (COMMON_EXPERTS, routed_experts.NAME):
    CONFIGS[_name] = CONFIGS[EXPERT_BALANCE]
    CONFIGS[f"{states.NAME}-{_name}"] = CONFIGS[f"{states.NAME}-{EXPERT_BALANCE}"]
CONFIGS[input_embeds.NAME] = {**SEEING, "text_config": CONFIGS["plain"]}
for _name in (COMMON_EXPERTS, EXPERT_BALANCE, routed_experts.NAME):
    CONFIGS[f"{input_embeds.NAME}-{_name}"] = {**SEEING, "text_config": CONFIGS[EXPERT_BALANCE]}


def pairs(*, processes: bool, allowed: bool) -> list[tuple[str, str]]:
    """Those that are refused need no processes."""
    found = []
    for pair in combinations(ALL, 2):
        if set(pair) <= set(MODELS):
            continue  # No model has both.
        if (reason_against(*pair) is None) is allowed:
            if not allowed or bool(set(pair) & set(PROCESSES)) is processes:
                found.append(pair)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    sides = {"height": 16, "width": 16}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": sides, "crop_size": sides}
    for name, config in CONFIGS.items():
        if "vision_config" in config:
            (folder / name / "preprocessor_config.json").write_text(json.dumps(processor))
    return {name: str(folder / name) for name in CONFIGS}


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with forked.processes_of(remote_processes):
        yield


def config_of(pair: tuple[str, str], models: dict[str, str], folder: Path) -> EngineConfig:
    options = {**ALL[pair[0]], **ALL[pair[1]], **TOGETHER.get(pair, {})}
    if "record_steps" in options:
        options["record_steps"] = str(folder / "plans")
    names = ("-".join(pair), *pair, "plain")
    model = next(models[name] for name in names if name in models)
    return EngineConfig(
        model=model, load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="float32",
        attention_backend=options.pop("attention_backend", "torch"), block_size=4,
        max_model_len=48, max_num_seqs=4, num_gpu_blocks_override=60, **options,
    )  # fmt: skip


def adapter_in(folder: Path) -> LoRARequest:
    """An adapter that fits each of the models that adapters go with."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(4, 32), f"{name}.lora_B.weight": torch.randn(64, 4),
    }  # fmt: skip
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest("adapter", 1, str(folder))


async def start_and_serve(config: EngineConfig, folder: Path) -> None:
    """Two requests, one of which is long enough to be compacted."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    lora = adapter_in(folder / "adapter") if config.enable_lora else None
    async with AsyncEngine(config) as engine:
        prompts: list[Any] = [[5, 6, 7], list(range(10, 34))]
        if engine.model_config.media is not None:
            picture = np.full((16, 16, 3), 90, dtype=np.uint8)
            prompts.append({"prompt_token_ids": [5, 60, 7], "multi_modal_data": {"image": picture}})
        for prompt in prompts:
            stream = engine.generate(prompt, params, lora_request=lora)
            outputs = [output async for output in stream]
            assert outputs[-1].error is None
            assert sum(len(output.outputs[0].token_ids) for output in outputs[-1:]) == 5
        assert all(card.resident for card in await engine.list_loras())
        assert engine.healthy


def test_every_capability_is_in_a_pair() -> None:
    assert set(ALL) == {*OPTIONS, *MODELS} and set(EXCLUDES) <= set(ALL)


@pytest.mark.parametrize("pair", pairs(processes=False, allowed=True), ids=" and ".join)
async def test_what_goes_together_serves(
    pair: tuple[str, str], models: dict[str, str], tmp_path: Path
) -> None:
    await start_and_serve(config_of(pair, models, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(processes=True, allowed=True), ids=" and ".join)
async def test_what_goes_together_serves_in_processes(
    pair: tuple[str, str], models: dict[str, str], tmp_path: Path
) -> None:
    await start_and_serve(config_of(pair, models, tmp_path), tmp_path)


@pytest.mark.parametrize("pair", pairs(processes=False, allowed=False), ids=" and ".join)
async def test_what_does_not_go_together_is_refused_by_name(
    pair: tuple[str, str], models: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        await AsyncEngine(config_of(pair, models, tmp_path)).start()
    reason = reason_against(*pair)
    assert reason is not None and reason in str(refused.value)
    assert refused.value.param in {OPTIONS.get(name) for name in pair}
    assert str(refused.value).startswith(f"{refused.value.param}: ")
