"""Recorded steps on a GPU give what the engine gives without kernels and graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jackfield import AsyncEngine, EngineConfig, SamplingParams

from helpers import VOCAB, joining, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = 12


async def tokens(folder: Path, *, late: bool, **options: Any) -> tuple[list[list[int]], Any]:
    """Return the tokens of requests of many lengths, some with a common prefix. `late`: after all
    graphs are recorded."""
    draw = random.Random(4)
    shared = [draw.randrange(3, VOCAB) for _ in range(20)]
    prompts = [
        shared * (number % 2) + [draw.randrange(3, VOCAB) for _ in range(draw.randrange(3, 60))]
        for number in range(REQUESTS)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12 + number, ignore_eos=True, detokenize=False)
        for number in range(REQUESTS)
    ]
    config = EngineConfig(**{
        "model": str(folder), "device": "cuda", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 16,
        "num_gpu_blocks_override": 400, **options,
    })  # fmt: skip
    async with AsyncEngine(config) as engine:
        if late:
            executor: Any = engine.core.executor
            worker = executor._worker
            while await executor._thread.call(worker.prepare_ahead):
                pass
            runner = worker.runner
            assert runner.decode.graphs.num_recorded and runner.mixed.graphs.num_recorded
        outputs = await joining(engine, list(zip(prompts, params, strict=True)))
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
    assert stats.kv_blocks_used == 0
    return [list(output.outputs[0].token_ids) for output in outputs], stats


def similar(first: list[list[int]], second: list[list[int]]) -> None:
    """A near tie may be chosen otherwise by other kernels: in one request of all, at most."""
    assert sum(a == b for a, b in zip(first, second, strict=True)) >= REQUESTS - 1


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "gpt-oss"])
async def test_groups_of_windows(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(name, tmp_path)
    plain, _ = await tokens(
        folder, late=False, attention_backend="torch", operations="torch", enforce_eager=True
    )
    recorded, _ = await tokens(folder, late=True, attention_backend="triton", operations="triton")
    similar(plain, recorded)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("gemma3", "int8"), ("llama", "int8_int4"), ("qwen3", "int4"), ("gpt-oss", "int4")],
)
async def test_caches_of_integers(tmp_path: Path, name: str, stored: str) -> None:
    folder = make_checkpoint(name, tmp_path)
    options: Any = {"kv_cache_dtype": stored}
    plain, _ = await tokens(
        folder, late=False, attention_backend="torch", operations="torch", enforce_eager=True,
        **options,
    )  # fmt: skip
    recorded, _ = await tokens(
        folder, late=True, attention_backend="triton", operations="triton", **options
    )
    similar(plain, recorded)


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = {
    **SIZES, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {
    "Mamba": {**SIZES, "state_size": 16},
    "Mamba2": {**SIZES, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2},
    "Bamba": {
        **ATTENTION, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 24, "mamba_n_groups": 2,
    },
    "Qwen3Next": {
        **ATTENTION, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
async def test_states_of_sequences(tmp_path: Path, name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**STATES[name])
    torch.manual_seed(7)
    getattr(transformers, f"{name}ForCausalLM")(config).float().save_pretrained(tmp_path)
    plain, _ = await tokens(
        tmp_path, late=False, attention_backend="torch", operations="torch", enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    recorded, stats = await tokens(
        tmp_path, late=True, attention_backend="triton", operations="triton"
    )
    assert stats.prefix_cache_hits > 0
    similar(plain, recorded)


async def test_latents(tmp_path: Path) -> None:
    config = transformers.DeepseekV2Config(**{
        **ATTENTION, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 48,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    })  # fmt: skip
    torch.manual_seed(7)
    transformers.DeepseekV2ForCausalLM(config).float().save_pretrained(tmp_path)
    plain, _ = await tokens(
        tmp_path, late=False, attention_backend="torch", operations="torch", enforce_eager=True
    )
    recorded, stats = await tokens(
        tmp_path, late=True, attention_backend="triton", operations="triton"
    )
    assert stats.prefix_cache_hits > 0
    similar(plain, recorded)


async def test_caches_in_levels(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    options = {"kv_compression_levels": "8@8", "kv_compression_interval": 8, "block_size": 8}
    plain, _ = await tokens(
        folder, late=False, attention_backend="torch", operations="torch", enforce_eager=True,
        **options,
    )  # fmt: skip
    recorded, stats = await tokens(
        folder, late=True, attention_backend="triton", operations="triton", **options
    )
    assert stats.kv_compactions > 1
    similar(plain, recorded)


@pytest.mark.parametrize("policy", ["window", "key_norm"])
async def test_compressed_caches(tmp_path: Path, policy: str) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    options = {"kv_compression": policy, "kv_compression_ratio": 0.4, "block_size": 16}
    plain, _ = await tokens(
        folder, late=False, attention_backend="torch", operations="torch", enforce_eager=True,
        **options,
    )  # fmt: skip
    recorded, stats = await tokens(
        folder, late=True, attention_backend="triton", operations="triton", **options
    )
    assert stats.kv_compactions > 1
    similar(plain, recorded)
