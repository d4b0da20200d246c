"""What a server's model does with speech: an encoder-decoder of speech, or a model of chats that is
asked to write recordings down."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ....core.audio.files import Recording
from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest, NotFound
from ....core.protocols.audio import AudioSource, SpeechChat, SpeechTokens
from ....core.sampling_params import SamplingParams
from ...http.auth.origin import Origin
from ...http.context import tokenizer_of
from .chat_transcriber import ChatTask, ChatTranscriber
from .engine_decoder import EngineDecoder
from .transcriber import TEMPERATURES, Task, Transcriber


@dataclass(frozen=True)
class SpeechOptions:
    """What a request wants of a recording."""

    language: str | None = None
    translate: bool = False
    prompt: str = ""
    """Text that comes before."""
    temperature: float = 0.0
    params: SamplingParams = field(default_factory=SamplingParams)
    """What else sampling depends on."""
    form: str = "json"
    times: bool = False
    """Whether the form has times."""
    words: bool = False
    """Whether words have them."""


class Transcription(Protocol):
    """One recording, while it is written down."""

    @property
    def seconds(self) -> float:
        """Return the length of what was read so far: of all, once the text has ended."""

    def deltas(self) -> AsyncGenerator[str]:
        """Yield the text, piece by piece. Raises InvalidRequest for a damaged file."""


class Speech(ABC):
    """A server's model of speech."""

    sampling_rate: int
    """Samples per second of what it reads."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @abstractmethod
    def named(self, language: str | None) -> str | None:
        """Return the language's name among the model's; None: it takes none. Raises
        InvalidRequest."""

    @abstractmethod
    def check(self, options: SpeechOptions) -> None:
        """Raise InvalidRequest for what the model does not do."""

    @abstractmethod
    def transcription(
        self, file: Recording, options: SpeechOptions, origin: Origin
    ) -> Transcription:
        """Return what writes a recording down, with checked options."""


class DecoderSpeech(Speech):
    """An encoder-decoder of speech."""

    def __init__(self, engine: AsyncEngine, audio: AudioSource, tokens: SpeechTokens) -> None:
        super().__init__(engine)
        self._audio, self._tokens = audio, tokens
        self.sampling_rate = audio.sampling_rate

    def named(self, language: str | None) -> str | None:
        languages = self._tokens.languages
        if not languages and language == "en":
            return None
        if not languages and language is not None:
            raise InvalidRequest("language: this model knows English alone", param="language")
        return _among(languages, language)

    def check(self, options: SpeechOptions) -> None:
        self.named(options.language)
        if options.translate and self._tokens.translate is None:
            raise InvalidRequest("model: this model does not translate", param="model")
        reason = None
        if options.words and not self._tokens.alignment_heads:
            reason = "this model's generation_config.json has no alignment_heads"
        elif options.words and self._engine.config.tensor_parallel_size > 1:
            reason = "times of words are not made where ranks divide the model"
        if reason is not None:
            raise InvalidRequest(
                f"timestamp_granularities: {reason}; ask for segment",
                param="timestamp_granularities",
            )

    def transcription(self, file: Recording, options: SpeechOptions, origin: Origin) -> Transcriber:
        engine = self._engine
        before: list[int] = []
        if text := options.prompt.strip():
            tokenizer = tokenizer_of(engine)
            before = tokenizer.encode(f" {text}", add_special_tokens=False, allow_special=False)
        temperature = options.temperature
        task = Task(
            tokens=self._tokens, language=self.named(options.language),
            translate=options.translate, prompt_token_ids=tuple(before),
            temperatures=(temperature,) if temperature else TEMPERATURES,
            params=options.params, times=options.times, words=options.words,
        )  # fmt: skip
        decoder = EngineDecoder(engine, self._audio, self._tokens, origin)
        longest = engine.model_config.max_model_len
        return Transcriber(file, decoder, task, self._audio.max_samples, longest)


class ChatSpeech(Speech):
    """A model of chats."""

    def __init__(self, engine: AsyncEngine, chat: SpeechChat) -> None:
        super().__init__(engine)
        self._chat = chat
        self.sampling_rate = chat.sampling_rate

    def named(self, language: str | None) -> str | None:
        if self._chat.languages:
            return _among(self._chat.languages, language)
        if language is not None and not re.fullmatch("[a-z]{2,3}", language):
            raise InvalidRequest(
                f"language: must be a code of ISO 639-1, got {language[:40]!r}", param="language"
            )
        return None

    def check(self, options: SpeechOptions) -> None:
        self.named(options.language)
        if options.translate and self._chat.translation is None:
            raise InvalidRequest("model: this model does not translate", param="model")
        if options.times:
            raise InvalidRequest(
                f"response_format: {options.form} has times, and this model writes none; use json "
                "or text",
                param="response_format",
            )
        if options.prompt.strip() and not self._chat.takes_text:
            raise InvalidRequest(
                "prompt: this model reads no text before a recording; leave it out", param="prompt"
            )

    def transcription(
        self, file: Recording, options: SpeechOptions, origin: Origin
    ) -> ChatTranscriber:
        params = msgspec.structs.replace(options.params, temperature=options.temperature)
        task = ChatTask(
            self._chat, self.named(options.language), options.translate, options.prompt.strip(),
            params,
        )  # fmt: skip
        return ChatTranscriber(file, self._engine, origin, task)


def speech_of(engine: AsyncEngine) -> Speech:
    """Return what the model does with speech. Raises NotFound if it does not write speech down."""
    config = engine.model_config
    audio = None if config.source is None else config.source.audio
    if audio is not None and audio.speech is not None:
        return DecoderSpeech(engine, audio, audio.speech)
    if config.media is not None and config.media.speech is not None:
        return ChatSpeech(engine, config.media.speech)
    raise NotFound(
        f"model: {engine.served_model_names[0]} does not write speech down; serve a model that "
        "does, such as Whisper"
    )


def _among(languages: Collection[str], language: str | None) -> str | None:
    if language is None or language in languages:
        return language
    names = ", ".join(sorted(languages))
    raise InvalidRequest(
        f"language: must be one of {names}, got {language[:40]!r}", param="language"
    )
