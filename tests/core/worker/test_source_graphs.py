"""Recorded steps of an encoder-decoder model give what launched ones give, prompts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from replaying import MixedRecordingExecutor
from test_state_graphs import VOCAB, Plugin, tokens

from jackfield import EngineConfig
from jackfield.core.registry import Provenance, load_plugins

from helpers import interpreted

pytest.importorskip("triton")


def bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=40, init_std=0.4, forced_bos_token_id=5,
    ))  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=16, num_heads=2, num_layers=1, num_decoder_layers=1,
        d_ff=16, max_position_embeddings=40, initializer_factor=2.0, decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=6,
    ))  # fmt: skip


@interpreted
@pytest.mark.parametrize("make", [bart, t5])
async def test_recorded_steps_equal_launched_ones(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    make().save_pretrained(tmp_path)
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(tmp_path), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 8,
    }  # fmt: skip
    launched = await tokens(EngineConfig(**common, attention_backend="torch"), plugins)
    config = EngineConfig(**common, attention_backend="triton", executor="recording")
    recorded = await tokens(config, plugins)
    assert recorded == launched
    assert MixedRecordingExecutor.recorders[-1].replays > 8, "hardly a step was recorded"
