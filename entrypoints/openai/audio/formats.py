"""The forms of a transcription."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .transcriber import Segment
from .word_times import Word


def subtitles(segments: Sequence[Segment], form: str) -> str:
    """Return subtitles: form "srt" or "vtt" (WebVTT)."""
    mark = "," if form == "srt" else "."
    pieces = [] if form == "srt" else ["WEBVTT\n"]
    for number, segment in enumerate(segments, 1):
        head = f"{number}\n" if form == "srt" else ""
        span = f"{_clock(segment.start, mark)} --> {_clock(segment.end, mark)}"
        # An arrow would end a cue's text.
        text = segment.text.strip().replace("-->", "->")
        pieces.append(f"{head}{span}\n{text}\n")
    return "\n".join(pieces) + ("\n" if pieces else "")


def _clock(seconds: float, mark: str) -> str:
    """1.5 → 00:00:01,500"""
    whole = round(seconds * 1000)
    minutes, millis = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{millis // 1000:02d}{mark}{millis % 1000:03d}"


def verbose(segment: Segment) -> dict[str, Any]:
    """Return a segment as `verbose_json` has it."""
    return {
        "id": segment.id,
        "seek": round(segment.seek * 100),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def timed(word: Word) -> dict[str, Any]:
    """Return a word as `verbose_json` has it."""
    return {"word": word.word, "start": round(word.start, 3), "end": round(word.end, 3)}


def joined(segments: Sequence[Segment]) -> str:
    """Return the whole text."""
    return "".join(segment.text for segment in segments).strip()
