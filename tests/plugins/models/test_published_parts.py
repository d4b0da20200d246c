"""Of multimodal checkpoints in the form in which they were published, the text part says what
`transformers` says of its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published_models import save

from jackfield import EngineConfig
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.paged_model import PagedModel

CASES = {
    "InternVLChatModel": "Qwen2ForCausalLM",
    "DeepseekOCRForCausalLM": "DeepseekOcr2TextForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "MiniCPMO": "Qwen2ForCausalLM",
    "MiniCPMV": "Qwen3ForCausalLM",
    "Phi3VForCausalLM": "Phi3ForCausalLM",
    "Phi4MMForCausalLM": "Phi4MMTextForCausalLM",
}
"""Architecture → that of its text part."""
PROMPT = [3 + 7 * i % 289 for i in range(20)]


@torch.no_grad()
@pytest.mark.parametrize("architecture", CASES)
def test_a_text_part_equals_its_part(architecture: str, tmp_path: Path) -> None:
    model = save(architecture, tmp_path)
    config = resolve_model_config(EngineConfig(model=str(tmp_path)), load_plugins())
    assert config.architecture == CASES[architecture]
    text = getattr(model, "text", model)
    want = text(torch.tensor([PROMPT]), use_cache=False).logits[0]
    paged = PagedModel(tmp_path, "float32")
    got = torch.cat([paged.run({0: part})[0] for part in (PROMPT[:7], PROMPT[7:])])
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)
