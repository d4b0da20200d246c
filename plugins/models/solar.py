"""Solar Pro: Llama; some layers average their input with an earlier layer's."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.nn.context import ForwardContext
from ...core.protocols.field_kinds import INTEGERS, NUMBERS_OR_NULLS
from .blocks import BlockParts
from .decoder import CausalLM, Decoder

LISTS = ("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4")


class SolarDecoder(Decoder):
    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        hf: Any = parts.config.hf_config
        for name, least in (*dict.fromkeys(LISTS, 0).items(), ("bskcn_tv", 2)):
            value = getattr(hf, name, None)
            if value is None or None in value or len(value) < least:
                raise ConfigError(f"{name}: {value} is no list of {least} or more", param=name)
        self.keeps = (hf.bskcn_1, hf.bskcn_2)
        """Two lists of layers whose input is kept."""
        self.mixes = (hf.bskcn_3, hf.bskcn_4)
        """Layers that average with the input last kept by the first list, and by the second."""
        self.share = float(hf.bskcn_tv[1])
        """Weight of the kept input in that mean."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.embed(input_ids, context.positions)
        if context.precompiling:
            for layer, rotary in self.unlike_layers():
                hidden = layer(hidden, rotary, context)
            return hidden
        kept = [hidden, hidden]
        for number, (layer, rotary) in enumerate(self.stage_layers()):
            for index, numbers in enumerate(self.keeps):
                if number in numbers:
                    kept[index] = hidden.clone()
            for index, numbers in enumerate(self.mixes):
                if number in numbers:
                    hidden = torch.lerp(hidden, kept[index], self.share)
            hidden = layer(hidden, rotary, context)
        return hidden


class SolarForCausalLM(CausalLM):
    config_fields = dict.fromkeys(LISTS, INTEGERS) | {"bskcn_tv": NUMBERS_OR_NULLS}
    decoder = SolarDecoder
