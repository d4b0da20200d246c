"""What Step 3 and 3.5 compute."""

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
    attend,
    below,
    frequencies,
    largest,
    rms,
    swiglu,
    turn,
)

# ---------------------------------------------------------------- Step 3.5

STEP: dict[str, Any] = COMMON | {
    "model_type": "step3p5", "num_attention_heads": 4, "num_attention_groups": 2,
    "head_dim": SIZE, "intermediate_size": 80, "sliding_window": 11,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2,
        "head_dim": SIZE,
    },
    "rope_theta": [5000.0, 100.0, 900.0, 1.0], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "yarn_only_types": ["full_attention"],
    "use_head_wise_attn_gate": True, "moe_layers_enum": "1,2", "moe_num_experts": 8,
    "moe_top_k": 3, "moe_intermediate_size": 48, "share_expert_dim": 32,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 1.7,
    "swiglu_limits": [0.0, 0.0, 0.3, 0.0], "swiglu_limits_shared": [0.2, None, 0.4, 0.0],
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def draw_stacked(weights: Weights, here: str) -> None:
    """A layer's mixture, and the expert that all tokens share."""
    weights.mlp(f"{here}.share_expert", HIDDEN, 32)
    weights.matrix(f"{here}.moe.gate", 8, HIDDEN, scale=0.5)
    for name in ("gate_proj", "up_proj"):
        weights.matrix(f"{here}.moe.{name}", 8, 48, HIDDEN)
    weights.matrix(f"{here}.moe.down_proj", 8, HIDDEN, 48)


def draw_step() -> Tensors:
    weights = Weights()
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        heads = 6 if layer == 1 else 4
        for name, rows in (("q_proj", heads * SIZE), ("k_proj", 32), ("v_proj", 32)):
            weights.matrix(f"{here}.self_attn.{name}", rows, HIDDEN)
        weights.matrix(f"{here}.self_attn.g_proj", heads, HIDDEN, scale=0.3)
        weights.matrix(f"{here}.self_attn.o_proj", HIDDEN, heads * SIZE)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights.norm(f"{here}.{name}", SIZE, about=0.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights.norm(f"{here}.{name}", HIDDEN, about=0.0)
        if layer == 0:
            weights.mlp(f"{here}.mlp", HIDDEN, 80)
            continue
        weights.vector(f"{here}.moe.router_bias", 8)
        draw_stacked(weights, here)
    weights.norm("model.layers.3.input_layernorm", HIDDEN)
    return weights.tensors


def step_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, 1 + w[f"{name}.weight"], EPS)

    normed = norm(x, "input_layernorm")
    q, k, v = (
        (normed @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, SIZE)) for name in "qkv"
    )
    size, base = int(SIZE * STEP["partial_rotary_factors"][layer]), STEP["rope_theta"][layer]
    stretch = 1.0 if layer == 1 else 2.0
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(size, base) / stretch)
    q, k = turn(norm(q, "self_attn.q_norm"), angles), turn(norm(k, "self_attn.k_norm"), angles)
    heads = attend(q, k, v, window=11 if layer == 1 else None)
    gate = (normed @ w["self_attn.g_proj.weight"].T).sigmoid()
    x = x + (heads * gate[:, :, None]).flatten(1) @ w["self_attn.o_proj.weight"].T
    normed = norm(x, "post_attention_layernorm")
    limit = STEP["swiglu_limits_shared"][layer]
    if layer == 0:
        return x + swiglu(normed, below(w, "mlp."), limit)
    scores = (normed @ w["moe.gate.weight"].T).sigmoid()
    weights = largest(scores, 3, bias=w["moe.router_bias"])
    weights = 1.7 * weights / weights.sum(-1, keepdim=True)
    x = x + swiglu(normed, below(w, "share_expert."), limit)
    for expert, factor in enumerate(weights.T[:, :, None]):
        own = {name: t[expert] for name, t in below(w, "moe.").items() if t.dim() == 3}
        x = x + factor * swiglu(normed, own, STEP["swiglu_limits"][layer])
    return x


# ---------------------------------------------------------------- Step 3

STEP_3: dict[str, Any] = COMMON | {
    "model_type": "step3_text", "num_attention_heads": 4, "num_attention_groups": 1,
    "head_dim": SIZE, "intermediate_size": 80, "share_q_dim": 24, "rope_theta": 500.0,
    "moe_layers_enum": "1,2", "moe_num_experts": 8, "moe_top_k": 3, "moe_intermediate_size": 48,
    "share_expert_dim": 32, "norm_expert_weight": False, "max_position_embedding": 256,
}  # fmt: skip


def draw_step_3() -> Tensors:
    weights = Weights()
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q_proj", 24, HIDDEN), ("k_proj", SIZE, HIDDEN), ("v_proj", SIZE, HIDDEN),
            ("wq", HIDDEN, 24), ("o_proj", HIDDEN, HIDDEN),
        ):  # fmt: skip
            weights.matrix(f"{here}.self_attn.{name}", rows, columns)
        weights.norm(f"{here}.self_attn.inter_norm", 24)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights.norm(f"{here}.{name}", HIDDEN)
        if layer == 0:
            weights.mlp(f"{here}.mlp", HIDDEN, 80)
        else:
            draw_stacked(weights, here)
    return weights.tensors


def step_3_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    normed, own = rms(x, w["input_layernorm.weight"], EPS), below(w, "self_attn.")
    narrow, k, v = (normed @ own[f"{name}_proj.weight"].T for name in "qkv")
    q = rms(narrow, own["inter_norm.weight"], EPS) @ own["wq.weight"].T
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(SIZE, 500.0))
    q, k = turn(q.unflatten(1, (4, SIZE)), angles), turn(k[:, None], angles)
    x = x + attend(q, k, v[:, None]).flatten(1) @ own["o_proj.weight"].T
    normed = rms(x, w["post_attention_layernorm.weight"], EPS)
    if layer == 0:
        return x + swiglu(normed, below(w, "mlp."))
    weights = largest((normed @ w["moe.gate.weight"].T).softmax(-1), 3)
    x = x + swiglu(normed, below(w, "share_expert."))
    for expert, factor in enumerate(weights.T[:, :, None]):
        own = {name: t[expert] for name, t in below(w, "moe.").items() if t.dim() == 3}
        x = x + factor * swiglu(normed, own)
    return x
