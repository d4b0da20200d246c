"""Parts of published formulas, in plain torch, for references of families that `transformers` does
not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from jackfield.plugins.conformance.paged_model import VOCAB

Tensors = dict[str, torch.Tensor]
MLP = ("gate_proj", "up_proj", "down_proj")
HIDDEN, SIZE, LAYERS, EPS = 64, 16, 3, 0.05
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "rms_norm_eps": EPS,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


Layers: TypeAlias = Callable[[torch.Tensor, Tensors], torch.Tensor]
"""(states [tokens, hidden_size], what `model` has) → states, before the last norm"""


class Family(NamedTuple):
    config: dict[str, Any]
    """What config.json says, besides the architecture."""
    draw: Callable[[], Tensors]
    """Random weights by their names in checkpoints."""
    layers: Layers
    offset: float = 0.0
    """Of the last norm's weight."""
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    known_as: str | None = None
    """The class of `transformers` that reads its configuration."""


class Weights:
    """Draws weights by their names in checkpoints."""

    def __init__(self, seed: int = 3) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.tensors: Tensors = {}

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> None:
        """[..., rows, columns]"""
        scale = shape[-1] ** -0.5 if scale is None else scale
        self.tensors[f"{name}.weight"] = torch.randn(*shape, generator=self.draw) * scale

    def vector(self, name: str, size: int, *, about: float = 0.0, spread: float = 0.2) -> None:
        self.tensors[name] = about + spread * torch.randn(size, generator=self.draw)

    def norm(self, name: str, size: int, *, about: float = 1.0) -> None:
        self.vector(f"{name}.weight", size, about=about)

    def mlp(self, name: str, hidden: int, inner: int, parts: tuple[str, ...] = MLP) -> None:
        for part, shape in zip(parts, [(inner, hidden)] * 2 + [(hidden, inner)], strict=True):
            self.matrix(f"{name}.{part}", *shape)


def blocks(block: Callable[[torch.Tensor, int, Tensors], torch.Tensor], count: int) -> Layers:
    """One after the other. block: (states, number of the layer, its weights) → states"""

    def run(x: torch.Tensor, w: Tensors) -> torch.Tensor:
        for layer in range(count):
            x = block(x, layer, below(w, f"layers.{layer}."))
        return x

    return run


def below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def rms(x: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor


def frequencies(size: int, base: float) -> torch.Tensor:
    """[size / 2], of halves that turn together"""
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)


def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, size]; angles: [tokens, pairs] of the first 2 * pairs channels, half
    against half"""
    pairs = angles.shape[1]
    first, second, rest = x.tensor_split((pairs, 2 * pairs), dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag, rest], -1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, size], of keys and values fewer heads → [tokens, heads, size of values]"""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    places = torch.arange(len(q))
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or len(q)))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def latent_attention(
    x: torch.Tensor, w: Tensors, angles: torch.Tensor, *, heads: int, nope: int, eps: float
) -> torch.Tensor:
    """With keys and values for each head; pairs of neighbours turn. w: what `self_attn` has; nope:
    channels of a head that do not turn: [tokens, hidden_size] → the same shape"""

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T

    def turned(x: torch.Tensor) -> torch.Tensor:
        return turn(torch.cat([x[..., ::2], x[..., 1::2]], -1), angles)

    rope = 2 * angles.shape[1]
    queries = product(x, "q_a_proj" if "q_a_proj.weight" in w else "q_proj")
    if "q_a_proj.weight" in w:
        queries = product(rms(queries, w["q_a_layernorm.weight"], eps), "q_b_proj")
    q = queries.unflatten(1, (heads, nope + rope))
    latent, shared = product(x, "kv_a_proj_with_mqa").tensor_split((-rope,), dim=-1)
    expanded = product(rms(latent, w["kv_a_layernorm.weight"], eps), "kv_b_proj")
    k, v = expanded.unflatten(1, (heads, -1)).tensor_split((nope,), dim=-1)
    shared = turned(shared[:, None]).expand(-1, heads, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:])], -1)
    return product(attend(q, torch.cat([k, shared], -1), v).flatten(1), "o_proj")


def lightning(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """Token by token: [tokens, heads, size] → the same shape. slopes: [heads]"""
    state, rows = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for token in range(len(q)):
        state = (-slopes).exp()[:, None, None] * state + k[token][:, :, None] * v[token][:, None]
        rows.append(torch.einsum("hd,hdv->hv", q[token], state))
    return torch.stack(rows)


def swiglu(
    x: torch.Tensor, w: Tensors, limit: float | None = None, parts: tuple[str, ...] = MLP
) -> torch.Tensor:
    first, second, last = (w[f"{part}.weight"].T for part in parts)
    gate, up = F.silu(x @ first), x @ second
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * up) @ last


def largest(scores: torch.Tensor, top_k: int, *, bias: Any = 0.0) -> torch.Tensor:
    """Keep the scores of each row that are the largest with the bias, and zeros: [tokens,
    experts]"""
    chosen = (scores + bias).topk(top_k, dim=-1).indices
    return torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
