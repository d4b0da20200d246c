"""The frames between an engine and its front ends: any cut of the bytes gives the same messages,
and nothing but a message is taken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield import EngineConfig, SamplingParams
from jackfield.core import errors
from jackfield.core.errors import JackfieldError
from jackfield.core.pooling_params import PooledRow, PoolingParams
from jackfield.core.protocols.executors import ExecutorInfo
from jackfield.core.remote import frames
from jackfield.core.remote.frames import (
    HEAD,
    MAX_FRAME,
    Abort,
    AddRequest,
    BadFrame,
    Change,
    ErrorReply,
    FrameReader,
    Hello,
    Reply,
    Stop,
    ToEngine,
    ToFront,
    Tokens,
    TooLarge,
    Welcome,
    encode,
)
from jackfield.core.request import GrammarRequest, RequestSpec
from jackfield.core.sampling_params import StructuredOutputsParams
from jackfield.core.step import TokenLogprobs

numbers = st.integers(0, 2**40)
ids = st.lists(st.integers(0, 2**31), max_size=8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, plain, max_size=3)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(texts.filter(bool), max_size=3).map(tuple),
    seed=st.none() | st.integers(0, 2**62),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    structured_outputs=st.none()
    | st.builds(StructuredOutputsParams, json=st.fixed_dictionaries({"a": plain})),
    kv_transfer_params=st.none() | objects,
)
logprobs = st.builds(
    TokenLogprobs, numbers, floats, st.integers(1, 99), ids, st.lists(floats, max_size=3)
)
changes = st.builds(
    Change,
    number=numbers,
    token_ids=ids,
    logprobs=st.lists(logprobs, max_size=2),
    pooled=st.none() | st.builds(PooledRow, st.just((2,)), st.binary(max_size=8)),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 99) | texts,
    kv_transfer_params=st.none() | objects,
)
specs = st.builds(
    RequestSpec,
    request_id=texts,
    prompt_token_ids=ids,
    params=params,
    max_tokens=st.integers(1, 100),
    eos_token_ids=st.frozensets(st.integers(0, 999), max_size=3),
    bad_words_token_ids=st.lists(ids.map(tuple), max_size=2).map(tuple),
    grammar=st.builds(GrammarRequest, st.booleans(), st.none() | objects),
    priority=st.integers(-9, 9),
    cache_salt=st.none() | texts,
)
pooling_specs = st.builds(
    RequestSpec,
    request_id=texts,
    prompt_token_ids=ids,
    params=st.just(SamplingParams(max_tokens=1)),
    max_tokens=st.just(1),
    pooling=st.just(PoolingParams(task="embed", normalize=True)),
    token_type_ids=ids.map(tuple),
    reads_cache=st.booleans(),
)
to_engine = (
    st.builds(Hello, numbers, numbers)
    | st.builds(AddRequest, numbers, specs | pooling_specs)
    | st.builds(Abort, ids)
    | st.builds(Stop, numbers, texts)
)
to_front = st.builds(Tokens, ids, ids, st.lists(changes, max_size=3)) | st.builds(
    Reply, numbers, st.none() | st.binary(max_size=9) | st.booleans()
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@pytest.mark.parametrize(("kind", "messages"), [(ToEngine, to_engine), (ToFront, to_front)])
def test_any_cut_of_the_bytes_gives_the_messages(kind: Any, messages: Any) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(messages, max_size=4), st.lists(st.integers(0, 90), max_size=8))
    def check(messages: list[Any], sizes: list[int]) -> None:
        reader: FrameReader[Any] = FrameReader(kind)
        came: list[Any] = []
        for piece in cut(b"".join(map(encode, messages)), sizes):
            came += reader.read_frames(piece)
        assert came == messages

    check()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_or_waited_for(data: bytes) -> None:
    """Whatever comes, nothing but BadFrame is raised, and what is taken is a message."""
    framed = len(data).to_bytes(HEAD, "little") + data
    for given_bytes in (data, framed):
        reader: FrameReader[Any] = FrameReader(ToEngine)
        try:
            assert all(
                isinstance(first, msgspec.Struct) for first in reader.read_frames(given_bytes)
            )
        except BadFrame:
            continue


@settings(max_examples=100, deadline=None)
@given(to_engine, st.integers(0, 10_000), st.integers(0, 255))
def test_a_message_with_a_wrong_byte_is_a_message_or_refused(
    message: Any, at: int, byte: int
) -> None:
    data = bytearray(encode(message))
    data[HEAD + at % (len(data) - HEAD)] = byte
    reader: FrameReader[Any] = FrameReader(ToEngine)
    try:
        (came,) = reader.read_frames(bytes(data))
    except BadFrame:
        return
    assert isinstance(came, msgspec.Struct)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEAD, "little") + payload


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(HEAD, "little"),
        frame(b"\x91" * 100_000),
        frame(msgspec.msgpack.encode({"type": "unheard of"})),
        frame(msgspec.msgpack.encode({"type": "hello", "front": "zero", "pid": 1})),
        frame(msgspec.msgpack.encode({"type": "tokens", "numbers": [], "token_ids": []})),
        frame(b""),
        frame(
            encode(
                AddRequest(
                    0,
                    RequestSpec(
                        request_id="a",
                        prompt_token_ids=[1],
                        params=SamplingParams(temperature=1.0),
                        max_tokens=1,
                    ),
                )
            )[HEAD:].replace(
                msgspec.msgpack.encode("temperature") + msgspec.msgpack.encode(1.0),
                msgspec.msgpack.encode("temperature") + msgspec.msgpack.encode(-1.0),
            )
        ),
    ],
    ids=["too long", "deep", "tag", "type", "other direction", "empty", "out of range"],
)
def test_what_is_no_message_is_refused_after_those_before_it(data: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(ToEngine)
    came = []
    with pytest.raises(BadFrame):
        for message in reader.read_frames(encode(Hello(1, 2)) + data):
            came.append(message)
    assert came == [Hello(1, 2)]


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come() -> None:
    reader: FrameReader[Any] = FrameReader(ToEngine)
    with pytest.raises(BadFrame, match="at most"):
        list(reader.read_frames(b"\xff\xff\xff\xff"))


def test_a_message_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(TooLarge, match="at most 100"):
        encode(Abort([2**40] * 20))
    assert encode(Abort([1]))


@pytest.mark.parametrize("value", [2**70, "\ud800", {1: object()}])
def test_what_messagepack_cannot_say_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        encode(Tokens([], [], [Change(number=1, kv_transfer_params={"a": value})]))


def test_the_engines_options_arrive_as_they_are() -> None:
    config = EngineConfig.from_options(
        {
            "model": "somewhere",
            "served_model_name": ("a", "b"),
            "hf_overrides": {"rope_theta": 1e6, "x": [1, None]},
            "structured_outputs_config": {"max_grammar_depth": 7},
            "kv_transfer_config": {"kv_connector": "multi", "kv_connector_extra_config": {"a": 1}},
        }
    )
    info = ExecutorInfo(
        num_blocks=1, device="cpu", dtype="float32", attention_backend="torch",
        attention_reason="asked for", weight_bytes=1, kv_cache_bytes=2, load_seconds=0.5,
    )  # fmt: skip
    (came,) = FrameReader[Any](ToFront).read_frames(encode(Welcome(config, info)))
    assert (came.config, came.info) == (config, info)


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, JackfieldError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_raised_over_there_as_it_was_here(kind: type[JackfieldError]) -> None:
    error = kind("what is wrong", param="field")
    error.code = "own_code"
    (came,) = FrameReader[Any](ToFront).read_frames(encode(ErrorReply.from_error(3, error)))
    raised = came.error()
    assert type(raised) is kind
    assert (raised.message, raised.param, raised.code) == ("what is wrong", "field", "own_code")
    assert raised.status == kind.status


def test_an_error_of_a_kind_of_its_own_travels_as_the_nearest_known_one() -> None:
    class Special(errors.InvalidRequest):
        status = 409

    assert type(ErrorReply.from_error(1, Special("x")).error()) is errors.InvalidRequest
