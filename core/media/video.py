"""Decodes videos within bounds, in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidRequest
from ..protocols.media import Sampling, Video
from .audio import MAX_SECONDS
from .fetch import MAX_BYTES
from .images import MAX_PIXELS, MAX_RATIO

MAX_FRAMES = 768
"""Most frames that are taken from a video."""
MAX_SOURCE_FRAMES = 1 << 17
"""Most frames of a video: more than an hour at 30 per second."""
MAX_VIDEO_PIXELS = 1 << 28
"""Most pixels of all frames that are taken: 768 MiB decoded."""
PROCESSES = 2
"""Processes that decode at once."""
DECODE_SECONDS = 30
"""Most seconds of a process, and of its CPU time."""
DECODE_MEMORY = 3 << 30
"""Bytes of addresses of a process."""
_decoding = threading.Semaphore(PROCESSES)
GIVEN_FPS = 24.0
"""Of frames that callers give without it, as `transformers` has it."""


class Head(msgspec.Struct, frozen=True):
    """What a process says of a video."""

    width: int
    height: int
    total: int
    fps: float


def decode_video(
    value: Any, sampling: Sampling, field: str, sound_rate: int | None = None
) -> Video:
    """Return the chosen frames of a video's bytes, of a file that the caller names by a Path, or
    all of an array or a list of pictures; of files with the sound, at a rate. Raises
    InvalidRequest."""
    if isinstance(value, os.PathLike):
        value = _file(Path(value), field)
    if isinstance(value, bytes | bytearray | memoryview):
        with _decoding:
            return _decoded(bytes(value), sampling, field, sound_rate)
    return _given(value, field)


def _file(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"{field}: more than {MAX_BYTES >> 20} MiB", param=field)
    return data


def _given(value: Any, field: str) -> Video:
    fps = GIVEN_FPS
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float):
        value, fps = value
    try:
        if isinstance(value, list | tuple):
            value = [np.asarray(each.convert("RGB")) for each in value]
        frames = np.asarray(value)
    except (AttributeError, TypeError, ValueError):
        frames = np.zeros(0)
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise InvalidRequest(
            f"{field}: must be a URL, a Path, bytes, a list of pictures of one size, or an array "
            "uint8 of [frames, height, width, 3], perhaps with frames per second: (frames, fps)",
            param=field,
        )
    if not 0 < fps <= 1000:
        raise InvalidRequest(f"{field}: {fps:g} frames per second", param=field)
    count, height, width, _ = frames.shape
    _check(Head(width, height, count, float(fps)), count, field)
    return Video(np.ascontiguousarray(frames), tuple(range(count)), float(fps), count)


def _check(head: Head, count: int, field: str) -> None:
    """Raise InvalidRequest for so many frames of a video."""
    longer, shorter = max(head.width, head.height), min(head.width, head.height)
    reason = None
    if count > MAX_FRAMES:
        reason = f"{count} frames, of which at most {MAX_FRAMES} are read"
    elif count * head.width * head.height > MAX_VIDEO_PIXELS:
        reason = (
            f"{count} frames of {head.width} x {head.height} pixels, more than the "
            f"{MAX_VIDEO_PIXELS} that are read; send a smaller video, or start the server with "
            "fewer frames (media_io_kwargs)"
        )
    elif longer > MAX_RATIO * shorter:
        reason = f"{head.width} x {head.height} pixels, which is too narrow"
    if reason is not None:
        raise InvalidRequest(f"{field}: the video has {reason}", param=field)


def _decoded(data: bytes, sampling: Sampling, field: str, sound_rate: int | None) -> Video:
    limits = {
        "seconds": DECODE_SECONDS, "memory": DECODE_MEMORY, "frames": MAX_SOURCE_FRAMES,
        "pixels": MAX_PIXELS, "sound_rate": sound_rate or 0,
        "samples": MAX_SECONDS * (sound_rate or 0),
    }  # fmt: skip
    child = Path(__file__).with_name("video_process.py")
    process = subprocess.Popen(
        [sys.executable, "-I", str(child), json.dumps(limits)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={},
    )  # fmt: skip
    timer = threading.Timer(DECODE_SECONDS, process.kill)
    timer.start()
    try:
        video = _exchange(process, data, sampling, field)
    finally:
        timer.cancel()
        process.kill()
        _, words = process.communicate()
    if video is not None:
        return video
    reason = words.decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode < 0:
        reason = f"decoding it takes more than {DECODE_SECONDS} seconds, or ends the decoder"
    raise InvalidRequest(f"{field}: the video cannot be used: {reason[:300]}", param=field)


def _exchange(
    process: subprocess.Popen[bytes], data: bytes, sampling: Sampling, field: str
) -> Video | None:
    """Return what a process has decoded; None: it has ended before."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, msgspec.DecodeError, msgspec.ValidationError):
        process.stdin.write(len(data).to_bytes(8, "big"))
        process.stdin.write(data)
        process.stdin.flush()
        head = msgspec.json.decode(process.stdout.readline(1 << 12), type=Head)
        indices = sampling.indices(head.total, head.fps, MAX_FRAMES)
        _check(head, len(indices), field)
        process.stdin.write(json.dumps(indices).encode() + b"\n")
        process.stdin.flush()
        shape = (len(indices), head.height, head.width, 3)
        pixels = process.stdout.read(int(np.prod(shape)))
        if len(pixels) == np.prod(shape):
            frames = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
            head_of_sound = process.stdout.read(8)
            count = int.from_bytes(head_of_sound, "big")
            samples = process.stdout.read(4 * count)
            if len(head_of_sound) == 8 and len(samples) == 4 * count:
                sound = np.frombuffer(samples, dtype="<f4") if count else None
                return Video(frames, tuple(indices), head.fps, head.total, sound)
        process.wait()
        return None
    process.wait()
    return None


def sampled(sampling: Sampling, options: Mapping[str, Any]) -> Sampling:
    """Return a family's sampling as the engine's configuration changes it."""
    if not options:
        return sampling
    fps = options.get("fps")
    return dataclasses.replace(sampling, num_frames=options.get("num_frames"), fps=fps, least=1)
