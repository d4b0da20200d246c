"""What media models share: a processor and an encoder, by class."""

from __future__ import annotations

from typing import ClassVar

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup, Spans
from .encoder import TransformersEncoder
from .processor import ImageProcessor


class Pictures:
    """A family that takes pictures. It sets two classes, and may refuse checkpoints."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    processor_class: ClassVar[type[ImageProcessor]]
    encoder_class: ClassVar[type[TransformersEncoder]] = TransformersEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        return None

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans | None:
        return None

    @classmethod
    def processor(cls, setup: MediaSetup) -> MediaProcessor:
        return cls.processor_class(setup)

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        return cls.encoder_class(setup, build)
