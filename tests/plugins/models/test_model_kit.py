"""Every architecture in the box passes the kit."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.plugins.conformance.models import ModelKit


class TestLlama(ModelKit):
    name = "LlamaForCausalLM"
    config = {"tie_word_embeddings": False}


class TestMistral(ModelKit):
    name = "MistralForCausalLM"
    config = {"sliding_window": 24}


class TestQwen2(ModelKit):
    name = "Qwen2ForCausalLM"
    config = {"tie_word_embeddings": True}


class TestQwen3(ModelKit):
    name = "Qwen3ForCausalLM"
    config = {"head_dim": 32, "tie_word_embeddings": True}


class TestQwen3Moe(ModelKit):
    name = "Qwen3MoeForCausalLM"
    config = {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": True, "decoder_sparse_step": 2,
    }  # fmt: skip


class TestMixtral(ModelKit):
    name = "MixtralForCausalLM"
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}


class TestGptOss(ModelKit):
    """Windows of 12 tokens, sinks that take their share, activations that meet the limit."""

    name = "GptOssForCausalLM"
    config = {
        "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 12,
        "swiglu_limit": 0.75, "initializer_range": 0.1,
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
