"""Recordings of any length come out whole, with the times at which it was said."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.audio.files import AudioFile
from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols.audio import SpeechTokens
from jackfield.core.sampling_params import SamplingParams
from jackfield.entrypoints.openai.audio.transcriber import (
    Heard,
    Segment,
    Task,
    Transcriber,
    compression_ratio,
)

RATE, WINDOW = 1000, 30
"""Samples per second, seconds."""
END, START, PREVIOUS, NO_SPEECH, NO_TIMES, FIRST_TIME = 500, 501, 502, 503, 504, 505
TOKENS = SpeechTokens(
    start=START, end=END, no_timestamps=NO_TIMES, first_time=FIRST_TIME, seconds_per_time=0.02,
    previous=PREVIOUS, no_speech=NO_SPEECH,
)  # fmt: skip
Span = tuple[float, float, tuple[int, ...]]
"""Start, end, words."""


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def times(*seconds: float) -> list[int]:
    return [FIRST_TIME + round(each / 0.02) for each in seconds]


class Listener:
    """A perfect model of speech: each sample says at which second it stands, and it knows what is
    said when."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.prompts: list[list[int]] = []
        self.temperatures: list[float] = []

    async def listen(self, samples: np.ndarray) -> Any:
        return float(samples[0]), len(samples) / RATE

    async def write(
        self, window: Any, prompt_token_ids: list[int], params: SamplingParams
    ) -> Heard:
        begin, length = window
        if params.allowed_token_ids == (NO_SPEECH,):
            return Heard([NO_SPEECH], [-5.0])
        self.prompts.append(prompt_token_ids)
        self.temperatures.append(params.temperature)
        out: list[int] = []
        for start, end, words in self.spans:
            if end <= begin + 0.01 or start >= begin + length - 0.01:
                continue
            out += times(max(start - begin, 0))
            if end <= begin + length:
                out += [*words, *times(end - begin)]
            else:
                out += words[: len(words) // 2]  # Cut off.
                break
        else:
            later = any(start < begin + length < end for start, end, _ in self.spans)
            assert not later
        if prompt_token_ids[-1] == NO_TIMES:
            out = [token for token in out if token < END]
        return Heard([*out, END], [-0.1] * (len(out) + 1))

    def text(self, token_ids: Sequence[int]) -> str:
        assert all(token < END for token in token_ids)
        return "".join(f" w{token}" for token in token_ids)


def recorded(seconds: float) -> AudioFile:
    """A recording whose samples are their own times."""
    return AudioFile(wav(np.arange(round(seconds * RATE), dtype=np.float32) / RATE), RATE)


async def transcribed(listener: Any, seconds: float, **task: Any) -> list[Segment]:
    transcriber = Transcriber(recorded(seconds), listener, Task(TOKENS, **task), WINDOW * RATE, 448)
    segments = [each async for window in transcriber.segments() for each in window]
    assert transcriber.seconds == pytest.approx(seconds, abs=1 / RATE)
    return segments


@st.composite
def speech(draw: st.DrawFn) -> tuple[list[Span], float]:
    spans, at, word = [], 0.0, 0
    for _ in range(draw(st.integers(0, 12))):
        start = at + draw(st.integers(0, 400)) * 0.02
        end = start + draw(st.integers(50, 900)) * 0.02
        words = tuple(range(word, word + draw(st.integers(2, 9))))
        spans.append((start, end, words))
        at, word = end, words[-1] + 1
    return spans, at + draw(st.integers(1, 2000)) * 0.02


@settings(max_examples=150, deadline=None)
@given(speech())
def test_what_is_said_comes_out_once_at_its_time(drawn: tuple[list[Span], float]) -> None:
    import asyncio

    spans, seconds = drawn
    listener = Listener(spans)
    segments = asyncio.run(transcribed(listener, seconds))
    assert [segment.token_ids for segment in segments] == [words for _, _, words in spans]
    for segment, (start, end, _) in zip(segments, spans, strict=True):
        assert segment.start == pytest.approx(start, abs=0.05)
        assert segment.end == pytest.approx(end, abs=0.05)
    assert [segment.id for segment in segments] == list(range(len(segments)))
    assert len(listener.prompts) <= 3 * (seconds / WINDOW + 1) + len(spans)


async def test_the_text_before_is_read() -> None:
    spans = [(1.0, 20.0, (1, 2, 3)), (25.0, 40.0, (4, 5)), (41.0, 50.0, (6, 7))]
    listener = Listener(spans)
    segments = await transcribed(listener, 55.0, prompt_token_ids=(9, 8))
    assert [each.token_ids for each in segments] == [(1, 2, 3), (4, 5), (6, 7)]
    assert listener.prompts[0] == [PREVIOUS, 9, 8, START]
    assert listener.prompts[1] == [PREVIOUS, 9, 8, 1, 2, 3, START]


async def test_a_short_recording_needs_no_times_if_nobody_asks_for_them() -> None:
    listener = Listener([(1.0, 5.0, (1, 2))])
    [segment] = await transcribed(listener, 7.0, times=False)
    assert listener.prompts == [[START, NO_TIMES]]
    assert (segment.token_ids, segment.start, segment.end) == ((1, 2), 0.0, 7.0)


class Stubborn(Listener):
    """Repeats itself at low temperatures."""

    async def write(self, window: Any, prompt_token_ids: list[int], params: Any) -> Heard:
        heard = await super().write(window, prompt_token_ids, params)
        if params.allowed_token_ids or params.temperature > 0.5:
            return heard
        return Heard([FIRST_TIME, *[7] * 200, END], [-0.1] * 202)


async def test_a_text_that_repeats_itself_is_sampled_warmer() -> None:
    """And not read before the next window."""
    listener = Stubborn([(1.0, 29.0, (1, 2)), (31.0, 40.0, (3,) * 2)])
    segments = await transcribed(listener, 45.0)
    assert [each.token_ids for each in segments] == [(1, 2), (3, 3)]
    assert listener.temperatures[:4] == [0.0, 0.2, 0.4, 0.6] and segments[0].temperature == 0.6
    assert listener.prompts[4] == [START]
    assert compression_ratio(" w7" * 200) > 2.4
    listener = Stubborn([(1.0, 29.0, (1, 2))])
    [segment] = await transcribed(listener, 29.5, temperatures=(0.3,))
    assert listener.temperatures == [0.3] and segment.token_ids == (7,) * 200


class Silence(Listener):
    """Makes something up where nobody speaks."""

    async def write(self, window: Any, prompt_token_ids: list[int], params: Any) -> Heard:
        if params.allowed_token_ids:
            return Heard([NO_SPEECH], [-0.01])
        return Heard([FIRST_TIME, 1, *times(2.0), END], [-3.0] * 4)


async def test_windows_without_speech_have_no_text() -> None:
    listener = Silence([])
    assert await transcribed(listener, 70.0) == []
    assert len(listener.prompts) == 0


class Detecting(Listener):
    async def write(self, window: Any, prompt_token_ids: list[int], params: Any) -> Heard:
        if params.allowed_token_ids == (601, 602):
            assert prompt_token_ids == [START]
            return Heard([602], [])
        return await super().write(window, prompt_token_ids, params)


async def test_a_language_is_detected_once_and_told() -> None:
    import dataclasses

    tokens = dataclasses.replace(
        TOKENS, languages={"en": 601, "de": 602}, transcribe=611, translate=612
    )
    for translate, task in ((False, 611), (True, 612)):
        listener = Detecting([(1.0, 29.0, (1, 2)), (31.0, 40.0, (3,))])
        transcriber = Transcriber(
            recorded(45.0), listener, Task(tokens, translate=translate), WINDOW * RATE, 448
        )
        async for _ in transcriber.segments():
            assert transcriber.language == "de"
        assert listener.prompts[0] == [START, 602, task]
        assert listener.prompts[1][-3:] == [START, 602, task]


def test_files_are_read_in_pieces_at_the_models_rate() -> None:
    """Channels are averaged; windows of any size are those of the whole."""
    draw = np.random.RandomState(3)
    sound = np.cumsum(draw.randn(150_000, 2), axis=0) / 300
    sound = np.clip(sound, -0.9, 0.9).astype(np.float32)
    want = sound.mean(axis=1)
    file = AudioFile(wav(sound, 8000), 8000)
    at = 0
    for size in (10, 70_000, 1, 0, 60_000, 100_000):
        piece = file.window(at, size)
        np.testing.assert_allclose(piece, want[at : at + size], atol=1e-6)
        at += len(piece)
    assert at == file.num_samples == len(want)
    halved = AudioFile(wav(sound, 16_000), 8000)
    assert len(halved.window(0, 1 << 20)) == pytest.approx(75_000, abs=2)


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\x00" * 999, b"<html>", b"ID3" + b"\xff" * 99])
def test_what_is_no_recording_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="file") as caught:
        AudioFile(data, 16_000).window(0, 100)
    assert caught.value.param == "file"


@pytest.mark.parametrize("cut", [50, 1000, 40_000])
def test_a_file_that_ends_early_is_read_to_its_end_or_refused(cut: int) -> None:
    data = wav(np.zeros(20_000, dtype=np.float32))[:cut]
    try:
        samples = AudioFile(data, RATE).window(0, 30_000)
    except InvalidRequest as error:
        assert error.param == "file"
    else:
        assert len(samples) <= 20_000


def test_numbers_that_are_no_sound_are_refused() -> None:
    samples = np.zeros(2000, dtype=np.float32)
    samples[1500] = np.nan
    with pytest.raises(InvalidRequest, match="no numbers"):
        AudioFile(wav(samples), RATE).window(0, 2000)
