"""Nemotron, Jais 2 and Arcee: Llama with an MLP without a gate (squared relu). The first two have
layer norms with biases; Nemotron's hold factors minus one."""

from __future__ import annotations

from ...core.loading.weight_map import WeightMap
from .blocks import Block
from .decoder import QKV_SHARDS, CausalLM, Decoder, HeadlessLM
from .parts import LayerNormDecoder, OffsetLayerNorm, plain_mlp


class ArceeForCausalLM(CausalLM):
    weight_map = WeightMap(stacked=QKV_SHARDS, tied=HeadlessLM.weight_map.tied)

    mlp = staticmethod(plain_mlp)


class NemotronBlock(Block):
    norm = OffsetLayerNorm


class NemotronDecoder(Decoder):
    block = NemotronBlock


class NemotronForCausalLM(ArceeForCausalLM):
    decoder = NemotronDecoder


class Jais2ForCausalLM(ArceeForCausalLM):
    decoder = LayerNormDecoder
