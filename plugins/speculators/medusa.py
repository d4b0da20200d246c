"""Medusa: heads on the target's last hidden state, each of which predicts one token further.

Head h: x + silu(W x) for each of its layers, then its own product with the vocabulary. (Cai et al.
2024, arXiv 2401.10774; names as vLLM reads them.) Heads do not see each other's tokens, nor the
newest one: the first head predicts what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear
from .state_parts import StateParts


class MedusaBlock(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        bias = bool(getattr(hf, "medusa_fc_bias", False))
        self.layers = nn.ModuleList(
            Linear(hf.hidden_size, hf.hidden_size, build, bias=bias)
            for _ in range(config.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    tensor_parallel: ClassVar[bool] = True
    absent: frozenset[str] = frozenset()
    """Parameters that the checkpoint does not have."""
    weight_map = WeightMap(prefixes={"medusa_heads.": ""}, optional=("token_map",))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        count = num_heads(hf.to_dict())
        drafted = int(getattr(hf, "truncated_vocab_size", None) or config.vocab_size)
        self.vocab_size, self.shared = config.vocab_size, bool(getattr(hf, "original_lm_head", 0))
        self.blocks = nn.ModuleList(MedusaBlock(config, build) for _ in range(count))
        heads = [
            Embedding(drafted, hf.hidden_size, build, shard="vocabulary")
            for _ in range(1 if self.shared else count)
        ]
        if self.shared:
            self.lm_head = heads[0]
        else:
            self.lm_heads = nn.ModuleList(heads)
        token_map = torch.zeros(drafted, dtype=torch.int64, device=build.device)
        self.token_map = nn.Parameter(token_map, requires_grad=False)

    def after_loading(self) -> None:
        """Raise ConfigError for a smaller vocabulary whose tokens are not known."""
        count = len(self.token_map)
        if "token_map" in self.absent and count < self.vocab_size:
            raise ConfigError(
                f"{FIELD}: the checkpoint has no token_map, the tokens of its {count} rows",
                param=FIELD,
            )
        known = (self.token_map >= 0) & (self.token_map < self.vocab_size)
        if not bool(known.all()):
            raise ConfigError(
                f"{FIELD}: token_map names tokens outside of the vocabulary of {self.vocab_size}",
                param=FIELD,
            )

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states → what all heads read."""
        return hidden

    def forward(
        self, number: int, states: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One head: [num_rows, hidden_size], and the tokens before, which it does not read → the
        states, and logits [num_rows, vocab_size]"""
        head: Any = self.lm_head if self.shared else self.lm_heads[number]
        logits: torch.Tensor = head.logits(self.blocks[number](states))
        if "token_map" not in self.absent:
            whole = logits.new_full((len(logits), self.vocab_size), float("-inf"))
            logits = whole.index_copy_(1, self.token_map, logits)
        return states, logits


def num_heads(config: Mapping[str, Any]) -> int:
    """Return how many heads a config.json says that its checkpoint has."""
    return int(config.get("medusa_num_heads") or config.get("num_heads") or 0)


class Medusa(StateParts):
    module = MedusaHeads
    parts = "heads"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        names = " ".join(str(name) for name in config.get("architectures") or ()).lower()
        return 2 * ("medusa" in names or config.get("model_type") == "medusa")

    @classmethod
    def num_parts(cls, config: Mapping[str, Any]) -> int:
        return num_heads(config)

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
        return {
            "model_type": "llama", "architectures": ["MedusaHeads"], "num_hidden_layers": layers,
            "num_attention_heads": 1, "num_key_value_heads": 1,
        }  # fmt: skip
