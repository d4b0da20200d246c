"""Models that compare texts and pictures by the vectors of their tokens: the towers of others."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup
from .family import Pictures
from .paligemma import PaliGemma
from .qwen_vl import QwenEncoder, QwenPictures


class InVlmConfig(Pictures):
    """`vlm_config` is the configuration of the family that it is made of."""

    types: ClassVar[tuple[str, ...]]
    """Types of that configuration that are served."""

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        own = setup.config.vlm_config
        if own.model_type not in cls.types:
            return (
                f"vlm_config has model_type {own.model_type!r}, and {' or '.join(cls.types)} is "
                "served"
            )
        return super().refusal(inner(setup))

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return super().processor(inner(setup), modality)

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        return super().encoder(inner(setup), build)


class ColQwenEncoder(QwenEncoder):
    """Tokens have plain positions."""

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self.rope = None


class ColQwen(InVlmConfig, QwenPictures):
    """ColQwen2 and ColQwen2.5."""

    types = ("qwen2_vl", "qwen2_5_vl")
    encoder_class = ColQwenEncoder


class ColPali(InVlmConfig, PaliGemma):
    types = ("paligemma",)

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if (reason := super().refusal(setup)) is not None:
            return reason
        text = setup.config.vlm_config.text_config.model_type
        return None if text == "gemma" else f"its texts are of type {text!r}, and gemma is served"


def inner(setup: MediaSetup) -> MediaSetup:
    return dataclasses.replace(setup, config=setup.config.vlm_config)
