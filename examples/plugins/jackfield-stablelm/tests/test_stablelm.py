"""The architecture passes Jackfield's kit in its variants, and refuses those that it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from jackfield import LLM
from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.models import ModelKit


class TestStableLm(ModelKit):
    name = "StableLmForCausalLM"


class TestParallel(ModelKit):
    """As StableLM 2 12B has it, less the norms of each head."""

    name = "StableLmForCausalLM"
    config = {
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
    }


@pytest.mark.parametrize(("field", "value"), [("qk_layernorm", True), ("hidden_act", "relu")])
def test_other_variants_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    config = transformers.StableLmConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=99, architectures=["StableLmForCausalLM"],
        **{field: value},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=field):
        LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True)


def test_a_wrong_value_of_an_own_field_is_refused_by_its_name(tmp_path: Path) -> None:
    transformers.StableLmConfig(architectures=["StableLmForCausalLM"]).save_pretrained(tmp_path)
    overrides = {"use_qkv_bias": "x"}
    with pytest.raises(ConfigError, match="use_qkv_bias must be true or false, got 'x'"):
        LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True,
            hf_overrides=overrides)  # fmt: skip
