"""What Ouro, IQuest LoopCoder, PLaMo 3, Solar Pro and Step 1 compute, nearly Llama's blocks."""

from __future__ import annotations

from typing import Any

import torch
from formulas import (
    COMMON,
    EPS,
    HIDDEN,
    SIZE,
    Tensors,
    Weights,
    attend,
    below,
    frequencies,
    rms,
    swiglu,
    turn,
)

LLAMA: dict[str, Any] = COMMON | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80,
    "rope_theta": 500.0,
}  # fmt: skip


def draw(layers: int, norms: tuple[str, ...]) -> Tensors:
    weights = Weights()
    for layer in range(layers):
        here = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", 32), ("v", 32), ("o", HIDDEN)):
            weights.matrix(f"{here}.self_attn.{name}_proj", rows, HIDDEN)
        for name in norms:
            weights.norm(f"{here}.{name}", HIDDEN)
        weights.mlp(f"{here}.mlp", HIDDEN, 80)
    return weights.tensors


def attention(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).unflatten(1, (-1, SIZE)) for name in "qkv")
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(SIZE, 500.0))
    return attend(turn(q, angles), turn(k, angles), v).flatten(1) @ w["o_proj.weight"].T


# ---------------------------------------------------------------- Ouro

OURO: dict[str, Any] = LLAMA | {
    "model_type": "ouro", "total_ut_steps": 3, "early_exit_threshold": 1.0, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
OURO_NORMS = (
    "input_layernorm", "input_layernorm_2", "post_attention_layernorm",
    "post_attention_layernorm_2",
)  # fmt: skip


def draw_ouro() -> Tensors:
    weights = Weights(seed=4)
    weights.matrix("model.early_exit_gate", 1, HIDDEN)
    weights.vector("model.early_exit_gate.bias", 1)
    return weights.tensors | draw(3, OURO_NORMS)


def ouro(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    for loop in range(3):
        x = rms(x, w["norm.weight"], EPS) if loop else x
        for layer in range(3):
            own = below(w, f"layers.{layer}.")
            first, second, third, last = (own[f"{name}.weight"] for name in OURO_NORMS)
            y = attention(rms(x, first, EPS), below(own, "self_attn."))
            x = x + rms(y, second, EPS)
            x = x + rms(swiglu(rms(x, third, EPS), below(own, "mlp.")), last, EPS)
    return x


# ---------------------------------------------------------------- IQuest LoopCoder

LOOP: dict[str, Any] = LLAMA | {
    "model_type": "iquestloopcoder", "loop_num": 3, "loop_window_size": 7, "head_dim": SIZE,
}  # fmt: skip


def draw_loop() -> Tensors:
    weights = Weights(seed=4)
    for layer in range(3):
        weights.matrix(f"model.gate_projections.{layer}", 4, SIZE, scale=0.5)
        weights.vector(f"model.gate_projections.{layer}.bias", 4)
    return weights.tensors | draw(3, ("input_layernorm", "post_attention_layernorm"))


def loop_coder(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(SIZE, 500.0))
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for loop in range(3):
        for layer in range(3):
            own, gates = below(w, f"layers.{layer}."), below(w, f"gate_projections.{layer}.")
            normed = rms(x, own["input_layernorm.weight"], EPS)
            q, k, v = (
                (normed @ own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, SIZE))
                for name in "qkv"
            )
            q, k = turn(q, angles), turn(k, angles)
            kept.setdefault(layer, (k, v))
            heads = attend(q, *kept[layer])
            if loop:
                gate = ((q * gates["weight"]).sum(-1) + gates["bias"]).sigmoid()[..., None]
                heads = gate * heads + (1 - gate) * attend(q, k, v, window=7)
            x = x + heads.flatten(1) @ own["self_attn.o_proj.weight"].T
            normed = rms(x, own["post_attention_layernorm.weight"], EPS)
            x = x + swiglu(normed, below(own, "mlp."))
    return x


# ---------------------------------------------------------------- PLaMo 3

PLAMO: dict[str, Any] = LLAMA | {
    "model_type": "plamo3", "head_dim": SIZE, "window_size": 7, "sliding_window_pattern": 2,
    "rope_theta": 500, "rope_local_theta": 100,
}  # fmt: skip
OFFSETS = {"pre_mixer": 1.0, "post_mixer": 0.2, "pre_mlp": 1.0, "post_mlp": 5**-1.5}


def draw_plamo() -> Tensors:
    weights = Weights()
    for layer in range(3):
        here = f"model.layers.layers.{layer}"
        weights.matrix(f"{here}.mixer.qkv_proj", 128, HIDDEN)
        weights.matrix(f"{here}.mixer.o_proj", HIDDEN, HIDDEN)
        for name in ("q_norm", "k_norm"):
            weights.norm(f"{here}.mixer.{name}", SIZE, about=0.0)
        for name in OFFSETS:
            weights.norm(f"{here}.{name}_norm", HIDDEN, about=0.0)
        weights.matrix(f"{here}.mlp.gate_up_proj", 160, HIDDEN)
        weights.matrix(f"{here}.mlp.down_proj", HIDDEN, 80)
    return weights.tensors


def plamo(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    for layer in range(3):
        own = below(w, f"layers.layers.{layer}.")
        first, second, third, last = (own[f"{n}_norm.weight"] + o for n, o in OFFSETS.items())
        qkv = (rms(x, first, EPS) @ own["mixer.qkv_proj.weight"].T).unflatten(1, (-1, SIZE))
        q, k, v = qkv.split([4, 2, 2], dim=1)
        base, window = (500.0, None) if layer == 1 else (100.0, 7)
        angles = torch.outer(torch.arange(len(x)).double(), frequencies(SIZE, base))
        q = turn(rms(q, 1 + own["mixer.q_norm.weight"], EPS), angles)
        k = turn(rms(k, 1 + own["mixer.k_norm.weight"], EPS), angles)
        y = attend(q, k, v, window=window).flatten(1) @ own["mixer.o_proj.weight"].T
        x = x + rms(y, second, EPS)
        mlp = dict(zip(
            ("gate_proj.weight", "up_proj.weight"), own["mlp.gate_up_proj.weight"].chunk(2),
            strict=True,
        ))  # fmt: skip
        mlp["down_proj.weight"] = own["mlp.down_proj.weight"]
        x = x + rms(swiglu(rms(x, third, EPS), mlp), last, EPS)
    return x


# ---------------------------------------------------------------- Solar Pro

SOLAR: dict[str, Any] = LLAMA | {
    "model_type": "solar", "num_hidden_layers": 6, "bskcn_1": [1, 3], "bskcn_2": [2],
    "bskcn_3": [2, 4], "bskcn_4": [5], "bskcn_tv": [0.9, 0.8],
}  # fmt: skip


def draw_solar() -> Tensors:
    return draw(6, ("input_layernorm", "post_attention_layernorm"))


def solar(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    inputs: dict[int, torch.Tensor] = {}
    mixes = {2: 1, 4: 3, 5: 2}
    for layer in range(6):
        inputs[layer] = x
        if layer in mixes:
            x = 0.2 * x + 0.8 * inputs[mixes[layer]]
        own = below(w, f"layers.{layer}.")
        y = attention(rms(x, own["input_layernorm.weight"], EPS), below(own, "self_attn."))
        x = x + y
        normed = rms(x, own["post_attention_layernorm.weight"], EPS)
        x = x + swiglu(normed, below(own, "mlp."))
    return x


# ---------------------------------------------------------------- Step 1

STEP_1: dict[str, Any] = COMMON | {
    "model_type": "step1", "num_attention_heads": 4, "num_attention_groups": 2,
    "intermediate_size": 80, "max_seq_len": 128,
}  # fmt: skip
del STEP_1["max_position_embeddings"]


def draw_step_1() -> Tensors:
    return draw(3, ("input_layernorm", "post_attention_layernorm"))


def root_slopes(heads: int) -> torch.Tensor:
    """[heads] Of a power of two, a geometric sequence; of the heads beyond it, every other one of
    the sequence that is twice as dense."""
    power = 2 ** (heads.bit_length() - 1)
    first = [2.0 ** (-8 / power * head) for head in range(1, power + 1)]
    more = [2.0 ** (-4 / power * head) for head in range(1, 2 * (heads - power), 2)]
    return torch.tensor(first + more, dtype=torch.float64)


def step_1_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    normed = rms(x, w["input_layernorm.weight"], EPS)
    q, k, v = (
        (normed @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, SIZE)) for name in "qkv"
    )
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    places = torch.arange(len(x))
    distance = places[:, None] - places
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    scores = scores - root_slopes(4)[:, None, None] * distance.clamp(min=0).double().sqrt()
    scores = scores.masked_fill(distance < 0, float("-inf"))
    heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    x = x + heads.flatten(1) @ w["self_attn.o_proj.weight"].T
    return x + swiglu(rms(x, w["post_attention_layernorm.weight"], EPS), below(w, "mlp."))
