"""Messages between an engine and its front ends: msgspec Structs in frames.

A frame is four bytes of length (little-endian) and one MessagePack object, a tagged Struct of
`ToEngine` or `ToFront`. Nothing else is decoded, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from ..config import EngineConfig
from ..errors import JackfieldError, error_named
from ..lora_request import AdapterJob
from ..metrics.merge import Family
from ..outputs import EngineStats, FinishReason, KVCompressionUsage
from ..pooling_params import PooledRow
from ..protocols.executors import ExecutorInfo
from ..request import RequestSpec
from ..step import TokenLogprobs

MAX_FRAME = 256 << 20
"""Bytes of the largest frame: a longer one ends the connection."""
HEAD = 4
"""Bytes of a frame's length."""
START = -1
"""Number of an ErrorReply to the start itself, in place of a Welcome."""
T = TypeVar("T")


class BadFrame(Exception):
    """The other side sent bytes that are not a valid frame: its connection ends."""


class TooLarge(JackfieldError):
    """A message does not fit in a frame."""


# ---------------------------------------------------------------- front end → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of a connection."""

    front: int
    """Number of the front end, from 0."""
    pid: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The front end accepts connections."""


class AddRequest(msgspec.Struct, frozen=True, tag="request"):
    """A request that the front end has admitted.

    A Reply or an ErrorReply with its number comes back, then its Changes.
    """

    number: int
    """Number of its first completion, in this connection; the others have the next numbers."""
    spec: RequestSpec


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The front end found a stop string in a completion. A Change that ends it comes back."""

    number: int
    stop: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The caller has disconnected: end the requests of these completions. There is no reply."""

    numbers: list[int]


class Query(msgspec.Struct, frozen=True, tag="query"):
    """A question about the engine, or about all front ends; see `EngineServer`."""

    number: int
    name: str


class AdapterQuery(msgspec.Struct, frozen=True, tag="adapters"):
    """What a front end asks about adapters. → the encoded cards"""

    number: int
    job: AdapterJob


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A front end's reply to ReportRequest."""

    number: int
    """Number of the ReportRequest."""
    load: int
    """Number of inference requests in progress."""
    families: list[Family]
    """Counts of the front end."""


# ---------------------------------------------------------------- engine → front end


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first frame: the engine is ready."""

    config: EngineConfig
    """The resolved configuration."""
    info: ExecutorInfo


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The reply to a Query, or to a request that was accepted."""

    number: int
    value: bytes | bool | int | None = None


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """An error in place of a Reply."""

    number: int
    kind: str
    """Name of a class in core/errors.py."""
    message: str
    param: str | None
    code: str | None

    @classmethod
    def from_error(cls, number: int, error: JackfieldError) -> ErrorReply:
        """Encode an error as the nearest class that the other side knows."""
        kind = next(base.__name__ for base in type(error).__mro__ if error_named(base.__name__))
        message = error.message.encode("utf-8", "replace").decode()
        return cls(number, kind, message, error.param, error.code)

    def error(self) -> JackfieldError:
        """Decode the error."""
        error = (error_named(self.kind) or JackfieldError)(self.message, param=self.param)
        error.code = self.code
        return error


class Change(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Updates of one completion beyond bare tokens."""

    number: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """[len(token_ids)], if requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of the next prompt tokens."""
    num_cached_tokens: int | None = None
    """Set with the first tokens."""
    first_scheduled: float | None = None
    pooled: PooledRow | None = None
    finish_reason: FinishReason | None = None
    """Set in the completion's last change."""
    stop_reason: int | str | None = None
    error: str | None = None
    error_param: str | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    compression_usage: KVCompressionUsage | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Output of the steps since the last frame: apply the columns first, then the changes."""

    numbers: list[int]
    """[num_tokens] Completion number of each token; may repeat."""
    token_ids: list[int]
    """[num_tokens]"""
    changes: list[Change] = []


class ReportRequest(msgspec.Struct, frozen=True, tag="report_request"):
    """Requests a Report from a front end."""

    number: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The engine's status."""

    accepting: bool
    dead_reason: str | None
    stats: EngineStats


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Nothing more will come: end what is left, and the process."""


ToEngine: TypeAlias = Hello | Listening | AddRequest | Stop | Abort | Query | AdapterQuery | Report
ToFront: TypeAlias = Welcome | Reply | ErrorReply | Tokens | ReportRequest | Status | Close

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame. Raises TooLarge, and ValueError for values that MessagePack lacks."""
    frame = bytearray(HEAD)
    try:
        _encoder.encode_into(message, frame, HEAD)
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"cannot be sent: {error}") from None
    size = len(frame) - HEAD
    if size > MAX_FRAME:
        raise TooLarge(f"a message of {size} bytes; at most {MAX_FRAME} go through a socket")
    frame[:HEAD] = size.to_bytes(HEAD, "little")
    return bytes(frame)


class FrameReader(Generic[T]):
    """Splits a stream of bytes into messages of one type."""

    def __init__(self, type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type)
        self._buffer = bytearray()

    def read_frames(self, data: bytes) -> Iterator[T]:
        """Yield the messages that `data` completes. Raises BadFrame after the valid ones."""
        buffer = self._buffer
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= HEAD:
                size = int.from_bytes(buffer[begin : begin + HEAD], "little")
                if size > MAX_FRAME:
                    raise BadFrame(f"a frame of {size} bytes; at most {MAX_FRAME} are taken")
                end = begin + HEAD + size
                if len(buffer) < end:
                    return
                payload = bytes(buffer[begin + HEAD : end])
                begin = end
                try:
                    message = self._decoder.decode(payload)
                except (msgspec.MsgspecError, JackfieldError, ValueError, RecursionError) as error:
                    raise BadFrame(f"{type(error).__name__}: {error}") from None
                yield message
        finally:
            del buffer[:begin]
