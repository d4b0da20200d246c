"""Draft heads with random weights, and what they compute, written from their formats alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from drafted import HiddenStates
from safetensors.torch import save_file

from helpers import VOCAB

Tensors = dict[str, torch.Tensor]
HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 4, 2, 16, 96, 1e-5, 10000.0
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": INNER,
    "hidden_act": "silu", "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": VOCAB,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


class Random:
    """Draws weights of a scale that keeps states apart."""

    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 2.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._draw) * scale / columns**0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._draw)

    def layer(self, prefix: str, size: int, width: int | None = None) -> Tensors:
        """A Llama layer without its input norm; width: of what attention reads."""
        width = width or size
        return {
            f"{prefix}self_attn.q_proj.weight": self.matrix(HEADS * HEAD_DIM, width),
            f"{prefix}self_attn.k_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, width),
            f"{prefix}self_attn.v_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, width),
            f"{prefix}self_attn.o_proj.weight": self.matrix(size, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": self.matrix(INNER, size),
            f"{prefix}mlp.up_proj.weight": self.matrix(INNER, size),
            f"{prefix}mlp.down_proj.weight": self.matrix(size, INNER),
            f"{prefix}post_attention_layernorm.weight": self.norm(size),
        }


def write(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attention(tensors: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """Causal attention of all positions: [tokens, width] → [tokens, size]"""
    count = len(x)
    q, k, v = (
        (x @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T
         + tensors.get(f"{prefix}self_attn.{name}_proj.bias", torch.zeros(()))
         ).view(count, -1, HEAD_DIM).transpose(0, 1)
        for name in "qkv"
    )  # fmt: skip
    angles = torch.outer(
        torch.arange(count).float(), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    )
    cos, sin = angles.cos(), angles.sin()

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    groups = HEADS // KV_HEADS
    q, k, v = rotated(q), rotated(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
    scores += torch.full((count, count), float("-inf")).triu(1)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
    return out @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def mlp(tensors: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def all_states(model: Any) -> HiddenStates:
    """Those that `transformers` gives before the first layer and after each."""

    def compute(tokens: list[int]) -> list[torch.Tensor]:
        output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return [states[0] for states in output.hidden_states]

    return HiddenStates(compute)


@torch.no_grad()
def drafts_of(
    target: HiddenStates,
    known: list[int],
    count: int,
    read: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
    run: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> list[int]:
    """Greedy drafts of an EAGLE-like head.

    read: the target's states (all but the newest token's) → what the head goes on from; run:
    (tokens that follow, states) → states to go on from, logits; of all positions
    """
    states = read(target.of(known[:-1]))
    following = torch.tensor(known[1:])
    drafts: list[int] = []
    for _ in range(count):
        out, logits = run(following, states)
        drafts.append(int(logits[-1].argmax()))
        following = torch.cat((following, torch.tensor(drafts[-1:])))
        states = torch.cat((states, out[-1:]))
    return drafts
