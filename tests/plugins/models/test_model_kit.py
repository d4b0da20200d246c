"""Every architecture in the box passes the kit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from jackfield.plugins.conformance.models import TINY, ModelKit

from helpers import SWIGLU_LIMIT


class TestGlm4(ModelKit):
    name = "Glm4ForCausalLM"
    config = {"partial_rotary_factor": 0.5}


class TestGranite(ModelKit):
    name = "GraniteForCausalLM"
    config = {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.6,
        "logits_scaling": 2.5, "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip


class TestLlama(ModelKit):
    name = "LlamaForCausalLM"
    config = {"tie_word_embeddings": False}


class TestMistral(ModelKit):
    name = "MistralForCausalLM"
    config = {"sliding_window": 24}


class TestOlmo2(ModelKit):
    name = "Olmo2ForCausalLM"
    config = {"attention_bias": True}


class TestOlmo3(ModelKit):
    name = "Olmo3ForCausalLM"
    config = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                "original_max_position_embeddings": 32, "attention_factor": 1.5,
            },
        },
    }  # fmt: skip


class TestPhi3(ModelKit):
    name = "Phi3ForCausalLM"
    config = {"sliding_window": 24, "partial_rotary_factor": 0.5}


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.5, 2.0, 3.0, 5.0, 9.0, 17.0],
}  # fmt: skip


class TestPhi3Short(ModelKit):
    """No context is longer than the original one."""

    name = "Phi3ForCausalLM"
    config = {
        "original_max_position_embeddings": TINY["max_position_embeddings"],
        "rope_parameters": LONGROPE | {"attention_factor": 1.4},
        "tie_word_embeddings": True,
    }


class TestPhi3Long(ModelKit):
    """Every prompt but one is longer than the original context; that one is not turned at all."""

    name = "Phi3ForCausalLM"
    config = {
        "original_max_position_embeddings": 2,
        "rope_parameters": LONGROPE | {"factor": 2.0},
    }


class TestQwen2(ModelKit):
    name = "Qwen2ForCausalLM"
    config = {"tie_word_embeddings": True}


class TestQwen3(ModelKit):
    name = "Qwen3ForCausalLM"
    config = {"head_dim": 32, "tie_word_embeddings": True}


class TestGemma(ModelKit):
    name = "GemmaForCausalLM"


class TestGemma2(ModelKit):
    """Windows in the first and last layer; caps where most logits feel them."""

    name = "Gemma2ForCausalLM"
    config = {
        "sliding_window": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }  # fmt: skip


class TestGemma3(ModelKit):
    """A window in two layers of three, and rotations that differ within the prompts."""

    name = "Gemma3ForCausalLM"
    config = {
        "sliding_window": 24, "query_pre_attn_scalar": 40, "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    }  # fmt: skip


class TestQwen3Moe(ModelKit):
    name = "Qwen3MoeForCausalLM"
    config = {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": True, "decoder_sparse_step": 2,
    }  # fmt: skip


class TestQwen2Moe(ModelKit):
    name = "Qwen2MoeForCausalLM"
    config = {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2,
    }  # fmt: skip


class DeepseekMoeKit(ModelKit):
    """With biases that decide which experts, in groups, are chosen."""

    config = {
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.7, "head_dim": 16,
    }  # fmt: skip

    @classmethod
    def make_reference(cls) -> Any:
        model = super().make_reference()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.2 * torch.randn_like(buffer))
        return model


class TestDots1(DeepseekMoeKit):
    name = "Dots1ForCausalLM"
    config = DeepseekMoeKit.config | {"sliding_window": 24, "max_window_layers": 2}


class TestGlm4Moe(DeepseekMoeKit):
    name = "Glm4MoeForCausalLM"
    config = DeepseekMoeKit.config | {
        "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip

    def test_layers_that_predict_further_tokens_are_left_out(
        self, folder: Path, tmp_path: Path
    ) -> None:
        own = shutil.copytree(folder, tmp_path / "own")
        tensors = load_file(own / "model.safetensors")
        for name, size in (("enorm.weight", 64), ("mlp.experts.0.up_proj.weight", 48)):
            tensors[f"model.layers.{TINY['num_hidden_layers']}.{name}"] = torch.zeros(size)
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        assert self.parameters(own).keys() == self.parameters(folder).keys()


class TestDeepseekV3(DeepseekMoeKit):
    """Latents, with queries made from a narrower vector."""

    name = "DeepseekV3ForCausalLM"
    config = {
        **DeepseekMoeKit.config, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8,
    }  # fmt: skip


class TestMixtral(ModelKit):
    name = "MixtralForCausalLM"
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}


class TestGptOss(ModelKit):
    """Windows of 12 tokens, sinks that take their share, activations that meet the limit."""

    name = "GptOssForCausalLM"
    config = {
        "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 12,
        **SWIGLU_LIMIT, "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
        },
    }  # fmt: skip

    @classmethod
    def make_reference(cls) -> Any:
        model = super().make_reference()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.copy_(torch.linspace(-1.0, 3.0, len(parameter)))
                elif name.endswith("_bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        return model
