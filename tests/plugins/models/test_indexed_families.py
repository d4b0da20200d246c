"""Families with an indexer equal `transformers` up to the number of tokens that it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import PROMPTS, checkpoint, make_reference, score
from test_latent_families import V3

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.models import PagedModel

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
