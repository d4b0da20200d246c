"""Speech of any length into segments of text, window by window.

A window begins where the last segment that is certain to be whole has ended, by the model's own
times, and its decoder has read the text before it. A text that repeats itself or is improbable is
sampled again at a higher temperature; windows without speech are skipped. Thresholds are those of
Whisper's published code (arXiv 2212.04356, section 4.5).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from ....core.audio.files import Recording
from ....core.protocols.audio import SpeechTokens
from ....core.sampling_params import SamplingParams
from .word_times import Word, starts_of_tokens, words_of

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried one after the other, if a request sets none."""
MAX_COMPRESSION = 2.4
"""Text that zlib makes shorter than this repeats itself."""
MIN_LOGPROB = -1.0
"""Mean log-probability of a token below which a text is improbable."""
MAX_NO_SPEECH = 0.6
"""Probability above which an improbable text is none."""
FORGETS = 0.5
"""Temperature above which a text is not read before the next window."""
LEAST = 1.0
"""Seconds that a window is done with at least, whatever times the model writes."""
SHORTEST = 0.1
"""Seconds; what is left of a recording and shorter has no speech."""


class Heard(NamedTuple):
    """What a decoder has written."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Decoder(Protocol):
    """A model of speech."""

    async def listen(self, samples: np.ndarray) -> Any:
        """Return what `write` needs of a window, [num_samples] float32."""

    async def write(
        self, window: Any, prompt_token_ids: list[int], params: SamplingParams
    ) -> Heard:
        """Decode a window after a decoder's prompt."""

    async def attention(self, window: Any, token_ids: Sequence[int]) -> np.ndarray:
        """Return how the heads that align attend to a window while they read tokens: [heads,
        tokens, rows]"""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that are no special ones."""


@dataclass(frozen=True)
class Segment:
    """A piece of speech; times are seconds from the recording's start."""

    id: int
    seek: float
    """Where its window begins."""
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Task:
    """What is to be done with a recording."""

    tokens: SpeechTokens
    language: str | None = None
    """None: it is detected in the first window."""
    translate: bool = False
    prompt_token_ids: tuple[int, ...] = ()
    """Text that comes before."""
    temperatures: tuple[float, ...] = TEMPERATURES
    params: SamplingParams = field(default_factory=SamplingParams)
    """What else sampling depends on."""
    words: bool = False
    """Whether words have times."""
    times: bool = True
    """Whether segments have times. Without, a recording of one window is decoded without them."""


class _Attempt(NamedTuple):
    prompt: list[int]
    heard: Heard
    temperature: float
    avg_logprob: float
    compression_ratio: float


class Transcriber:
    """Transcribes one recording."""

    def __init__(
        self, file: Recording, decoder: Decoder, task: Task, max_samples: int, max_tokens: int
    ) -> None:
        """max_samples: of a window; max_tokens: of the decoder's prompt and text."""
        self._file, self._decoder, self._task = file, decoder, task
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self._rate = file.sampling_rate
        self._before = list(task.prompt_token_ids)
        self._num_segments = 0
        self.language = task.language
        """Known with the first segment."""
        self.words: list[Word] = []
        """Words of the segments so far, if the task requests them."""

    @property
    def seconds(self) -> float:
        """Return the length of what was read so far: of all, once the segments have ended."""
        return self._file.num_samples / self._rate

    async def deltas(self) -> AsyncGenerator[str]:
        """Yield the text of each window."""
        begun = False
        async with contextlib.aclosing(self.segments()) as windows:
            async for segments in windows:
                delta = "".join(segment.text for segment in segments)
                delta = delta if begun else delta.lstrip()
                if delta:
                    begun = True
                    yield delta

    async def segments(self) -> AsyncGenerator[list[Segment]]:
        """Yield the segments of each window. Raises InvalidRequest for a damaged file."""
        seek, first = 0, True
        while True:
            # One sample more tells whether this is the last window.
            samples = await asyncio.to_thread(self._file.window, seek, self._max_samples + 1)
            last = len(samples) <= self._max_samples
            samples = samples[: self._max_samples]
            if len(samples) < SHORTEST * self._rate and not (first and len(samples)):
                return
            window = await self._decoder.listen(samples)
            if self.language is None and self._task.tokens.languages:
                self.language = await self._detect(window)
            times = self._task.times or not (first and last)
            attempt, no_speech = await self._hear(window, times=times)
            if no_speech > MAX_NO_SPEECH and attempt.avg_logprob < MIN_LOGPROB:
                seek += len(samples)
            else:
                made, used = self._cut(attempt, seek, len(samples), no_speech, last=last)
                if self._task.words and made:
                    await self._time_words(window, attempt, made, seek, len(samples))
                seek += used
                if made:
                    yield made
                self._remember(attempt, made)
            if last and seek >= self._file.num_samples:
                return
            first = False

    # ------------------------------------------------------------ what is said

    async def _hear(self, window: Any, *, times: bool) -> tuple[_Attempt, float]:
        """Return the first attempt that is good enough, or the last; and the probability that
        nobody speaks."""
        silence = asyncio.create_task(self._no_speech(window))
        try:
            for temperature in self._task.temperatures:
                attempt = await self._attempt(window, temperature, times=times)
                improbable = attempt.avg_logprob < MIN_LOGPROB
                if attempt.compression_ratio <= MAX_COMPRESSION and not improbable:
                    break
                if improbable and await silence > MAX_NO_SPEECH:
                    break
            return attempt, await silence
        finally:
            silence.cancel()
            await asyncio.gather(silence, return_exceptions=True)

    async def _attempt(self, window: Any, temperature: float, *, times: bool) -> _Attempt:
        tokens = self._task.tokens
        most = self._max_tokens // 2
        prompt = self._begin(times=times)
        if tokens.previous is not None and self._before:
            prompt = [tokens.previous, *self._before[1 - most :], *prompt]
        params = msgspec.structs.replace(
            self._task.params, temperature=temperature,
            max_tokens=min(most, self._max_tokens - len(prompt)),
            min_tokens=1, logprobs=0, stop_token_ids=(tokens.end,),
            extra_args=dict(tokens.extra_args) if times else None,
        )  # fmt: skip
        heard = await self._decoder.write(window, prompt, params)
        text = self._decoder.text([token for token in heard.token_ids if token < tokens.end])
        mean = sum(heard.logprobs) / max(len(heard.logprobs), 1)
        return _Attempt(prompt, heard, temperature, mean, compression_ratio(text))

    def _begin(self, *, times: bool) -> list[int]:
        """Return the tokens that say what to do."""
        tokens, begin = self._task.tokens, [self._task.tokens.start]
        task = tokens.translate if self._task.translate else tokens.transcribe
        if self.language is not None and task is not None:
            begin += [tokens.languages[self.language], task]
        return begin if times else [*begin, tokens.no_timestamps]

    async def _detect(self, window: Any) -> str:
        """Return the most probable language."""
        tokens = self._task.tokens
        by_token = {token: name for name, token in tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=tuple(by_token), ignore_eos=True
        )
        heard = await self._decoder.write(window, [tokens.start], params)
        return by_token[heard.token_ids[0]]

    async def _no_speech(self, window: Any) -> float:
        """Return the probability that nobody speaks; 0.0 if the model does not tell."""
        tokens = self._task.tokens
        if tokens.no_speech is None:
            return 0.0
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=(tokens.no_speech,), ignore_eos=True,
            logprobs=0,
        )  # fmt: skip
        heard = await self._decoder.write(window, [tokens.start], params)
        return math.exp(heard.logprobs[0])

    # ------------------------------------------------------------ when it is said

    def _cut(
        self, attempt: _Attempt, seek: int, num_samples: int, no_speech: float, *, last: bool
    ) -> tuple[list[Segment], int]:
        """Return the window's segments, and how many of its samples are done with.

        A segment stands between two times. Text behind the last time may be cut off by the window's
        end, and is heard again from there in the next window; so is what follows two times in a
        row, while a single one at the end means that nobody speaks after it.
        """
        tokens, length = self._task.tokens, num_samples / self._rate
        spans: list[tuple[float, float, list[int]]] = []
        at, num_times = 0.0, 0
        text: list[int] = []
        for token in attempt.heard.token_ids:
            if token < tokens.end:
                text.append(token)
                num_times = 0
            elif token >= tokens.first_time:
                time = min((token - tokens.first_time) * tokens.seconds_per_time, length)
                if text:
                    spans.append((min(at, time), time, text))
                    text = []
                at, num_times = time, num_times + 1
        used = num_samples
        if text and (last or not spans):
            spans.append((min(at, length), length, text))
        elif (text or num_times > 1) and spans:
            used = min(max(int(at * self._rate), int(LEAST * self._rate)), num_samples)
        begin = seek / self._rate
        segments = []
        for start, end, ids in spans:
            if not (said := self._decoder.text(ids)).strip():
                continue
            segments.append(
                Segment(
                    self._num_segments, begin, begin + start, begin + end, said, tuple(ids),
                    attempt.temperature, attempt.avg_logprob, attempt.compression_ratio, no_speech,
                )
            )  # fmt: skip
            self._num_segments += 1
        return segments, used

    async def _time_words(
        self, window: Any, attempt: _Attempt, segments: list[Segment], seek: int, num_samples: int
    ) -> None:
        """Add the words of a window's segments."""
        tokens = self._task.tokens
        ids = [token for token in attempt.heard.token_ids if token != tokens.end]
        weights = await self._decoder.attention(window, [*attempt.prompt, *ids])
        rows = max(1, num_samples * weights.shape[2] // self._max_samples)
        own = weights[:, len(attempt.prompt) :, :rows]
        firsts = await asyncio.to_thread(starts_of_tokens, own, tokens.median_width)
        starts = [seek / self._rate + first * tokens.seconds_per_time for first in firsts.tolist()]
        ends = [*starts[1:], starts[-1]]
        spans = zip(ids, zip(starts, ends, strict=True), strict=True)
        said = [(token, span) for token, span in spans if token < tokens.end]
        # Of text behind the last time, which is heard again, there is no segment.
        count = sum(len(segment.token_ids) for segment in segments)
        said = said[:count]
        self.words += words_of(
            [token for token, _ in said], [span for _, span in said], self._decoder.text,
            self.language,
        )  # fmt: skip

    def _remember(self, attempt: _Attempt, segments: list[Segment]) -> None:
        if attempt.temperature > FORGETS:
            self._before = []
            return
        for segment in segments:
            self._before += segment.token_ids
        del self._before[: -self._max_tokens]


def compression_ratio(text: str) -> float:
    """Return how many times as long a text is as zlib makes it."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
