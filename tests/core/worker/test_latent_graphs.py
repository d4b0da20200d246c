"""Recorded steps of a model that caches latents give what launched ones give, prompts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from replaying import MixedRecordingExecutor
from test_state_graphs import VOCAB, tokens

from jackfield import EngineConfig
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import Provenance, load_plugins

from helpers import interpreted

pytest.importorskip("triton")


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", MixedRecordingExecutor)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        from jackfield.plugins.operations.indexing import TritonIndexing
        from jackfield.plugins.operations.latents import TritonLatents

        class LatentKernels(TritonLatents, TritonIndexing, Operations):
            """The kernels over latents, and torch for all else: the interpreter is slow."""

            name = "latent_kernels"

        registry.add("latent_kernels", LatentKernels)


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "initializer_range": 0.4, "eos_token_id": 2,
}  # fmt: skip
INDEXED = {
    **SIZES, "q_lora_rank": 8, "num_hidden_layers": 2, "first_k_dense_replace": 2,
    "index_topk": 7, "index_head_dim": 8, "index_n_heads": 4, "indexer_types": ["full", "shared"],
}  # fmt: skip


@pytest.fixture(params=["DeepseekV2", "GlmMoeDsa"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """GLM-5's second layer reads what the first one's indexer chooses."""
    sizes = SIZES if request.param == "DeepseekV2" else INDEXED
    config = getattr(transformers, f"{request.param}Config")(**sizes)
    torch.manual_seed(5)
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(tmp_path)
    return tmp_path


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered")
async def test_recorded_steps_equal_launched_ones(checkpoint: Path) -> None:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 8,
    }  # fmt: skip
    torch_alone = EngineConfig(**common, operations="torch", attention_backend="torch")
    launched = await tokens(torch_alone, plugins)
    config = EngineConfig(
        **common, operations="latent_kernels", attention_backend="triton", executor="recording"
    )
    recorded = await tokens(config, plugins)
    assert MixedRecordingExecutor.recorders[-1].replays
    assert recorded == launched
