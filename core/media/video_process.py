"""Decodes a video in a process of its own, which may be killed. Run as a file: it imports nothing
of the package.

Standard input: eight bytes of length, the video, then a line with the numbers of frames in JSON.
Standard output: a line in JSON that says what the video has, then those frames, 24 bits a pixel,
then eight bytes with the number of samples of its sound, and these as 32-bit floats.
What is wrong is the last line of standard error.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

FORMATS = {4: ((b"ftyp", "mov"),), 0: ((b"\x1aE\xdf\xa3", "matroska"), (b"RIFF", "avi"))}
"""Place of a mark → marks, and which reader of FFmpeg knows them. Others, such as lists of files,
are not tried."""
STILLS = (b"GIF8", b"\x89PNG")


class Refused(Exception):
    """The video cannot be used, for a reason that its sender may read."""


def main(limits: dict[str, int]) -> None:
    seconds, memory = limits["seconds"], limits["memory"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    data = source.read(int.from_bytes(source.read(8), "big"))
    reader = (_Animation if _is_animation(data) else _Film)(data, limits)
    head = {
        "width": reader.width, "height": reader.height, "total": reader.total, "fps": reader.fps,
    }  # fmt: skip
    sink.write(json.dumps(head).encode() + b"\n")
    sink.flush()
    wanted = json.loads(source.readline())
    last = None
    sent = 0
    for number, frame in enumerate(reader.frames(wanted)):
        while sent < len(wanted) and wanted[sent] == number:
            last = frame()
            sink.write(last)
            sent += 1
        if sent == len(wanted):
            break
    # Headers count a frame or two that decoders do not show.
    if last is None or len(wanted) - sent > 1 + len(wanted) // 50:
        raise Refused(f"it ends after {sent} of the {len(wanted)} frames that were chosen")
    sink.write(last * (len(wanted) - sent))
    sound = reader.sound(limits["sound_rate"], limits["samples"])
    sink.write((len(sound) // 4).to_bytes(8, "big"))
    sink.write(sound)
    sink.flush()


def _is_animation(data: bytes) -> bool:
    return data.startswith(STILLS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _check(width: int, height: int, total: int, limits: dict[str, int]) -> None:
    if not (0 < width and 0 < height and 0 < total):
        raise Refused("it has no frames")
    if width * height > limits["pixels"]:
        raise Refused(f"a frame has {width} x {height} pixels, at most {limits['pixels']} are read")
    if total > limits["frames"]:
        raise Refused(f"it has more than {limits['frames']} frames")


class _Animation:
    """What Pillow reads."""

    def __init__(self, data: bytes, limits: dict[str, int]) -> None:
        from PIL import Image

        self._image: Any = Image.open(io.BytesIO(data), formats=("GIF", "WEBP", "PNG"))
        self.width, self.height = self._image.size
        _check(self.width, self.height, 1, limits)
        milliseconds = 0.0
        self.total = 0
        try:
            while True:
                self._image.seek(self.total)
                self.total += 1
                _check(self.width, self.height, self.total, limits)
                self._image.load()
                milliseconds += float(self._image.info.get("duration", 100) or 100)
        except EOFError:
            pass
        self.fps = 1000.0 * self.total / milliseconds

    def frames(self, wanted: list[int]) -> Iterator[Any]:
        for number in range(self.total):
            self._image.seek(number)
            yield lambda: self._image.convert("RGB").tobytes()

    def sound(self, rate: int, most: int) -> bytes:
        return b""


class _Film:
    """What FFmpeg reads."""

    def __init__(self, data: bytes, limits: dict[str, int]) -> None:
        try:
            import av
        except ImportError:
            raise Refused(
                "this server reads animated GIF, WebP and PNG alone; for others it needs the "
                "package av: pip install av"
            ) from None
        name = next(
            (
                name
                for place, marks in FORMATS.items()
                for mark, name in marks
                if data[place : place + len(mark)] == mark
            ),
            None,
        )
        if name is None:
            raise Refused("it is no MP4, MOV, MKV, WebM, AVI, GIF, WebP or PNG")
        av.logging.set_level(av.logging.PANIC)
        container: Any = av.open(io.BytesIO(data), format=name)
        self._container = container
        if not self._container.streams.video:
            raise Refused("it has no pictures")
        self._stream: Any = self._container.streams.video[0]
        codec = self._stream.codec_context
        codec.thread_count = 1
        self.width, self.height = codec.width, codec.height
        _check(self.width, self.height, 1, limits)
        self.total = 0
        for packet in self._container.demux(self._stream):
            self.total += packet.size > 0
            _check(self.width, self.height, max(1, self.total), limits)
        _check(self.width, self.height, self.total, limits)
        rate = self._stream.average_rate or self._stream.guessed_rate
        self.fps = float(rate) if rate else 24.0
        self._container.seek(0)

    def frames(self, wanted: list[int]) -> Iterator[Any]:
        size = {"width": self.width, "height": self.height, "format": "rgb24"}
        for frame in self._container.decode(self._stream):
            yield lambda frame=frame: frame.to_ndarray(**size).tobytes()

    def sound(self, rate: int, most: int) -> bytes:
        """Return the samples of one channel at this rate, at most so many; 0: none are wanted."""
        if not rate or not self._container.streams.audio:
            return b""
        import av

        self._container.seek(0)
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        pieces: list[bytes] = []
        samples = 0
        for frame in self._container.decode(self._container.streams.audio[0]):
            for piece in resampler.resample(frame):
                pieces.append(bytes(piece.planes[0])[: 4 * piece.samples])
                samples += piece.samples
            if samples > most:
                raise Refused(f"its sound has more than {most // rate} seconds")
        for piece in resampler.resample(None):
            pieces.append(bytes(piece.planes[0])[: 4 * piece.samples])
        return b"".join(pieces)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Refused as error:
        sys.exit(str(error))
    except MemoryError:
        sys.exit("decoding it takes too much memory")
    except Exception as error:  # Decoders raise anything.
        sys.exit(f"it cannot be decoded ({type(error).__name__}: {error})")
