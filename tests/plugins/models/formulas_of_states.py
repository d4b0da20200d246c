"""What Nemotron 3 Puzzle computes: Mamba 2, attention without rotation, experts without gates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from formulas import COMMON, EPS, HIDDEN, SIZE, Tensors, Weights, attend, below, largest, rms

HEADS, WIDTH, STATE, GROUPS, KERNEL = 8, 16, 12, 2, 4
INNER = HEADS * WIDTH
LOW, HIGH = 0.2, 3.0
PUZZLE: dict[str, Any] = COMMON | {
    "model_type": "nemotron_h_puzzle", "layer_norm_epsilon": EPS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": SIZE, "mamba_num_heads": HEADS, "mamba_head_dim": WIDTH,
    "ssm_state_size": STATE, "n_groups": GROUPS, "conv_kernel": KERNEL, "chunk_size": 16,
    "time_step_limit": [LOW, HIGH], "n_shared_experts": 1, "intermediate_size": 999,
    "moe_shared_expert_intermediate_size": 32, "norm_topk_prob": True,
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "attention", "sliding_window": 7},
        {"block_type": "moe", "n_routed_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 48, "moe_latent_size": 24, "routed_scaling_factor": 2.5},
        {"block_type": "attention"},
        {"block_type": "mlp", "intermediate_size": 80},
        {"block_type": "moe", "n_routed_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
    ],
}  # fmt: skip
del PUZZLE["rms_norm_eps"], PUZZLE["num_hidden_layers"]


def draw_puzzle() -> Tensors:
    weights = Weights()
    weights.matrix("mtp.layers.0.eh_proj", 4, 8)

    def relu2_mlp(name: str, hidden: int, inner: int) -> None:
        weights.matrix(f"{name}.up_proj", inner, hidden)
        weights.matrix(f"{name}.down_proj", hidden, inner)

    for layer, block in enumerate(PUZZLE["block_configs"]):
        here = f"model.layers.{layer}.mixer"
        weights.norm(f"model.layers.{layer}.norm", HIDDEN)
        if block["block_type"] == "mamba":
            convolved = INNER + 2 * GROUPS * STATE
            weights.matrix(f"{here}.in_proj", INNER + convolved + HEADS, HIDDEN)
            weights.matrix(f"{here}.conv1d", convolved, 1, KERNEL)
            weights.vector(f"{here}.conv1d.bias", convolved)
            for name in ("A_log", "D", "dt_bias"):
                weights.vector(f"{here}.{name}", HEADS, spread=0.5)
            weights.norm(f"{here}.norm", INNER)
            weights.matrix(f"{here}.out_proj", HIDDEN, INNER)
        elif block["block_type"] == "attention":
            for name, rows in (("q", HIDDEN), ("k", 32), ("v", 32), ("o", HIDDEN)):
                weights.matrix(f"{here}.{name}_proj", rows, HIDDEN)
        elif block["block_type"] == "mlp":
            relu2_mlp(here, HIDDEN, block["intermediate_size"])
        else:
            seen = block.get("moe_latent_size") or HIDDEN
            if seen != HIDDEN:
                weights.matrix(f"{here}.fc1_latent_proj", seen, HIDDEN)
                weights.matrix(f"{here}.fc2_latent_proj", HIDDEN, seen)
            weights.matrix(f"{here}.gate", block["n_routed_experts"], HIDDEN, scale=0.5)
            bias = f"{here}.gate.e_score_correction_bias"
            weights.vector(bias, block["n_routed_experts"])
            for expert in range(block["n_routed_experts"]):
                inner = block["moe_intermediate_size"]
                relu2_mlp(f"{here}.experts.{expert}", seen, inner)
            shared = block.get("moe_shared_expert_intermediate_size", 32)
            relu2_mlp(f"{here}.shared_experts", HIDDEN, shared)
    return weights.tensors


def mamba2(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """Token by token: [tokens, hidden_size] → the same shape"""
    keys = GROUPS * STATE
    gate, mixed, steps = (x @ w["in_proj.weight"].T).split([INNER, INNER + 2 * keys, HEADS], -1)
    padded = F.pad(mixed.T, (KERNEL - 1, 0))
    kernel, bias = w["conv1d.weight"], w["conv1d.bias"]
    mixed = F.silu(F.conv1d(padded, kernel, bias, groups=len(kernel))).T
    inputs, b, c = mixed.split([INNER, keys, keys], -1)
    inputs = inputs.unflatten(1, (HEADS, WIDTH))
    b, c = (
        part.unflatten(1, (GROUPS, STATE)).repeat_interleave(HEADS // GROUPS, 1) for part in (b, c)
    )
    steps = F.softplus(steps + w["dt_bias"]).clamp(LOW, HIGH)
    decay = (-steps * w["A_log"].exp()).exp()
    state, rows = x.new_zeros(HEADS, WIDTH, STATE), []
    for token in range(len(x)):
        new = (steps[token][:, None] * inputs[token])[:, :, None] * b[token][:, None]
        state = decay[token][:, None, None] * state + new
        rows.append((state @ c[token][:, :, None])[..., 0] + w["D"][:, None] * inputs[token])
    gated = torch.stack(rows).flatten(1) * F.silu(gate)
    normed = rms(gated.unflatten(1, (GROUPS, -1)), torch.ones(()), EPS).flatten(1)
    return (normed * w["norm.weight"]) @ w["out_proj.weight"].T


def relu2_mlp(x: torch.Tensor, w: Tensors, name: str) -> torch.Tensor:
    inner = (x @ w[f"{name}up_proj.weight"].T).relu().square()
    return inner @ w[f"{name}down_proj.weight"].T


def mixture(x: torch.Tensor, w: Tensors, block: dict[str, Any]) -> torch.Tensor:
    scores = (x @ w["gate.weight"].T).sigmoid()
    bias = w["gate.e_score_correction_bias"]
    weights = largest(scores, block["num_experts_per_tok"], bias=bias)
    weights = weights / weights.sum(-1, keepdim=True) * block.get("routed_scaling_factor", 1.0)
    latent = "moe_latent_size" in block
    seen = x @ w["fc1_latent_proj.weight"].T if latent else x
    routed = torch.zeros_like(seen)
    for expert, factor in enumerate(weights.T[:, :, None]):
        routed = routed + factor * relu2_mlp(seen, w, f"experts.{expert}.")
    routed = routed @ w["fc2_latent_proj.weight"].T if latent else routed
    return routed + relu2_mlp(x, w, "shared_experts.")


def puzzle_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    block = PUZZLE["block_configs"][layer]
    normed = rms(x, w["norm.weight"], EPS)
    own = below(w, "mixer.")
    if block["block_type"] == "mamba":
        return x + mamba2(normed, own)
    if block["block_type"] == "mlp":
        return x + relu2_mlp(normed, own, "")
    if block["block_type"] == "moe":
        return x + mixture(normed, own, block)
    q, k, v = ((normed @ own[f"{n}_proj.weight"].T).unflatten(1, (-1, SIZE)) for n in "qkv")
    heads = attend(q, k, v, window=block.get("sliding_window"))
    return x + heads.flatten(1) @ own["o_proj.weight"].T
