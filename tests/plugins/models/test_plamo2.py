"""PLaMo 2, which `transformers` does not have, says what its published formulas say, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_families import PROMPTS, check_engine, check_names

from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel

HIDDEN, HEADS, KV_HEADS, SIZE, STATES, KERNEL, WINDOW, EPS = 64, 4, 2, 16, 12, 4, 11, 0.05
MAMBA, RANK, INNER = 4, 64, 96
CONFIG = {
    "architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "hidden_size_per_head": SIZE, "rms_norm_eps": EPS,
    "mamba_num_heads": MAMBA, "mamba_d_state": STATES, "mamba_d_conv": KERNEL, "mamba_step": 2,
    "intermediate_size": INNER, "attention_window_size": WINDOW, "full_attention_idx": [3],
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "Plamo2ForCausalLM": {"mamba_enabled": True},
    "Plamo2ForCausalLM:attention alone": {"mamba_enabled": False},
}
Tensors = dict[str, torch.Tensor]


def draw(mixed: bool) -> Tensors:
    """Random weights by their names in checkpoints; layers 1 and 3 attend, or all if not mixed."""
    torch.manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / columns**0.5

    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN) * 0.3,
               "model.norm.weight": 0.2 * torch.randn(HIDDEN)}  # fmt: skip
    channels = MAMBA * SIZE
    for layer in range(4):
        here = f"model.layers.layers.{layer}."
        for name in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"):
            tensors[f"{here}{name}_norm.weight"] = 0.2 * torch.randn(HIDDEN)
        tensors[f"{here}mlp.gate_up_proj.weight"] = matrix(2 * INNER, HIDDEN)
        tensors[f"{here}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        own: Tensors = {
            "qkv_proj.weight": matrix((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
            "o_proj.weight": matrix(HIDDEN, HEADS * SIZE),
            "q_weight": 1 + 0.3 * torch.randn(HEADS, SIZE),
            "k_weight": 1 + 0.3 * torch.randn(KV_HEADS, SIZE),
        }
        if mixed and layer % 2 == 0:
            own = {
                "in_proj.weight": matrix(2 * channels, HIDDEN),
                "conv1d.weight": 0.5 * torch.randn(channels, 1, KERNEL),
                "bcdt_proj.weight": matrix(2 * STATES + RANK, channels),
                "dt_proj.weight": matrix(MAMBA, RANK),
                "dt_bias": torch.randn(MAMBA),
                "A_log": torch.rand(MAMBA),
                "D": torch.randn(MAMBA),
                "out_proj.weight": matrix(HIDDEN, channels),
                "dt_norm_weight": 1 + 0.3 * torch.randn(RANK),
                "B_norm_weight": 1 + 0.3 * torch.randn(STATES),
                "C_norm_weight": 1 + 0.3 * torch.randn(STATES),
            }
        tensors |= {f"{here}mixer.{name}": tensor for name, tensor in own.items()}
    return tensors


def rms(x: torch.Tensor, factor: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor


def mamba(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """Token by token: [tokens, hidden] → the same shape"""
    parts = (x @ w["in_proj.weight"].T).view(-1, MAMBA, 2, SIZE)
    gate, inputs = parts[:, :, 0], parts[:, :, 1].flatten(1)
    padded = torch.cat([inputs.new_zeros(KERNEL - 1, inputs.shape[1]), inputs])
    kernel = w["conv1d.weight"][:, 0]
    state, rows = x.new_zeros(MAMBA, SIZE, STATES), []
    for token in range(len(x)):
        seen = F.silu((padded[token : token + KERNEL] * kernel.T).sum(0))
        b, c, dt = (w["bcdt_proj.weight"] @ seen).split([STATES, STATES, RANK])
        b, c = rms(b, w["B_norm_weight"]), rms(c, w["C_norm_weight"])
        step = F.softplus(w["dt_proj.weight"] @ rms(dt, w["dt_norm_weight"]) + w["dt_bias"])
        heads = seen.view(MAMBA, SIZE)
        kept = torch.exp(-step * w["A_log"].exp())[:, None, None]
        state = kept * state + (step[:, None] * heads)[:, :, None] * b
        y = state @ c + w["D"][:, None] * heads
        rows.append((y * F.silu(gate[token])).flatten())
    return torch.stack(rows) @ w["out_proj.weight"].T


def attention(x: torch.Tensor, w: Tensors, window: int | None) -> torch.Tensor:
    heads = (x @ w["qkv_proj.weight"].T).view(len(x), -1, SIZE)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = rms(q, w["q_weight"], 1e-6), rms(k, w["k_weight"], 1e-6)
    places = torch.arange(len(x), dtype=x.dtype)
    angles = torch.outer(places, 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=x.dtype) / SIZE))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (
        torch.cat([turned.real, turned.imag], -1)
        for turned in (torch.complex(*part.chunk(2, -1)) * turns for part in (q, k))
    )
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance > (len(x) if window is None else window))
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    seen = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", seen, v).flatten(1) @ w["o_proj.weight"].T


def scores(tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """→ log-probabilities [tokens, vocab_size]"""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    x = wide["model.embed_tokens.weight"][tokens]
    for layer in range(4):
        here = f"model.layers.layers.{layer}."
        own = {k.removeprefix(f"{here}mixer."): v for k, v in wide.items()
               if k.startswith(f"{here}mixer.")}  # fmt: skip
        normed = rms(x, 1 + wide[f"{here}pre_mixer_norm.weight"])
        window = None if layer == 3 else WINDOW
        attends = "q_weight" in own
        y = attention(normed, own, window) if attends else mamba(normed, own)
        x = x + rms(y, 0.2 + wide[f"{here}post_mixer_norm.weight"])
        normed = rms(x, 1 + wide[f"{here}pre_mlp_norm.weight"])
        gate, up = (normed @ wide[f"{here}mlp.gate_up_proj.weight"].T).chunk(2, -1)
        y = (F.silu(gate) * up) @ wide[f"{here}mlp.down_proj.weight"].T
        x = x + rms(y, 5**-1.5 + wide[f"{here}post_mlp_norm.weight"])
    x = rms(x, 1 + wide["model.norm.weight"])
    return (x @ wide["model.embed_tokens.weight"].T).log_softmax(-1).float()


def save(case: str, folder: Path) -> Tensors:
    """Write a checkpoint; return its tensors."""
    tensors = draw(CASES[case]["mamba_enabled"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | CASES[case]))
    return tensors


@pytest.mark.parametrize("case", CASES)
async def test_plamo_2_says_what_its_formulas_say(case: str, tmp_path: Path) -> None:
    tensors = save(case, tmp_path)
    model = PagedModel(tmp_path, "float32")
    prompt = PROMPTS[1]
    got = torch.cat([model.run({0: part})[0] for part in (prompt[:11], prompt[11:])])
    torch.testing.assert_close(
        got.log_softmax(-1).cpu(), scores(tensors, prompt), atol=1e-4, rtol=0
    )
    check_names(tmp_path, model.model)
    check_ranks(tmp_path, "Plamo2ForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, lambda tokens: scores(tensors, tokens))


def test_layers_that_attend_are_every_other_one(tmp_path: Path) -> None:
    save("Plamo2ForCausalLM", tmp_path)
    layers = PagedModel(tmp_path, "float32").model.model.layers
    assert [hasattr(layer.self_attn, "qkv_proj") for layer in layers] == [False, True] * 2
    windows = [layers[n].self_attn.attention.spec.sliding_window for n in (1, 3)]
    assert windows == [WINDOW + 1, None]
