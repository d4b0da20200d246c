"""ColQwen2 and ColQwen2.5: Qwen's towers; tokens have plain positions."""

from __future__ import annotations

import dataclasses

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup
from .qwen_vl import QwenEncoder, QwenPictures

TYPES = ("qwen2_vl", "qwen2_5_vl")


class ColQwenEncoder(QwenEncoder):
    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self.rope = None


class ColQwen(QwenPictures):
    encoder_class = ColQwenEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        own = setup.config.vlm_config
        if own.model_type not in TYPES:
            return (
                f"vlm_config has model_type {own.model_type!r}, and {' or '.join(TYPES)} is served"
            )
        return super().refusal(inner(setup))

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return super().processor(inner(setup), modality)

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        return super().encoder(inner(setup), build)


def inner(setup: MediaSetup) -> MediaSetup:
    return dataclasses.replace(setup, config=setup.config.vlm_config)
