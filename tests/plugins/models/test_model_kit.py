"""Every architecture in the box passes the kit."""

from __future__ import annotations

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


class TestMixtral(ModelKit):
    name = "MixtralForCausalLM"
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
