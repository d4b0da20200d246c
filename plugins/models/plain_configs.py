"""Model types whose config.json is read without `transformers`."""

from __future__ import annotations

from ...core.loading.checkpoint_config import SIZES, TOKENS
from ...core.protocols.models import PlainConfig

INT, FLOAT, NUMBER, TEXT, BOOL = (int,), (float,), (int, float), (str,), (bool,)
NONE = type(None)
COMMON: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SIZES, INT),
    **dict.fromkeys(TOKENS, (int, NONE)),
    "eos_token_id": (int, list, NONE),
    "architectures": (list, NONE),
    "chunk_size_feed_forward": INT,
    "dtype": (str, NONE),
    "hidden_act": TEXT,
    "id2label": (dict, NONE),
    "initializer_range": FLOAT,
    "is_encoder_decoder": BOOL,
    "label2id": (dict, NONE),
    "output_hidden_states": BOOL,
    "problem_type": (str, NONE),
    "return_dict": BOOL,
    "tie_word_embeddings": BOOL,
    "torch_dtype": (str, NONE),
    "transformers_version": (str, NONE),
    "use_cache": BOOL,
}
"""Fields of every model type: name → exact types."""
DECODER = COMMON | {
    "attention_dropout": NUMBER,
    "num_key_value_heads": INT,
    "rms_norm_eps": FLOAT,
    "rope_parameters": (dict, NONE),
    "rope_scaling": (dict, NONE),
    "rope_theta": NUMBER,
}
WINDOWS = DECODER | {
    "layer_types": (list, NONE),
    "max_window_layers": INT,
    "sliding_window": (int, NONE),
    "use_sliding_window": BOOL,
}
EXPERTS = DECODER | {
    "head_dim": (int, NONE),
    "num_experts": INT,
    "num_experts_per_tok": INT,
    "num_local_experts": INT,
    "output_router_logits": BOOL,
    "router_aux_loss_coef": FLOAT,
    "sliding_window": (int, NONE),
}
ENCODER = COMMON | {
    "add_cross_attention": BOOL,
    "attention_probs_dropout_prob": NUMBER,
    "classifier_dropout": (int, float, NONE),
    "hidden_dropout_prob": NUMBER,
    "is_decoder": BOOL,
    "layer_norm_eps": FLOAT,
    "type_vocab_size": INT,
}
MULTIPLIERS = (
    "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
)  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
NO_BIAS = {"attention_bias": False, **UNTIED}
KV_HEADS = frozenset({"num_key_value_heads"})
HEAD_DIM = frozenset({"head_dim"})

LLAMA = PlainConfig(
    DECODER
    | {
        "attention_bias": BOOL,
        "head_dim": (int, NONE),
        "mlp_bias": BOOL,
        "pretraining_tp": (int, NONE),
    },
    {"mlp_bias": False, **NO_BIAS},
    HEAD_DIM | KV_HEADS,
)
MISTRAL = PlainConfig(
    DECODER | {"head_dim": (int, NONE), "sliding_window": (int, NONE)}, UNTIED, HEAD_DIM
)
QWEN2 = PlainConfig(WINDOWS, UNTIED)
QWEN3 = PlainConfig(
    WINDOWS | {"attention_bias": BOOL, "head_dim": INT, "is_original_qwen3_reranker": BOOL}, NO_BIAS
)
MIXTRAL = PlainConfig(
    EXPERTS | {"router_jitter_noise": FLOAT},
    {"head_dim": None, "rope_theta": 1000000.0, "sliding_window": None, **UNTIED},
)
QWEN3_MOE = PlainConfig(
    EXPERTS
    | {
        "attention_bias": BOOL,
        "decoder_sparse_step": INT,
        "head_dim": INT,
        "max_window_layers": INT,
        "mlp_only_layers": (list, NONE),
        "moe_intermediate_size": INT,
        "norm_topk_prob": BOOL,
        "use_sliding_window": BOOL,
    },
    {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False, **NO_BIAS},
)
GRANITE = PlainConfig(
    DECODER | {"attention_bias": BOOL, "mlp_bias": BOOL} | dict.fromkeys(MULTIPLIERS, NUMBER),
    {"mlp_bias": False, **dict.fromkeys(MULTIPLIERS, 1.0), **NO_BIAS},
    KV_HEADS,
)
OLMO2 = PlainConfig(DECODER | {"attention_bias": BOOL}, NO_BIAS, KV_HEADS)
BERT = PlainConfig(ENCODER, {"is_decoder": False, "eos_token_id": None})
ROBERTA = PlainConfig(ENCODER, {"is_decoder": False, "eos_token_id": 2})
