"""Families with an indexer equal `transformers` up to the number of tokens that it keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_families import PROMPTS, check_engine, checkpoint, make_reference, score
from test_latent_families import V3
from test_text_parts import save

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import PagedModel

INDEXED = {**V3, "index_topk": 48, "index_head_dim": 16, "index_n_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": INDEXED,
    "GlmMoeDsaForCausalLM": {**INDEXED, "index_topk_freq": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_an_indexer_that_keeps_all_tokens_changes_nothing(case: str, tmp_path: Path) -> None:
    reference = make_reference(case, CASES[case])
    folder, prompt = checkpoint(reference, case, tmp_path), PROMPTS[1]
    model = PagedModel(folder, "float32", max_model_len=48)
    got = torch.cat([model.run({0: part})[0] for part in (prompt[:11], prompt[11:])])
    want = score(reference, prompt)
    torch.testing.assert_close(got.log_softmax(-1).cpu(), want, atol=1e-3, rtol=0)
    with pytest.raises(ConfigError, match="index_topk 48") as caught:
        PagedModel(folder, "float32", max_model_len=49)
    assert caught.value.param == "max_model_len"


async def test_minimax_m3_reads_all_blocks_that_its_indexers_keep(tmp_path: Path) -> None:
    """16 blocks of 8 tokens."""
    reference = save("MiniMaxM3SparseForConditionalGeneration", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".block_sparse_moe.experts.0.w1." in name for name in stored), "as published"
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    check_ranks(tmp_path, "MiniMaxM3SparseForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, lambda tokens: score(reference, tokens))
    path = tmp_path / "config.json"
    path.write_text(re.sub(r'"index_topk_blocks": \d+', '"index_topk_blocks": 8', path.read_text()))
    with pytest.raises(ConfigError, match="128 is more than 64") as caught:
        PagedModel(tmp_path, "float32")
    assert caught.value.param == "max_model_len"
