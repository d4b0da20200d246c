"""Families with mixtures of experts say what `transformers` says, through the engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from nights import some_by_day
from test_fallback import MIXTURE, SPARSE, WINDOWS, folder_of
from test_families import (
    LEFT_OUT,
    check_changed,
    check_divided,
    check_engine,
    check_logits,
    score,
)

from jackfield.core.errors import ConfigError
from jackfield.core.nn.attention import Attention
from jackfield.plugins.conformance.paged_model import PagedModel, assert_near

from helpers import edit_json

GRANITE = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "logits_scaling": 2.5,
    "residual_multiplier": 0.4, "attention_multiplier": 0.6, "embedding_multiplier": 3.0,
}  # fmt: skip
LLAMA4 = {
    "num_local_experts": 4, "intermediate_size_mlp": 48, "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2, "floor_scale": 8,
    "attn_scale": 0.5, "tie_word_embeddings": False, "moe_layers": [1, 2],
    "attention_chunk_size": 6,
}  # fmt: skip
DBRX = {
    "d_model": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        **SPARSE, **WINDOWS, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.7,
        "mup_enabled": True,
    },
    "DbrxForCausalLM": DBRX,
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "Ernie4_5_MoeForCausalLM:biases": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": True,
        "moe_layer_start_index": 1,
    },
    "ExaoneMoeForCausalLM": {**SPARSE, **WINDOWS, "n_group": 2, "topk_group": 1},
    "FlexOlmoForCausalLM": MIXTURE,
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSWAForCausalLM": {**GRANITE, **WINDOWS},
    "GraniteMoeSharedForCausalLM": {**GRANITE, "shared_intermediate_size": 48},
    "HYV3ForCausalLM": SPARSE,
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8, "moe_topk": 2},
    "JetMoeForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "kv_channels": 8, "head_dim": LEFT_OUT,
        "num_key_value_heads": 2, "num_attention_heads": 6, "intermediate_size": 48,
    },
    "Llama4ForCausalLM": LLAMA4,
    "MellumForCausalLM": {**SPARSE, **WINDOWS},
    "MiMoV2FlashForCausalLM": {
        **SPARSE, **WINDOWS, "v_head_dim": 12, "num_key_value_heads": 1, "n_group": 2,
        "topk_group": 1, "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
            },
        },
    },
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": {**MIXTURE, "norm_topk_prob": True},
    "PhimoeForCausalLM": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True,
        "lm_head_bias": True, "router_jitter_noise": 0.2,
    },
    "PhimoeForCausalLM:no biases": {"num_local_experts": 8, "num_experts_per_tok": 2},
    # All experts of a group: rounded to bfloat16, a near tie would choose others.
    "SolarOpenForCausalLM": {**MIXTURE, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_mixture_equals_transformers(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, CASES[case], tmp_path)
    check_logits(folder, reference)
    await check_engine(folder, lambda tokens: score(reference, tokens))


DIVIDED_BY_DAY = ("DbrxForCausalLM", "JetMoeForCausalLM", "Llama4ForCausalLM")


@pytest.mark.parametrize("case", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_mixture_is_the_same_divided_and_changed(case: str, tmp_path: Path) -> None:
    _, folder = folder_of(case, CASES[case], tmp_path)
    check_divided(folder, case.partition(":")[0])
    check_changed(folder)


@pytest.mark.parametrize(
    ("case", "changes", "param"),
    [
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("OlmoeForCausalLM", {"clip_qkv": 2.0}, "clip_qkv"),
        (
            "DbrxForCausalLM",
            {"ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": 2.0}},
            "ffn_config.moe_normalize_expert_weights",
        ),
    ],
)
def test_what_a_mixture_lacks_is_refused_by_name(
    case: str, changes: dict[str, Any], param: str, tmp_path: Path
) -> None:
    _, folder = folder_of(case, {**CASES[case], **changes}, tmp_path)
    with pytest.raises(ConfigError) as caught:
        PagedModel(folder, "float32", max_model_len=64)
    assert caught.value.param == param


@pytest.mark.parametrize("case", ["HunYuanMoEV1ForCausalLM", "HunYuanDenseV1ForCausalLM"])
def test_layers_that_share_keys_are_refused_by_name(case: str, tmp_path: Path) -> None:
    _, folder = folder_of(case, CASES.get(case, {}), tmp_path)
    edit_json(folder / "config.json", use_cla=True)
    with pytest.raises(ConfigError) as caught:
        PagedModel(folder, "float32", max_model_len=64)
    assert caught.value.param == "use_cla"
    edit_json(folder / "config.json", use_cla=False)
    PagedModel(folder, "float32", max_model_len=64)


def test_chunks_that_no_text_outgrows_ask_nothing_of_a_backend(tmp_path: Path) -> None:
    _, folder = folder_of("Llama4ForCausalLM", LLAMA4, tmp_path)
    for max_model_len, sizes in ((6, [None, None, None]), (7, [6, None, 6])):
        modules = PagedModel(folder, "float32", max_model_len=max_model_len).model.modules()
        specs = [module.spec for module in modules if isinstance(module, Attention)]
        assert [spec.attention_chunk_size for spec in specs] == sizes


def test_windows_with_heads_of_another_width_are_refused_by_name(tmp_path: Path) -> None:
    case = "MiMoV2FlashForCausalLM"
    _, folder = folder_of(case, CASES[case], tmp_path)
    with pytest.raises(ConfigError, match="only 16") as caught:
        PagedModel(folder, "float32", hf_overrides={"swa_head_dim": 8})
    assert caught.value.param == "swa_head_dim"


def test_long_texts_have_their_own_factor_in_phimoe(tmp_path: Path) -> None:
    """Angles and their factor are those for long texts where the context is longer than the first
    one, whatever a text's length."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "short_mscale": 1.5, "long_mscale": 2.5,
        "original_max_position_embeddings": 16, "factor": 16.0,
    }  # fmt: skip
    changes = {**CASES["PhimoeForCausalLM"], "rope_parameters": rope}
    _, folder = folder_of("PhimoeForCausalLM", changes, tmp_path)
    for length, factor in ((16, 1.5), (64, 2.5)):
        model: Any = PagedModel(folder, "float32", max_model_len=length).model
        table = model.model.rotaries[0].cos_sin
        assert float(table[0, 0]) == factor


def test_hunyuan_may_list_what_each_layer_has(tmp_path: Path) -> None:
    """As its published mixtures do: the list of a field that is not read is no mistake."""
    case = "HunYuanMoEV1ForCausalLM"
    reference, folder = folder_of(case, CASES[case], tmp_path)
    layers = {"moe_topk": [2] * 3, "moe_intermediate_size": [96] * 3, "num_shared_expert": [1] * 3}
    for overrides in ({}, layers):
        model = PagedModel(folder, "float32", kernels="torch", hf_overrides=overrides)
        logits = model.run({0: [3, 5, 7]})[0]
        assert_near(logits, score(reference, [3, 5, 7]), 1e-4)
    with pytest.raises(ConfigError, match="moe_topk must be an integer or a list of integers"):
        PagedModel(folder, "float32", hf_overrides={"moe_topk": [2, "x"]})


def test_dbrx_rotates_by_the_base_that_its_attention_has(tmp_path: Path) -> None:
    """transformers 5 adds the default to `rope_parameters`, which published checkpoints lack."""
    changes = {**DBRX, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    _, folder = folder_of("DbrxForCausalLM", changes, tmp_path)
    model: Any = PagedModel(folder, "float32").model
    row = model.model.rotaries[0].cos_sin[1]
    assert float(row[1]) == pytest.approx(math.cos(500.0 ** (-1 / 8)))
