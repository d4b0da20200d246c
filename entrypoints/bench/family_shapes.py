"""Published configurations of families that differ from Llama in norms, biases, activations,
positions or residuals.

Sources: config.json of the named checkpoints, without training fields.
"""

from __future__ import annotations

from typing import Any


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16",
        "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **fields,
    }  # fmt: skip


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, length: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": length,
    }  # fmt: skip


FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "Apertus-8B": _config(
        "ApertusForCausalLM", "apertus", **_sizes(4096, 21504, 32, 32, 8, 131072, 65536),
        hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12000000.0, qk_norm=True,
        attention_bias=False, tie_word_embeddings=False,
    ),
    "Arcee-4.5B": _config(
        "ArceeForCausalLM", "arcee", **_sizes(2560, 18432, 36, 20, 4, 128004, 65536), head_dim=128,
        hidden_act="relu2", rms_norm_eps=1e-5, rope_theta=10000.0, attention_bias=False,
        mlp_bias=False, tie_word_embeddings=False,
    ),
    "Baichuan2-7B": _config(
        "BaichuanForCausalLM", "baichuan", **_sizes(4096, 11008, 32, 32, 32, 125696, 4096),
        hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
    ),
    "BLOOM-7B1": _config(
        "BloomForCausalLM", "bloom", hidden_size=4096, n_layer=30, n_head=32, vocab_size=250880,
        layer_norm_epsilon=1e-5, seq_length=2048, tie_word_embeddings=True,
        apply_residual_connection_post_layernorm=False,
    ),
    "Command-R7B": _config(
        "Cohere2ForCausalLM", "cohere2", **_sizes(4096, 14336, 32, 32, 8, 256000, 132096),
        head_dim=128, hidden_act="silu", layer_norm_eps=1e-5, logit_scale=0.25,
        rope_theta=50000.0, attention_bias=False, sliding_window=4096, sliding_window_pattern=4,
        tie_word_embeddings=True,
    ),
    "EXAONE-3.5-7.8B": _config(
        "ExaoneForCausalLM", "exaone", hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=102400,
        max_position_embeddings=32768, activation_function="silu", layer_norm_epsilon=1e-5,
        rope_theta=1000000.0, tie_word_embeddings=False,
    ),
    "EXAONE-4.0-32B-16L": _config(
        "Exaone4ForCausalLM", "exaone4", **_sizes(5120, 27392, 16, 40, 8, 102400, 131072),
        head_dim=128, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1000000.0,
        sliding_window=4096, tie_word_embeddings=False,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention",
                     "full_attention"] * 4,
    ),
    "Falcon-7B": _config(
        "FalconForCausalLM", "falcon", hidden_size=4544, num_hidden_layers=32,
        num_attention_heads=71, vocab_size=65024, layer_norm_epsilon=1e-5, multi_query=True,
        new_decoder_architecture=False, parallel_attn=True, alibi=False, bias=False,
        tie_word_embeddings=True,
    ),
    "GPT-2-XL": _config(
        "GPT2LMHeadModel", "gpt2", n_embd=1600, n_layer=48, n_head=25, n_positions=1024,
        vocab_size=50257, activation_function="gelu_new", layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
    ),
    "GPT-J-6B": _config(
        "GPTJForCausalLM", "gptj", n_embd=4096, n_layer=28, n_head=16, n_positions=2048,
        rotary_dim=64, vocab_size=50400, activation_function="gelu_new", layer_norm_epsilon=1e-5,
        tie_word_embeddings=False,
    ),
    "Hunyuan-7B": _config(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        **_sizes(4096, 14336, 32, 32, 8, 128167, 32768), head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-5, attention_bias=False, tie_word_embeddings=True, rope_theta=10000.0,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "InternLM2.5-7B": _config(
        "InternLM2ForCausalLM", "internlm2", **_sizes(4096, 14336, 32, 32, 8, 92544, 32768),
        hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1000000.0, bias=False,
        tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": _config(
        "LlamaForCausalLM", "llama", **_sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    ),
    "MiniCPM-2B": _config(
        "MiniCPMForCausalLM", "minicpm", **_sizes(2304, 5760, 40, 36, 36, 122753, 2048),
        hidden_act="silu", rms_norm_eps=1e-5, scale_emb=12, dim_model_base=256, scale_depth=1.4,
        tie_word_embeddings=True,
    ),
    "MPT-7B": _config(
        "MptForCausalLM", "mpt", d_model=4096, n_heads=32, n_layers=32, expansion_ratio=4,
        max_seq_len=2048, vocab_size=50432, no_bias=True,
        attn_config={"alibi": True, "alibi_bias_max": 8, "clip_qkv": None},
        tie_word_embeddings=True,
    ),
    "Nemotron-Mini-4B": _config(
        "NemotronForCausalLM", "nemotron", **_sizes(3072, 9216, 32, 24, 8, 256000, 4096),
        head_dim=128, hidden_act="relu2", norm_eps=1e-5, partial_rotary_factor=0.5,
        rope_theta=10000.0, attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
    ),
    "OPT-6.7B": _config(
        "OPTForCausalLM", "opt", hidden_size=4096, ffn_dim=16384, num_hidden_layers=32,
        num_attention_heads=32, vocab_size=50272, max_position_embeddings=2048,
        word_embed_proj_dim=4096, activation_function="relu", do_layer_norm_before=True,
        tie_word_embeddings=True,
    ),
    "Persimmon-8B": _config(
        "PersimmonForCausalLM", "persimmon", **_sizes(4096, 16384, 36, 64, 64, 262144, 16384),
        hidden_act="relu2", layer_norm_eps=1e-5, rope_theta=25000.0, partial_rotary_factor=0.5,
        qk_layernorm=True, tie_word_embeddings=False,
    ),
    "Pythia-6.9B": _config(
        "GPTNeoXForCausalLM", "gpt_neox", hidden_size=4096, intermediate_size=16384,
        num_hidden_layers=32, num_attention_heads=32, vocab_size=50432,
        max_position_embeddings=2048, hidden_act="gelu", layer_norm_eps=1e-5, rotary_pct=0.25,
        rotary_emb_base=10000, use_parallel_residual=True, tie_word_embeddings=False,
    ),
    "SmolLM3-3B": _config(
        "SmolLM3ForCausalLM", "smollm3", **_sizes(2048, 11008, 36, 16, 4, 128256, 65536),
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=5000000.0, no_rope_layer_interval=4,
        attention_bias=False, mlp_bias=False, use_sliding_window=False, tie_word_embeddings=True,
    ),
    "StarCoder2-7B": _config(
        "Starcoder2ForCausalLM", "starcoder2", **_sizes(4608, 18432, 32, 36, 4, 49152, 16384),
        hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, rope_theta=1000000.0, use_bias=True,
        sliding_window=4096, tie_word_embeddings=False,
    ),
}  # fmt: skip
