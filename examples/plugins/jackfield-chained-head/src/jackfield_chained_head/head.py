"""Drafts of one small head, which is run once for each of them: from the model's last hidden state
and the newest token it makes the state after that token, and of that the next one.

As the state is passed on, the second draft knows the first. (Hydra heads, Ankner et al. 2024, arXiv
2402.05109, have one such head for each draft.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.loading.weight_map import WeightMap
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.linear import Linear
from jackfield.core.protocols import (
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)

ARCHITECTURE = "ChainedHead"
"""What the checkpoint's config.json has as `architectures`."""


class Head(nn.Module):
    """State and next token → the state after that token. The loader fills parameters by name."""

    tensor_parallel: ClassVar[bool] = True
    weight_map = WeightMap()

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, build, shard="vocabulary")
        self.proj = Linear(2 * size, size, build)
        self.lm_head: Any = Embedding(config.vocab_size, size, build, shard="vocabulary")

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] and [num_rows] → [num_rows, hidden_size]"""
        both = torch.cat((hidden, self.embed_tokens(token_ids)), dim=-1)
        out: torch.Tensor = nn.functional.silu(self.proj(both))
        return out


class ChainedHead(Speculator):
    """One for an engine. Drafts change how many tokens a step brings, never which."""

    checkpoint: ClassVar[Literal["draft"]] = "draft"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        """Whether a folder in `speculative_config.model` is such a head."""
        return 2 * (config.get("architectures") == [ARCHITECTURE])

    @classmethod
    def overrides(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the engine reads of every config.json, and this one has not."""
        return {
            "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }  # fmt: skip

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        """Called once, with the loaded target. Raise ConfigError for one that does not fit."""
        assert site.draft_config is not None, "it has a checkpoint"
        return SpeculatorNeeds(model=site.load(site.draft_config, Head), hidden=True)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self.head: Any = setup.model
        self.num_drafts = setup.num_drafts
        self.vocab_size = setup.vocab_size

    def propose(self, tokens: KnownTokens) -> Drafts:
        """R rows → drafts [R, num_drafts] and how many of them count [R], all on the device"""
        assert tokens.hidden is not None, "it is needed"
        assert tokens.rows is not None, "the engine samples"
        hidden = tokens.hidden
        newest = tokens.history[tokens.slots, tokens.lengths - 1].long()
        drafts: list[torch.Tensor] = []
        for number in range(self.num_drafts):
            hidden = self.head(hidden, newest)
            logits = self.head.lm_head.logits(hidden)[:, : self.vocab_size]
            newest = tokens.rows.choose(logits, number)
            drafts.append(newest)
        counts = torch.full_like(tokens.lengths, self.num_drafts)
        return Drafts(torch.stack(drafts, dim=1), counts)
