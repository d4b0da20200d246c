"""What openPangu Ultra MoE and Ling 2.5 compute, which have latent attention."""

from __future__ import annotations

from typing import Any

import torch
from formulas import (
    COMMON,
    EPS,
    HIDDEN,
    LAYERS,
    SIZE,
    Tensors,
    Weights,
    below,
    frequencies,
    largest,
    latent_attention,
    lightning,
    rms,
    swiglu,
    turn,
)

# ---------------------------------------------------------------- openPangu Ultra MoE

PANGU: dict[str, Any] = COMMON | {
    "model_type": "pangu_ultra_moe", "num_attention_heads": 4, "intermediate_size": 80,
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "rope_theta": 500.0, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.7, "sandwich_norm": True,
    "router_enable_expert_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip


def draw_latent(weights: Weights, here: str, output: str = "o_proj") -> None:
    """What a layer's attention of PANGU's sizes has."""
    for name, rows, columns in (
        ("q_a_proj", 20, HIDDEN), ("q_b_proj", 4 * 20, 20), ("kv_a_proj_with_mqa", 32, HIDDEN),
        ("kv_b_proj", 4 * 22, 24), (output, HIDDEN, 40),
    ):  # fmt: skip
        weights.matrix(f"{here}.{name}", rows, columns)
    weights.norm(f"{here}.q_a_layernorm", 20)
    weights.norm(f"{here}.kv_a_layernorm", 24)


def draw_pangu() -> Tensors:
    weights = Weights()
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        draw_latent(weights, f"{here}.self_attn")
        for name in ("input", "post_attention", "pre_mlp", "post_mlp"):
            weights.norm(f"{here}.{name}_layernorm", HIDDEN)
        if layer == 0:
            weights.mlp(f"{here}.mlp", HIDDEN, 80)
            continue
        weights.matrix(f"{here}.mlp.gate", 8, HIDDEN, scale=0.5)
        weights.vector(f"{here}.mlp.e_score_correction_bias", 8)
        weights.mlp(f"{here}.mlp.shared_experts", HIDDEN, 64)
        for expert in range(8):
            weights.mlp(f"{here}.mlp.experts.{expert}", HIDDEN, 32)
    weights.norm("model.layers.3.input_layernorm", HIDDEN)
    return weights.tensors


def pangu_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, w[f"{name}_layernorm.weight"], EPS)

    angles = torch.outer(torch.arange(len(x)).double(), frequencies(8, 500.0))
    y = latent_attention(
        norm(x, "input"), below(w, "self_attn."), angles, heads=4, nope=12, eps=EPS
    )
    x = x + norm(y, "post_attention")
    normed = norm(x, "pre_mlp")
    if layer == 0:
        return x + norm(swiglu(normed, below(w, "mlp.")), "post_mlp")
    scores = (normed @ w["mlp.gate.weight"].T).sigmoid()
    weights = largest(scores, 3, bias=w["mlp.e_score_correction_bias"])
    weights = 1.7 * weights / weights.sum(-1, keepdim=True)
    y = swiglu(normed, below(w, "mlp.shared_experts."))
    for expert, factor in enumerate(weights.T[:, :, None]):
        y = y + factor * swiglu(normed, below(w, f"mlp.experts.{expert}."))
    return x + norm(y, "post_mlp")


# ---------------------------------------------------------------- Ling 2.5

LING: dict[str, Any] = COMMON | {
    "model_type": "bailing_hybrid", "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": SIZE, "intermediate_size": 80, "layer_group_size": 2,
    "group_norm_size": 2, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 500.0,
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.7, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "eos_token_id": 2, "pad_token_id": 0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


def draw_ling() -> Tensors:
    weights = Weights()
    for layer in range(5):
        here = f"model.layers.{layer}"
        if layer in (1, 3, 4):
            draw_latent(weights, f"{here}.attention", output="dense")
        else:
            weights.matrix(f"{here}.attention.query_key_value", 3 * HIDDEN, HIDDEN)
            for name in ("g_proj", "dense"):
                weights.matrix(f"{here}.attention.{name}", HIDDEN, HIDDEN)
            for name, size in (("query_layer", SIZE), ("key_layer", SIZE), ("g_", HIDDEN)):
                weights.norm(f"{here}.attention.{name}norm", size)
        for name in ("input", "post_attention"):
            weights.norm(f"{here}.{name}_layernorm", HIDDEN)
        if layer == 0:
            weights.mlp(f"{here}.mlp", HIDDEN, 80)
            continue
        weights.matrix(f"{here}.mlp.gate", 8, HIDDEN, scale=0.5)
        weights.vector(f"{here}.mlp.gate.expert_bias", 8)
        for name in ("shared_experts", *(f"experts.{expert}" for expert in range(8))):
            weights.mlp(f"{here}.mlp.{name}", HIDDEN, 32)
    return weights.tensors


def ling_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    places = torch.arange(len(x)).double()
    angles = torch.outer(places, frequencies(8, 500.0))
    normed, own = rms(x, w["input_layernorm.weight"], EPS), below(w, "attention.")
    if layer in (1, 3, 4):
        own["o_proj.weight"] = own["dense.weight"]
        x = x + latent_attention(normed, own, angles, heads=4, nope=12, eps=EPS)
    else:
        q, k, v = (normed @ own["query_key_value.weight"].T).view(-1, 3, 4, SIZE).unbind(1)
        q = turn(rms(q, own["query_layernorm.weight"], EPS), angles) / SIZE**0.5
        k = turn(rms(k, own["key_layernorm.weight"], EPS), angles)
        slopes = 0.25 ** torch.arange(1, 5).double() * (1 - layer / 4 + 1e-5)
        y = rms(lightning(q, k, v, slopes).view(-1, 2, 2 * SIZE), torch.tensor(1.0), EPS)
        y = y.flatten(1) * own["g_norm.weight"] * (normed @ own["g_proj.weight"].T).sigmoid()
        x = x + y @ own["dense.weight"].T
    normed = rms(x, w["post_attention_layernorm.weight"], EPS)
    if layer == 0:
        return x + swiglu(normed, below(w, "mlp."))
    scores = (normed @ w["mlp.gate.weight"].T).sigmoid()
    choice = (scores + w["mlp.gate.expert_bias"]).view(-1, 2, 4)
    best = choice.topk(2, dim=-1).values.sum(-1).argmax(-1)
    other = torch.zeros_like(choice).scatter(1, (1 - best)[:, None, None].expand(-1, 1, 4), -9.0)
    weights = largest(scores, 3, bias=w["mlp.gate.expert_bias"] + other.flatten(1))
    weights = 1.7 * weights / weights.sum(-1, keepdim=True)
    x = x + swiglu(normed, below(w, "mlp.shared_experts."))
    for expert, factor in enumerate(weights.T[:, :, None]):
        x = x + factor * swiglu(normed, below(w, f"mlp.experts.{expert}."))
    return x
