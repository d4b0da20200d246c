"""What crosses the socket between an engine and its front ends: msgspec Structs in frames.

A frame is four bytes of length (little-endian) and one MessagePack object, a tagged Struct of
`ToEngine` or `ToFront`. Nothing else is understood, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from .. import errors
from ..config import EngineConfig
from ..errors import JackfieldError
from ..observe.merge import Family
from ..pooling import PooledRow, PoolingParams
from ..protocols import ExecutorInfo
from ..types import EngineStats, FinishReason, SamplingParams, TokenLogprobs

MAX_FRAME = 256 << 20
"""Bytes of the largest frame: a longer one ends the connection."""
HEAD = 4
"""Bytes of a frame's length."""
T = TypeVar("T")


_ERRORS: dict[str, type[JackfieldError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, JackfieldError)
}


class BadFrame(Exception):
    """The other side sent what is no frame: its connection ends."""


class TooLarge(JackfieldError):
    """One message does not fit in a frame."""


# ---------------------------------------------------------------- front end → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of a connection."""

    front: int
    """Number of the front end, from 0."""
    pid: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The front end takes connections."""


class GrammarWish(msgspec.Struct, frozen=True):
    """What `Grammars.prepare` needs to know besides the parameters."""

    chat: bool
    template_arguments: dict[str, Any] | None = None


class Generate(msgspec.Struct, frozen=True, tag="generate", kw_only=True):
    """A request for tokens; an Answer or a Refused with its number comes back, then its Changes."""

    number: int
    """Of its first completion, in this connection; the others have the next `params.n - 1`."""
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    grammar: GrammarWish | None


class Encode(msgspec.Struct, frozen=True, tag="encode", kw_only=True):
    """A pooling request; answered as Generate is."""

    number: int
    request_id: str
    prompt_token_ids: list[int]
    token_type_ids: tuple[int, ...]
    params: PoolingParams
    """Completed."""
    priority: int
    cache_salt: str | None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The front end found a stop string in a completion. A Change that ends it comes back."""

    number: int
    stop: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The caller is gone: the requests of these completions end. Nothing comes back."""

    numbers: list[int]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question about the engine, or about all front ends; see `EngineServer`."""

    number: int
    what: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A front end's answer to WantReport."""

    number: int
    """The question's."""
    load: int
    """Requests for work under way."""
    families: list[Family]
    """What it counts itself."""


# ---------------------------------------------------------------- engine → front end


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first frame: the engine is ready."""

    config: EngineConfig
    """Resolved."""
    info: ExecutorInfo


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To an Ask, or a request that was admitted."""

    number: int
    value: bytes | bool | int | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An error in place of an Answer."""

    number: int
    kind: str
    """Of the classes in core/errors.py."""
    message: str
    param: str | None
    code: str | None

    @classmethod
    def because(cls, number: int, error: JackfieldError) -> Refused:
        """Under the nearest class that the other side knows."""
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
        message = error.message.encode("utf-8", "replace").decode()
        return cls(number, kind, message, error.param, error.code)

    def error(self) -> JackfieldError:
        """The error that it was."""
        made = _ERRORS.get(self.kind, JackfieldError)(self.message, param=self.param)
        made.code = self.code
        return made


class Change(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What became of one completion, beyond bare tokens."""

    number: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """[len(token_ids)], where asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """The next prompt tokens'."""
    num_cached_tokens: int | None = None
    """With the first tokens."""
    first_scheduled: float | None = None
    pooled: PooledRow | None = None
    finish_reason: FinishReason | None = None
    """Nothing follows."""
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What the steps since the last frame brought to one front end: the columns first, then the
    changes."""

    numbers: list[int]
    """[num_tokens] Whose each token is; a completion may be there more than once."""
    token_ids: list[int]
    """[num_tokens]"""
    changes: list[Change] = []


class WantReport(msgspec.Struct, frozen=True, tag="want_report"):
    """Tell what you count."""

    number: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How the engine is."""

    accepting: bool
    dead_reason: str | None
    stats: EngineStats


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Nothing more will come: end what is left, and the process."""


ToEngine: TypeAlias = Hello | Listening | Generate | Encode | Stop | Abort | Ask | Report
ToFront: TypeAlias = Welcome | Answer | Refused | Tokens | WantReport | Status | Close

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | ToFront) -> bytes:
    """→ the frame. Raises TooLarge, and ValueError for what MessagePack cannot say."""
    made = bytearray(HEAD)
    try:
        _encoder.encode_into(message, made, HEAD)
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"cannot be sent to the engine: {error}") from None
    size = len(made) - HEAD
    if size > MAX_FRAME:
        raise TooLarge(f"a message of {size} bytes; at most {MAX_FRAME} go through a socket")
    made[:HEAD] = size.to_bytes(HEAD, "little")
    return bytes(made)


class FrameReader(Generic[T]):
    """Cuts a stream of bytes into messages of one type."""

    def __init__(self, type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that are whole now. Raises BadFrame, after those before it."""
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
