"""Messages between an engine and its front ends: msgspec Structs in frames.

A frame is a little-endian length of four bytes and a MessagePack object, a tagged Struct of
`ToEngine` or `ToFront`. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from ..config import EngineConfig
from ..errors import JackfieldError, error_named
from ..live.engine_jobs import LiveJob
from ..lora_request import AdapterJob
from ..metrics.merge import Family
from ..outputs import DraftUsage, EngineStats, FinishReason, KVCompressionUsage
from ..parts.routed_experts import RoutedArray
from ..pooling_params import PooledRow
from ..protocols.executors import ExecutorInfo
from ..request import RequestSpec
from ..step import TokenLogprobs

MAX_FRAME = 256 << 20
"""Most bytes of a frame; a longer one ends the connection."""
HEAD = 4
START = -1
"""Number of an ErrorReply to the start."""
T = TypeVar("T")


class BadFrame(Exception):
    """The other side sent bytes that are not a valid frame: its connection ends."""


class TooLarge(JackfieldError):
    """A message does not fit in a frame."""


# ---------------------------------------------------------------- front end → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a connection."""

    front: int
    """Index of the front end."""
    pid: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The front end accepts connections."""


class AddRequest(msgspec.Struct, frozen=True, tag="request"):
    """A request admitted by the front end.

    Answered by a Reply or ErrorReply, then Changes.
    """

    number: int
    """First completion's number in this connection; others follow."""
    spec: RequestSpec


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The front end found a stop string; a Change ends the completion."""

    number: int
    stop: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End the requests of these completions; no reply."""

    numbers: list[int]


class Query(msgspec.Struct, frozen=True, tag="query"):
    """A question about the engine or all front ends (`EngineServer`)."""

    number: int
    name: str


class AdapterQuery(msgspec.Struct, frozen=True, tag="adapters"):
    """What a front end asks about adapters. → the encoded cards"""

    number: int
    job: AdapterJob


class LiveQuery(msgspec.Struct, frozen=True, tag="live"):
    """What a front end asks of the engine while it lives. → the encoded answer"""

    number: int
    job: LiveJob


class Report(msgspec.Struct, frozen=True, tag="report"):
    number: int
    load: int
    """Inference requests in progress."""
    families: list[Family]
    """The front end's counts."""


# ---------------------------------------------------------------- engine → front end


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """First frame: the engine is ready."""

    config: EngineConfig
    """Resolved."""
    info: ExecutorInfo


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Reply to a Query, or an accepted request."""

    number: int
    value: bytes | bool | int | None = None


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    number: int
    kind: str
    """Class name in core/errors.py."""
    message: str
    param: str | None
    code: str | None

    @classmethod
    def from_error(cls, number: int, error: JackfieldError) -> ErrorReply:
        """Encode as the nearest class known to the other side."""
        kind = next(base.__name__ for base in type(error).__mro__ if error_named(base.__name__))
        message = error.message.encode("utf-8", "replace").decode()
        return cls(number, kind, message, error.param, error.code)

    def error(self) -> JackfieldError:
        error = (error_named(self.kind) or JackfieldError)(self.message, param=self.param)
        error.code = self.code
        return error


class Change(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Updates of a completion beyond bare tokens."""

    number: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """[len(token_ids)], if requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of the next prompt tokens."""
    num_cached_tokens: int | None = None
    """With the first tokens."""
    first_scheduled: float | None = None
    pooled: PooledRow | None = None
    finish_reason: FinishReason | None = None
    """In the last change."""
    stop_reason: int | str | None = None
    error: str | None = None
    error_param: str | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    compression_usage: KVCompressionUsage | None = None
    draft_usage: DraftUsage | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()
    """`Request.weight_versions`."""
    routed_experts: RoutedArray | None = None
    """`Request.routed_experts`."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Output since the last frame: the columns, then the changes."""

    numbers: list[int]
    """[num_tokens] Completion number of each token; may repeat."""
    token_ids: list[int]
    """[num_tokens]"""
    changes: list[Change] = []


class ReportRequest(msgspec.Struct, frozen=True, tag="report_request"):
    number: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    accepting: bool
    dead_reason: str | None
    stats: EngineStats


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Nothing more will come: end what is left, and the process."""


ToEngine: TypeAlias = (
    Hello | Listening | AddRequest | Stop | Abort | Query | AdapterQuery | LiveQuery | Report
)
ToFront: TypeAlias = Welcome | Reply | ErrorReply | Tokens | ReportRequest | Status | Close

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame. Raises TooLarge, or ValueError."""
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
    """Splits bytes into messages of one type."""

    def __init__(self, type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type)
        self._buffer = bytearray()

    def read_frames(self, data: bytes) -> Iterator[T]:
        """Yield the messages that `data` completes. Raises BadFrame after valid ones."""
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
