"""What media models share: processors and an encoder, by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from ...core.nn.context import BuildContext
from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup, Spans
from .encoder import TransformersEncoder
from .processor import ImageProcessor


class Family:
    """A family that takes media. It sets classes, and may refuse checkpoints."""

    modalities: ClassVar[tuple[str, ...]]
    processors: ClassVar[Mapping[str, Callable[[MediaSetup], MediaProcessor]]] = {}
    """By modality."""
    encoder_class: ClassVar[type[TransformersEncoder]] = TransformersEncoder
    speech_chat: ClassVar[SpeechChat | None] = None
    """How it is asked to write recordings down."""

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        return None

    @classmethod
    def present(cls, setup: MediaSetup) -> tuple[str, ...]:
        return cls.modalities

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans | None:
        return None

    @classmethod
    def speech(cls, setup: MediaSetup) -> SpeechChat | None:
        return cls.speech_chat

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str) -> MediaProcessor:
        return cls.processors[modality](setup)

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        return cls.encoder_class(setup, build)


class Pictures(Family):
    """A family that takes pictures alone."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    processor_class: ClassVar[type[ImageProcessor]]

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str = "image") -> MediaProcessor:
        return cls.processor_class(setup)
