"""Speculators whose model reads the target's last hidden state, and has a part for each draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...core.config.speculative_config import FIELD
from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.protocols.speculators import (
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)


class StateParts(Speculator):
    checkpoint: ClassVar[Literal["draft"]] = "draft"
    module: ClassVar[type[nn.Module]]
    parts: ClassVar[str]
    """What the checkpoint has one of for each draft."""

    @classmethod
    @abstractmethod
    def num_parts(cls, config: Mapping[str, Any]) -> int:
        """Return how many a config.json says that its checkpoint has; 0: it does not say."""

    @classmethod
    def default_drafts(cls, config: Mapping[str, Any]) -> int | None:
        return cls.num_parts(config) or None

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        config = fitting(site)
        count = cls.num_parts(config.hf_config.to_dict())
        if site.num_drafts > count:
            raise ConfigError(
                f"{FIELD}: num_speculative_tokens is {site.num_drafts}, and {config.path} has "
                f"{count} {cls.parts}, one for each draft",
                param=FIELD,
            )
        return SpeculatorNeeds(model=site.load(config, cls.module), hidden=True)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._model: Any = setup.model
        self._num_drafts = setup.num_drafts
        self._vocab_size = setup.vocab_size

    def propose(self, tokens: KnownTokens) -> Drafts:
        assert tokens.hidden is not None, "it is needed"
        assert tokens.rows is not None, "the engine samples"
        states = self._model.begin(tokens.hidden)
        newest = tokens.history[tokens.slots, tokens.lengths - 1].long()
        drafts: list[torch.Tensor] = []
        for number in range(self._num_drafts):
            states, logits = self._model(number, states, newest)
            newest = tokens.rows.choose(logits[:, : self._vocab_size], number)
            drafts.append(newest)
        counts = torch.full_like(tokens.lengths, self._num_drafts)
        return Drafts(torch.stack(drafts, dim=1), counts)


def fitting(site: DraftSite) -> ModelConfig:
    """Return the configuration of heads that read the target's states. Raises ConfigError."""
    config, target = site.draft_config, site.target_config
    assert config is not None, "it has a checkpoint"
    for name in ("hidden_size", "vocab_size"):
        own, others = getattr(config, name), getattr(target, name)
        if own != others:
            raise ConfigError(
                f"{FIELD}: {name} is {own} in {config.path}, and {others} in the served model",
                param=FIELD,
            )
    return replace(config, max_model_len=target.max_model_len)
