"""Which latent attention backend serves a model, and what such models are refused with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, PluginError
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.attention import BackendSetup
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.attention.torch_latent import TorchLatentAttention

PROMPT = [3 + (7 * i) % 90 for i in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = DeepseekV2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("latent")
    DeepseekV2ForCausalLM(config).save_pretrained(path)
    return path


def engine(folder: Path, plugins: Any = None, **options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 2,
        "block_size": 4, "num_gpu_blocks_override": 40, **options,
    }  # fmt: skip
    return AsyncEngine(EngineConfig(model=str(folder), **settings), plugins=plugins)


async def answer(running: AsyncEngine, max_tokens: int = 4) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    *_, last = [output async for output in running.generate(PROMPT, params)]
    return last


async def test_a_backend_of_latents_is_chosen(folder: Path) -> None:
    async with engine(folder) as running:
        assert running.info.attention_backend == "torch"
        assert running.core.info.kv_cache_bytes == 40 * 4 * 2 * (16 + 4) * 4, "latents alone"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"attention_backend": "flashinfer"}, "attention_backend", "no latent attention backend"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "caches latents"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales", "caches latents"),
    ],
)
async def test_what_latents_do_not_allow_is_refused_by_name(
    folder: Path, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        async with engine(folder, **options):
            pass
    assert caught.value.param == param


async def test_blocks_of_latents_go_through_a_kv_connector(folder: Path) -> None:
    transfer = {"kv_connector": "cpu_offload", "kv_role": "kv_both"}
    async with engine(folder, kv_transfer_config=transfer) as running:
        first = await answer(running)
        while not await running.reset_prefix_cache():  # The blocks are being saved.
            await asyncio.sleep(0.01)
        again = await answer(running)
    assert again.num_cached_tokens >= 24
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


async def test_drafts_change_no_token(folder: Path) -> None:
    async with engine(folder) as running:
        plain = await answer(running, max_tokens=20)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    async with engine(folder, speculative_config=drafts) as running:
        drafted = await answer(running, max_tokens=20)
        assert running.stats().spec_decode_num_draft_tokens > 0
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "launched"),
    [
        ([4096], [4096], True),
        ([1, 1, 1500, 700], [90, 3, 1500, 700], True),
        ([4096], [4097], False),
        ([1024], [1024], False),
        ([300] * 9, [300] * 9, False),
    ],
    ids=["a prompt", "beside decode rows", "after a chunk", "short", "many"],
)
def test_large_steps_of_whole_prompts_are_launched(
    query_lens: list[int], seq_lens: list[int], launched: bool
) -> None:
    pytest.importorskip("triton")
    setup = BackendSetup(
        device=torch.device("cpu"), dtype=torch.float32, block_size=16, max_num_seqs=4,
        max_num_batched_tokens=8192, max_model_len=8192,
    )  # fmt: skip
    backend = load_plugins()["latent_attention_backend"].load("triton").create(setup)
    assert backend.prefers_launch(np.array(query_lens), np.array(seq_lens)) == launched


class BadLatentAttention(TorchLatentAttention):
    def __init__(self, setup: BackendSetup) -> None:
        raise RuntimeError("bang")


async def test_a_backend_that_raises_is_named_with_its_distribution(folder: Path) -> None:
    def register_latent_attention_backends(registry: Any) -> None:
        registry.add("bad", BadLatentAttention)

    plugin = type("Bad", (), {
        "jackfield_api": API_VERSION,
        "register_latent_attention_backends": staticmethod(
            hookimpl(register_latent_attention_backends)
        ),
    })()  # fmt: skip
    plugins = load_plugins()
    plugins.add_plugin(plugin, Provenance("bad-dist", "2.0", "bad"))
    with pytest.raises(PluginError, match=r"bad.* of bad-dist 2\.0 .*RuntimeError: bang"):
        async with engine(folder, plugins, attention_backend="bad"):
            pass
