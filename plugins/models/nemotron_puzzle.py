"""Nemotron 3 Puzzle: Nemotron-H whose layers have sizes, and windows, of their own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from ...core.loading.model_config import ModelConfig
from .blocks import SelfAttention
from .mixer import MixerDecoder
from .nemotron_h import NemotronHBlock, NemotronHForCausalLM


class PuzzleAttention(SelfAttention):
    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        window: int | None = hf.sliding_window
        return window


class PuzzleBlock(NemotronHBlock):
    @staticmethod
    def own_config(config: ModelConfig, layer: int) -> ModelConfig:
        """The layer's `block_configs` override the common fields."""
        hf = copy.copy(config.hf_config)
        for name, value in hf.block_configs[layer].items():
            setattr(hf, name, value)
        return dataclasses.replace(config, hf_config=hf)

    @staticmethod
    def step_limits(hf: Any) -> tuple[float, float]:
        low, high = hf.time_step_limit
        return float(low), float(high)


class PuzzleDecoder(MixerDecoder):
    mixer_block = PuzzleBlock


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    attention = PuzzleAttention
    decoder = PuzzleDecoder
    weight_map = dataclasses.replace(
        NemotronHForCausalLM.weight_map,
        names={"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"},
        prefixes={"backbone.": "model."},
    )
