"""MLP speculator: a chain of small MLPs on the target's last hidden state, one for each draft.

    s = gelu(norm_h(proj_h(s) + a * emb_h(token)))        # the token before; s at first the state
    logits = head_h(s)

with a so that state and embedding keep their shares over the n MLPs: a = b / w, w = 0.5 ** (0.5 /
n), b = sqrt((1 - w ** 2) * inner / 2). (Wertheimer et al. 2024, arXiv 2404.19124; checkpoints of
IBM's fms-extras, as vLLM reads them.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear
from .state_parts import StateParts

EPS = 1e-6


class ShiftedNorm(nn.Module):
    """x / rms(x) * weight + bias"""

    def __init__(self, size: int, build: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(build.empty(size)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, _normed(x), self.weight)


class MlpChain(nn.Module):
    """With `tie_weights` the MLPs are one, but for the first product."""

    tensor_parallel: ClassVar[bool] = True
    weight_map = WeightMap(prefixes={"speculator.": ""}, ignored=("emb.", "proj.", "ln.", "head."))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        size, inner, count = hf.hidden_size, int(hf.inner_dim or hf.hidden_size), int(hf.n_predict)
        self.num_mlps, self.tied = count, bool(getattr(hf, "tie_weights", False))
        self.scales_input = bool(getattr(hf, "scale_input", False))
        share = 0.5 ** (0.5 / count)
        self.factor = ((1 - share**2) * inner / 2) ** 0.5 / share
        each = 1 if self.tied else count
        self.emb = nn.ModuleList(
            Embedding(config.vocab_size, inner, build, shard="vocabulary") for _ in range(each)
        )
        self.proj = nn.ModuleList(
            Linear(inner if number else size, inner, build)
            for number in range(min(2, count) if self.tied else count)
        )
        self.ln = nn.ModuleList(ShiftedNorm(inner, build) for _ in range(each))
        self.head = nn.ModuleList(
            Embedding(config.vocab_size, inner, build, shard="vocabulary") for _ in range(each)
        )

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states → what the first MLP reads."""
        return _normed(hidden) / 2**0.5 if self.scales_input else hidden

    def forward(
        self, number: int, states: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and tokens before, both of each row → states, and logits [num_rows, vocab_size]"""
        own = 0 if self.tied else number
        states = self.proj[min(number, len(self.proj) - 1)](states)
        states = states + self.factor * self.emb[own](token_ids)
        states = F.gelu(self.ln[own](states))
        head: Any = self.head[own]
        return states, head.logits(states)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class MlpSpeculator(StateParts):
    module = MlpChain
    parts = "MLPs (n_predict)"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        names = [str(name) for name in config.get("architectures") or ()]
        named = any(name.startswith("MLPSpeculator") for name in names)
        return 2 * (named or config.get("model_type") == "mlp_speculator")

    @classmethod
    def num_parts(cls, config: Mapping[str, Any]) -> int:
        count = config.get("n_predict")
        return count if isinstance(count, int) else 0

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "model_type": "llama", "architectures": ["MlpChain"],
            "hidden_size": config.get("emb_dim", config.get("hidden_size", 4096)),
            "inner_dim": config.get("inner_dim") or 0, "n_predict": config.get("n_predict", 3),
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        }  # fmt: skip
