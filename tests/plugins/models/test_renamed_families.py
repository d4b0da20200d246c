"""Families that `transformers` does not have say what their equals there say.

Each case takes a random model of a family that `transformers` has, and writes its weights and its
configuration as the other family's checkpoints have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from nights import some_by_day
from renaming import (
    EXAONE,
    HIDDEN,
    SIZE,
    Tensors,
    bailing,
    chatglm,
    decilm,
    internlm2,
    longer_rows,
    mimo_v2,
    qwen,
    split_experts,
    telechat,
    together,
)
from safetensors.torch import save_file
from test_families import (
    LEFT_OUT,
    PROMPTS,
    check_changed,
    check_divided,
    check_engine,
    checkpoint,
    make_reference,
)

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.models import EPSILON, TINY
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel
from jackfield.plugins.models import SAME, baichuan, configs
from jackfield.plugins.models import decilm as decilm_family

LAYERS, HEADS = 3, 4
SIZES = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
COMMON = SIZES | {
    "num_hidden_layers": LAYERS, "intermediate_size": 96, "rms_norm_eps": EPSILON,
    "max_position_embeddings": 256,
}  # fmt: skip


class Case(NamedTuple):
    equal: str
    """An architecture of `transformers`."""
    fields: dict[str, Any]
    """Of its configuration."""
    config: dict[str, Any]
    """What the family's config.json says, besides its architecture."""
    write: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """By name in `transformers` → by the family's names."""


LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
YARN = {
    "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LLAMA = {"tie_word_embeddings": False, "attention_bias": False}
LARGE = LATENT | {
    "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
CASES = {
    "AquilaForCausalLM": Case("LlamaForCausalLM", LLAMA, {
        **COMMON, "model_type": "aquila", "num_key_value_heads": 2, "hidden_act": "silu",
    }),
    "InternLMForCausalLM": Case("LlamaForCausalLM", {
        "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4,
    }, {**COMMON, "model_type": "internlm", "bias": True}),
    "InternLM2ForCausalLM": Case("LlamaForCausalLM", LLAMA, {
        **COMMON, "model_type": "internlm2", "num_key_value_heads": 2, "bias": False,
    }, internlm2),
    "DeepseekForCausalLM": Case("MixtralForCausalLM", {
        "tie_word_embeddings": False, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, {
        **COMMON, "model_type": "deepseek", "num_key_value_heads": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
        "scoring_func": "softmax",
    }, split_experts),
    "DeciLMForCausalLM": Case("LlamaForCausalLM", LLAMA, {
        **COMMON, "model_type": "nemotron-nas", "num_key_value_heads": None, "hidden_act": "silu",
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}},
            {"attention": {"n_heads_in_group": None, "no_op": True},
             "ffn": {"intermediate_size": 96, "no_op": False}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": None, "no_op": True}},
        ],
    }, decilm),
    "InternLM3ForCausalLM": Case("LlamaForCausalLM", {"tie_word_embeddings": False}, {
        **COMMON, "model_type": "internlm3", "num_key_value_heads": 2, "bias": False,
        "hidden_act": "silu", "tie_word_embeddings": False,
        "qkv_bias": False, "head_dim": 16,
    }),
    "BaichuanForCausalLM": Case("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 4}, {
        **COMMON, "model_type": "baichuan", "hidden_act": "silu",
    }, lambda tensors: together(tensors, "W_pack")),
    "QWenLMHeadModel": Case("Qwen2ForCausalLM", {
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 16,
    }, {
        **SIZES, "model_type": "qwen", "num_hidden_layers": LAYERS, "intermediate_size": 192,
        "layer_norm_epsilon": EPSILON, "kv_channels": 16, "seq_length": 256, "no_bias": True,
        "rotary_emb_base": 10000, "max_position_embeddings": 512, "use_dynamic_ntk": True,
    }, qwen),
    "ExaoneForCausalLM": Case("LlamaForCausalLM", {"tie_word_embeddings": True}, {
        **SIZES, "model_type": "exaone", "num_layers": LAYERS, "intermediate_size": 96,
        "layer_norm_epsilon": EPSILON, "activation_function": "silu", "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    }, EXAONE),
    "MiMoForCausalLM": Case("Qwen2ForCausalLM", {
        "tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 16,
    }, {
        **COMMON, "model_type": "mimo", "num_key_value_heads": 2, "head_dim": 16,
        "attention_bias": True, "num_nextn_predict_layers": 1,
    }, lambda tensors: tensors | {"model.mtp_layers.0.token_layernorm.weight": torch.ones(4)}),
    "MiMoV2ForCausalLM": Case("MiMoV2FlashForCausalLM", {
        "tie_word_embeddings": False, "v_head_dim": 12, "num_key_value_heads": 2, "n_group": 1,
        "topk_group": 1, "sliding_window": 9, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "attention_value_scale": 0.6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
            for kind, base in (("full_attention", 500.0), ("sliding_attention", 100.0))
        },
    }, {
        **COMMON, "model_type": "mimo_v2", "num_key_value_heads": 2, "head_dim": 16,
        "v_head_dim": 12, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_head_dim": 16, "swa_v_head_dim": 12, "layernorm_epsilon": EPSILON,
        "rope_theta": 500.0, "swa_rope_theta": 100.0, "partial_rotary_factor": 0.5,
        "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "sliding_window": 8,
        "sliding_window_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "attention_value_scale": 0.6, "routed_scaling_factor": None,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "attention_projection_layout": "fused_qkv", "vision_config": {"depth": 1},
    }, mimo_v2),
    "PanguEmbeddedForCausalLM": Case("LlamaForCausalLM", {
        "tie_word_embeddings": False, "attention_bias": True,
    }, {**COMMON, "model_type": "PanguEmbedded", "num_key_value_heads": 2, "bias": True}),
    "OrionForCausalLM": Case("StableLmForCausalLM", {
        "partial_rotary_factor": 1.0, "use_qkv_bias": False, "tie_word_embeddings": False,
    }, {**COMMON, "model_type": "orion", "num_key_value_heads": 2, "hidden_act": "silu"}),
    "MiniCPMForCausalLM": Case("GraniteForCausalLM", {
        "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / math.sqrt(LAYERS),
        "logits_scaling": HIDDEN / 16, "attention_multiplier": SIZE**-0.5,
        "tie_word_embeddings": True,
    }, {
        **COMMON, "model_type": "minicpm", "num_key_value_heads": 2, "scale_emb": 12,
        "scale_depth": 1.4, "dim_model_base": 16,
    }),
    "BailingMoeForCausalLM": Case("Qwen3MoeForCausalLM", {
        "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    }, {
        **COMMON, "model_type": "bailing_moe", "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "use_qk_norm": True,
    }, bailing),
    "BailingMoeV2ForCausalLM": Case("Glm4MoeForCausalLM", {
        "tie_word_embeddings": False, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        },
    }, {
        **COMMON, "model_type": "bailing_moe_v2", "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "use_qk_norm": True, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    }, bailing),
    "Param2MoEForCausalLM": Case("Glm4MoeForCausalLM", {
        "tie_word_embeddings": False, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "use_qk_norm": True, "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
        },
    }, {
        **COMMON, "model_type": "param2moe", "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 64, "use_qk_norm": True,
    }, bailing),
    "SarvamMLAForCausalLM": Case("DeepseekV3ForCausalLM", {
        **LATENT, "head_dim": LEFT_OUT, "q_lora_rank": None, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "yarn", **YARN},
    }, {
        **COMMON, **LATENT, "model_type": "sarvam_mla", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "rope_theta": YARN["rope_theta"],
        "rope_scaling": {"type": "deepseek_yarn", **YARN},
    }, split_experts),
    "MistralLarge3ForCausalLM": Case("Mistral4ForCausalLM", {
        **LARGE, "head_dim": LEFT_OUT, "tie_word_embeddings": False,
        "rope_parameters": {
            **YARN, "rope_type": "yarn", "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.4,
        },
    }, {
        **COMMON, **LARGE, "model_type": "deepseek_v3", "topk_method": None, "hidden_act": "silu",
        "scoring_func": "softmax", "tie_word_embeddings": False, "rope_parameters": {
            **YARN, "rope_type": "yarn", "original_max_position_embeddings": 8,
        }, "llama_4_scaling": {"beta": 0.4, "original_max_position_embeddings": 8},
    }, split_experts),
    "Rnj1ForCausalLM": Case("Gemma3ForCausalLM", {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ROPES, "sliding_window": 256, "query_pre_attn_scalar": 40,
        "final_logit_softcapping": 3.0,
    }, {
        **COMMON, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "rope_parameters": {
            "chunked_attention": ROPES["sliding_attention"],
            "full_attention": ROPES["full_attention"],
        },
        "sliding_window": 128, "query_pre_attn_scalar": 40, "final_logit_softcapping": 3.0,
    }),
    "TeleFLMForCausalLM": Case("GraniteForCausalLM", {
        "embedding_multiplier": 3.0, "residual_multiplier": 1.0, "logits_scaling": 2.5,
        "attention_multiplier": SIZE**-0.5, "tie_word_embeddings": False,
    }, {
        **COMMON, "model_type": "TeleFLM", "num_key_value_heads": 2, "use_mup": True,
        "input_mult": 3.0, "output_mult": 4, "mup_scale_factor": 10.0,
    }),
    "TeleChat2ForCausalLM": Case("LlamaForCausalLM", {
        "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    }, {
        **SIZES, "model_type": "telechat", "n_layer": LAYERS, "n_head": HEADS,
        "num_key_value_heads": 2, "ffn_hidden_size": 96, "layer_norm_epsilon": EPSILON,
        "seq_length": 256,
    }, telechat),
    "RWForCausalLM": Case("FalconForCausalLM", {
        "head_dim": LEFT_OUT, "new_decoder_architecture": True, "num_kv_heads": 2,
    }, {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "model_type": "RefinedWeb", "n_head": HEADS,
        "n_head_kv": 2, "n_layer": LAYERS, "layer_norm_epsilon": EPSILON, "parallel_attn": True,
        "bias": False, "alibi": False,
    }),
    "ChatGLMModel": Case("GlmForCausalLM", {
        "tie_word_embeddings": False, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5,
        },
    }, {
        "model_type": "chatglm", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_layers": LAYERS, "padded_vocab_size": VOCAB, "ffn_hidden_size": 96, "kv_channels": 16,
        "seq_length": 256, "layernorm_epsilon": EPSILON, "add_qkv_bias": True, "rope_ratio": 5,
        "multi_query_attention": True, "multi_query_group_num": 2, "rmsnorm": True,
        "original_rope": True,
    }, chatglm),
}  # fmt: skip


def write(case: Case, architecture: str, folder: Path) -> Any:
    """Write the checkpoint; return its equal."""
    reference = make_reference(case.equal, case.fields)
    checkpoint(reference, case.equal, folder)
    rewrite(case, architecture, folder, reference)
    return reference


def rewrite(case: Case, architecture: str, folder: Path, reference: Any) -> None:
    tensors = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file({k: v.contiguous().clone() for k, v in case.write(tensors).items()},
              folder / "model.safetensors")  # fmt: skip
    config = case.config | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def score(model: Any, tokens: list[int], **more: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False, **more).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("architecture", CASES)
async def test_a_family_equals_another_by_its_names(architecture: str, tmp_path: Path) -> None:
    reference = write(CASES[architecture], architecture, tmp_path)
    if SAME.get(architecture) == "llama:LlamaForCausalLM":
        # Only the configuration and the names are its own.
        got = PagedModel(tmp_path, "float32").run({0: PROMPTS[1]})[0].log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(reference, PROMPTS[1]), atol=1e-3, rtol=0)
        return
    await check_engine(tmp_path, lambda tokens: score(reference, tokens))


DIVIDED_BY_DAY = ("BaichuanForCausalLM", "ChatGLMModel", "DeciLMForCausalLM", "QWenLMHeadModel")
"""Whose tensors are several in one."""


@pytest.mark.parametrize("architecture", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_family_is_the_same_divided_and_changed(architecture: str, tmp_path: Path) -> None:
    write(CASES[architecture], architecture, tmp_path)
    check_divided(tmp_path, architecture)
    check_changed(tmp_path)


async def test_baichuan_2_has_a_head_of_rows_of_length_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baichuan, "VOCAB_OF_2", VOCAB)
    case = CASES["BaichuanForCausalLM"]._replace(write=longer_rows)
    reference = write(case, "BaichuanForCausalLM", tmp_path)
    with torch.no_grad():
        head = reference.lm_head.weight
        head.copy_(F.normalize(head))
    check_ranks(tmp_path, "BaichuanForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, lambda tokens: score(reference, tokens))


async def test_baichuan_13b_has_slopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama that does not turn, with the slopes in its mask."""
    monkeypatch.setattr(baichuan, "ROTATED_SIZE", 32)
    case = CASES["BaichuanForCausalLM"]
    del (config := dict(case.config))["max_position_embeddings"]
    reference = write(
        case._replace(config=config | {"model_max_length": 256}), "BaichuanForCausalLM", tmp_path
    )
    reference.model.rotary_emb.inv_freq.zero_()

    def expected(tokens: list[int]) -> torch.Tensor:
        places = torch.arange(len(tokens))
        distance = (places[None] - places[:, None]).float()
        slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
        mask = (slopes * distance).masked_fill(distance > 0, float("-inf"))
        return score(reference, tokens, attention_mask=mask[None])

    check_ranks(tmp_path, "BaichuanForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, expected)


def test_mistral_large_3_may_stretch_positions_without_a_factor_of_scores(tmp_path: Path) -> None:
    case = CASES["MistralLarge3ForCausalLM"]
    rope = case.fields["rope_parameters"] | {"attention_factor": 1.0, "mscale_all_dim": 0.0}
    said = case.config["rope_parameters"] | {"apply_yarn_scaling": False}
    case = case._replace(
        fields=case.fields | {"rope_parameters": rope},
        config=case.config | {"rope_parameters": said},
    )
    reference = write(case, "MistralLarge3ForCausalLM", tmp_path)
    got = PagedModel(tmp_path, "float32").run({0: PROMPTS[1]})[0].log_softmax(-1).cpu()
    torch.testing.assert_close(got, score(reference, PROMPTS[1]), atol=1e-3, rtol=0)


async def test_rnj_1_attends_to_its_chunk_and_to_the_one_before(tmp_path: Path) -> None:
    """Gemma 3 with the mask in place of a window; two chunks of 7 are `sliding_window`."""
    case = CASES["Rnj1ForCausalLM"]
    case = case._replace(config=case.config | {"sliding_window": 15})
    reference = write(case, "Rnj1ForCausalLM", tmp_path)

    def expected(tokens: list[int]) -> torch.Tensor:
        places = torch.arange(len(tokens))
        later = places > places[:, None]
        away = places[:, None] // 7 - places // 7
        masks = {"full_attention": later, "sliding_attention": later | (away > 1)}
        return score(reference, tokens, attention_mask={
            kind: torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
            for kind, hidden in masks.items()
        })  # fmt: skip

    prompt = PROMPTS[1]
    whole = score(reference, prompt)
    assert not torch.allclose(expected(prompt), whole, atol=1e-2), "the chunks do not matter"
    check_ranks(tmp_path, "Rnj1ForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, expected)


def test_chunks_without_a_size_are_refused(tmp_path: Path) -> None:
    case = CASES["Rnj1ForCausalLM"]
    for size in (None, 1):
        config = case.config | {"sliding_window": size}
        write(case._replace(config=config), "Rnj1ForCausalLM", tmp_path)
        with pytest.raises(ConfigError, match="is no size of chunks") as caught:
            PagedModel(tmp_path, "float32")
        assert caught.value.param == "sliding_window"


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("MistralLarge3ForCausalLM", "n_group", 2),
        ("MiniCPMForCausalLM", "num_experts", 8),
        ("ChatGLMModel", "rmsnorm", False),
        ("SarvamMLAForCausalLM", "score_function", "softmax"),
        ("TeleChat2ForCausalLM", "embed_layernorm", True),
    ],
)
async def test_other_variants_are_refused_by_name(
    architecture: str, field: str, value: Any, tmp_path: Path
) -> None:
    config = CASES[architecture].config | {"architectures": [architecture], field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=field) as caught:
        await AsyncEngine(
            EngineConfig(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
        ).start()
    assert caught.value.param == field


def test_widths_of_decilm_are_multiples() -> None:
    assert decilm_family.inner_size({"ffn_mult": 5.25}, 8192) == 28672
    assert decilm_family.inner_size({"ffn_mult": 0.5}, 8192) == 2816


def test_a_configuration_has_both_names() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    read = configs.ExaoneConfig.from_dict({"num_layers": 3, **sizes})
    assert (read.num_layers, read.num_hidden_layers, read.tie_word_embeddings) == (3, 3, False)
