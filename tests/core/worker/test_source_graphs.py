"""Recorded steps of an encoder-decoder model give what launched ones give, prompts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_state_graphs import VOCAB, Plugin, Recording, tokens

from jackfield import EngineConfig
from jackfield.core.registry import Provenance, load_plugins

from helpers import interpreted

pytest.importorskip("triton")


@interpreted
async def test_recorded_steps_equal_launched_ones(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=40, init_std=0.4, forced_bos_token_id=5,
    ))  # fmt: skip
    model.save_pretrained(tmp_path)
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(tmp_path), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 8,
    }  # fmt: skip
    launched = await tokens(EngineConfig(**common, attention_backend="torch"), plugins)
    before = Recording.recorder.replays
    config = EngineConfig(**common, attention_backend="triton", executor="recording")
    recorded = await tokens(config, plugins)
    assert recorded == launched
    assert Recording.recorder.replays > before + 8, "hardly a step was recorded"
