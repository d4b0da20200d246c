"""OLMo 3: OLMo 2 with a sliding window in most layers, with their own rotary parameters."""

from __future__ import annotations

from .decoder import CausalLM, DecoderClassifier, HeadlessLM, rotaries_by_type
from .olmo2 import Olmo2Attention, Olmo2Decoder
from .windows import WindowedAttention


class Olmo3Attention(WindowedAttention, Olmo2Attention):
    """As OLMo 2's, with windows."""


class Olmo3Decoder(Olmo2Decoder):
    """Applies rope scaling for long contexts only to layers without a window."""

    rotaries_of = staticmethod(rotaries_by_type)


class Olmo3ForCausalLM(CausalLM):
    attention = Olmo3Attention
    decoder = Olmo3Decoder


class Olmo3Model(HeadlessLM):
    attention = Olmo3Attention
    decoder = Olmo3Decoder


class Olmo3ForSequenceClassification(DecoderClassifier):
    attention = Olmo3Attention
    decoder = Olmo3Decoder
