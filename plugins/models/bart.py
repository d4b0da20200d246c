"""BART and related families, which differ in the places of norms and in their positions."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from .encoder_decoder import (
    EncoderDecoderLM,
    LearnedPositions,
    SinusoidalFromTwo,
    SinusoidalPositions,
)


class BartForConditionalGeneration(EncoderDecoderLM):
    """Norms after sums, learned positions from row 2 on, a norm of the embeddings. PLBART, too."""


class MvpForConditionalGeneration(EncoderDecoderLM):
    """As BART, without its pre-training prompts."""

    @classmethod
    def check(cls, hf: Any) -> None:
        super().check(hf)
        if hf.use_prompt:
            raise ConfigError("use_prompt: true is not supported", param="use_prompt")


class MBartForConditionalGeneration(EncoderDecoderLM):
    """As BART, with norms before attention and MLP."""

    norm_first = True


class BlenderbotForConditionalGeneration(EncoderDecoderLM):
    """Norms first, but not of the embeddings."""

    norm_first = True
    norms_embeddings = False
    positions = LearnedPositions


class BlenderbotSmallForConditionalGeneration(EncoderDecoderLM):
    """Norms after sums; the decoder norms the words without positions."""

    decoder_norms_words = True
    positions = LearnedPositions


class PegasusForConditionalGeneration(EncoderDecoderLM):
    """Norms first, sinusoidal positions."""

    norm_first = True
    norms_embeddings = False
    positions = SinusoidalPositions


class M2M100ForConditionalGeneration(PegasusForConditionalGeneration):
    """M2M-100 and NLLB: other sinusoids, from position 2 on."""

    positions = SinusoidalFromTwo


class MarianMTModel(EncoderDecoderLM):
    """Norms after sums, sinusoidal positions."""

    norms_embeddings = False
    positions = SinusoidalPositions

    @classmethod
    def check(cls, hf: Any) -> None:
        super().check(hf)
        if not hf.share_encoder_decoder_embeddings:
            raise ConfigError(
                "share_encoder_decoder_embeddings: false is not supported",
                param="share_encoder_decoder_embeddings",
            )
