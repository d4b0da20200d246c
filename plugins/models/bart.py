"""BART, mBART: learned positions from row 2 on, a norm of the embeddings."""

from __future__ import annotations

from .encoder_decoder import EncoderDecoderLM


class BartForConditionalGeneration(EncoderDecoderLM):
    """Norms after sums."""


class MBartForConditionalGeneration(EncoderDecoderLM):
    """Norms before attention and MLP."""

    norm_first = True
