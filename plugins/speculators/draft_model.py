"""Drafts of a smaller model, which generates them token by token.

It reads the same tokens as the target, so it must have the same vocabulary. It samples with the
target's noise at each position: where both models agree on a distribution, they choose the same
token. (Leviathan, Kalman, Matias 2023; names are vLLM's.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.protocols.speculators import (
    ComputedTokens,
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)


class DraftModel(Speculator):
    checkpoint: ClassVar[Literal["draft"]] = "draft"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> int:
        """Any model may draft."""
        return 1 if config.get("architectures") else 0

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        draft, target = site.draft_config, site.target_config
        assert draft is not None, "it has a checkpoint"
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{FIELD}: the model {draft.path} has {draft.vocab_size} tokens, and the served "
                f"one {target.vocab_size}: drafts are token ids, so both need one vocabulary",
                param=FIELD,
            )
        return SpeculatorNeeds(model=site.load(draft), longest=draft.max_model_len)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._model: Any = setup.model
        self._num_drafts = setup.num_drafts
        self._vocab_size = setup.vocab_size

    def observe(self, step: ComputedTokens) -> None:
        self._model(step.token_ids, step.context)

    def propose(self, tokens: KnownTokens) -> Drafts:
        rows = tokens.rows
        assert rows is not None, "the engine runs its model"
        newest = tokens.history[tokens.slots, tokens.lengths - 1].long()
        drafts: list[torch.Tensor] = []
        for number in range(self._num_drafts):
            hidden = self._model(newest, rows.context(number))
            logits = self._model.compute_logits(hidden)[:, : self._vocab_size]
            newest = rows.choose(logits, number)
            drafts.append(newest)
        counts = torch.full_like(tokens.lengths, self._num_drafts)
        return Drafts(torch.stack(drafts, dim=1), counts)
