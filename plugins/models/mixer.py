"""Common parts of models with state layers, alone or beside attention."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from .blocks import Block, BlockParts
from .decoder import Decoder


class MixerBlock(nn.Module):
    """hidden + mixer(norm(hidden))."""

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__()
        self.norm = self.make_norm(parts.config.hf_config, parts.build)
        self.mixer = self.make_mixer(parts, layer)

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return RMSNorm(hf.hidden_size, float(hf.layer_norm_epsilon), build)

    @abstractmethod
    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        """Create the layer's mixer, which is called as `SelfAttention` is."""

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        out: torch.Tensor = self.mixer(hidden, self.norm, rotary, context)
        return out


class MixerDecoder(Decoder):
    mixer_block: ClassVar[type[MixerBlock]]

    @classmethod
    def block_of(cls, config: ModelConfig) -> Any:
        return cls.mixer_block

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary | None]:
        return [None] * config.num_layers


class HybridBlock(Block):
    """A mixer (attention, or one with a state) and an MLP, each after a norm."""

    state_name: ClassVar[str] = "mamba"
    """Checkpoints' name of a mixer with a state."""
    mlp_name: ClassVar[str] = "mlp"
    """Name of the MLP here."""

    def __init__(self, parts: BlockParts, layer: int) -> None:
        nn.Module.__init__(self)
        hf = parts.config.hf_config
        for name in self.norms:
            setattr(self, name, self.make_norm(hf, parts.build))
        if self.attends(hf, layer):
            self.self_attn = parts.make_attention(layer)
        else:
            setattr(self, self.state_name, self.make_mixer(parts, layer))
        setattr(self, self.mlp_name, parts.make_mlp(layer))

    @staticmethod
    def attends(hf: Any, layer: int) -> bool:
        """Return whether the layer's mixer is attention."""
        return bool(hf.layer_types[layer] == "full_attention")

    @abstractmethod
    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        """Create a mixer with a state, called as `SelfAttention` is."""

    @property
    def mixer(self) -> nn.Module:
        mixer: nn.Module = getattr(self, self.state_name, None) or self.self_attn
        return mixer

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.mixer(hidden, getattr(self, self.norms[0]), rotary, context)
        out: torch.Tensor = self.mlp(hidden, getattr(self, self.norms[1]))
        return out
