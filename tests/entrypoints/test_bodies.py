"""Bodies: unpacked only for who may be answered, within bounds; never so many values that others
wait."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp.http_parser
import httpx
import msgspec
import pytest
from serving import Server, engine_config, running, save_random

from jackfield.core.errors import BodyTooLarge, InvalidRequest
from jackfield.entrypoints.http import body as bodies
from jackfield.entrypoints.http.options import ServerOptions

ASK = b'{"prompt": "x", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ServerOptions(api_keys=("secret",))
    with running(
        engine_config(save_random(tmp_path_factory.mktemp("random"))), options
    ) as running_server:
        yield running_server


def post(server: Server, content: bytes, route: str = "/v1/completions", **headers: str) -> Any:
    all_headers = {"Authorization": "Bearer secret", **JSON, **headers}
    return httpx.post(server.url + route, content=content, headers=all_headers, timeout=120)


def packed(encoding: str, data: bytes) -> bytes:
    return gzip.compress(data) if encoding == "gzip" else zlib.compress(data)


def bomb(unpacked: int) -> bytes:
    """gzip of so many letters."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(b"a" * (1 << 20)) for _ in range(unpacked >> 20)),
                     packer.flush()])  # fmt: skip


# ---------------------------------------------------------------- packed


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_packed_body_is_read(server: Server, encoding: str) -> None:
    response = post(server, packed(encoding, ASK), **{"Content-Encoding": encoding})
    assert response.status_code == 200, response.text
    large = json.dumps({"prompt": "the quick brown fox " * 5000, "max_tokens": 1}).encode()
    response = post(server, packed(encoding, large), **{"Content-Encoding": encoding})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("method", "route", "headers", "status"),
    [
        ("POST", "/health", {"Authorization": "Bearer secret"}, 405),
        ("GET", "/health", {}, 200),
        ("POST", "/v1/nothing", {"Authorization": "Bearer secret"}, 404),
        ("POST", "/v1/completions", {}, 401),
        ("POST", "/v1/completions", {"Authorization": "Bearer guessed"}, 401),
        ("DELETE", "/v1/completions", {"Authorization": "Bearer secret"}, 405),
        ("POST", "/v1/completions", {"Authorization": "Bearer secret", "Content-Type": "x/y"}, 415),
    ],
)
def test_nothing_is_unpacked_for_a_request_that_is_not_taken(
    server: Server,
    method: str,
    route: str,
    headers: dict[str, str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[int] = []

    def counted(self: Any, chunk: bytes, size: int = 0) -> bool:
        unpacked.append(len(chunk))
        return False

    monkeypatch.setattr(aiohttp.http_parser.DeflateBuffer, "feed_data", counted)
    monkeypatch.setattr(bodies, "unpack", lambda *_: unpacked.append(1))
    response = httpx.request(
        method,
        server.url + route,
        content=bomb(16 << 20),
        headers={**JSON, "Content-Encoding": "gzip", **headers},
        timeout=120,
    )
    assert response.status_code == status
    assert not unpacked


def test_a_bomb_is_refused_where_it_passes_the_bounds() -> None:
    small = bomb(64 << 20)
    with pytest.raises(BodyTooLarge, match=f"more than {len(small) * 100} bytes"):
        bodies.unpack(small, 31, 1 << 30)
    with pytest.raises(BodyTooLarge, match="more than 4194304 bytes"):
        bodies.unpack(small, 31, 4 << 20)
    assert len(bodies.unpack(bomb(1 << 20), 31, 4 << 20)) == 1 << 20, "little is always unpacked"


def test_unpacking_stops_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = zlib.decompressobj

    class Counted:
        def __init__(self, window: int) -> None:
            self._inner: Any = original(window)

        def decompress(self, data: bytes, most: int) -> bytes:
            piece: bytes = self._inner.decompress(data, most)
            sizes.append(len(piece))
            return piece

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(bodies.zlib, "decompressobj", Counted)
    with pytest.raises(BodyTooLarge):
        bodies.unpack(bomb(512 << 20), 31, 4 << 20)
    assert sum(sizes) <= (4 << 20) + bodies.STEP_BYTES


def test_what_was_packed_comes_out_as_it_went_in() -> None:
    rng = random.Random(5)
    for size in (0, 1, 100, bodies.STEP_BYTES, 3 * bodies.STEP_BYTES + 17):
        data = rng.randbytes(size)
        raw = zlib.compressobj(6, wbits=-15)
        assert bodies.unpack(gzip.compress(data), 31, 1 << 30) == data
        assert bodies.unpack(zlib.compress(data), 15, 1 << 30) == data
        assert bodies.unpack(raw.compress(data) + raw.flush(), 15, 1 << 30) == data


@pytest.mark.parametrize(
    "wrong",
    [b"junk", gzip.compress(ASK)[:-9], gzip.compress(ASK) + b"more", b"\x78"],
    ids=["junk", "cut off", "more behind the end", "one byte"],
)
def test_what_cannot_be_unpacked_is_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        bodies.unpack(wrong, 31 if wrong[:1] != b"\x78" else 15, 1 << 20)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip2"])
def test_another_packing_is_a_415(server: Server, encoding: str) -> None:
    response = post(server, b"whatever", **{"Content-Encoding": encoding})
    assert response.status_code == 415
    assert response.json()["error"]["message"].startswith("Content-Encoding: ")


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses",
                                   "/tokenize", "/detokenize", "/v1/embeddings"])  # fmt: skip
def test_a_body_that_is_not_called_json_is_a_415(
    server: Server, route: str, content_type: str
) -> None:
    response = post(server, ASK, route, **{"Content-Type": content_type})
    assert response.status_code == 415
    assert "Content-Type: must be application/json" in response.json()["error"]["message"]


def test_a_byte_order_mark_before_json_is_skipped(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", {"messages": chat["messages"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x" * (1 << 17), "truncate_prompt_tokens": 2}),
    ]
    for path, body in bodies:
        response = post(server, b"\xef\xbb\xbf" + json.dumps(body).encode(), path)
        assert response.status_code == 200, response.text


def test_a_charset_and_other_kinds_of_json_are_taken(server: Server) -> None:
    for content_type in (
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/x+json",
    ):
        assert post(server, ASK, **{"Content-Type": content_type}).status_code == 200


# ---------------------------------------------------------------- how many values


LARGE: dict[str, Callable[[], bytes]] = {
    "keys": lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}",
    "ids": lambda: b'{"prompt":[' + b"7," * 5_000_000 + b"7]}",
    "arrays": lambda: b'{"prompt":[' + b"[]," * 1_000_000 + b"[]]}",
    "escapes": lambda: b'{"prompt":"' + b"\\n" * 15_000_000 + b'"}',
    "spaces": lambda: b'{"a" :\n1' + b',"a" :\n1' * 500_000 + b"}",
}


@pytest.mark.parametrize("content", LARGE)
def test_more_values_than_can_be_decoded_in_a_moment_are_refused_undecoded(
    server: Server, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = LARGE[content]()
    decoded: list[bytes] = []
    original = msgspec.json.decode
    monkeypatch.setattr(
        msgspec.json, "decode", lambda data, **k: decoded.append(data) or original(data, **k)
    )
    route = "/detokenize" if b"7,7" in large else "/v1/completions"
    response = post(server, large, route)
    assert response.status_code == 413, response.text[:300]
    assert "too many values" in response.json()["error"]["message"]
    assert not any(len(item) == len(large) for item in decoded)


@pytest.mark.parametrize("text", [b'"",', b'","', b'"":', b'["\\n"],'])
def test_values_are_counted_up_to_the_limit_alone(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    calls = 0
    weight = bodies._weight

    def counted(part: bytes) -> int:
        nonlocal calls
        calls += 1
        return weight(part)

    monkeypatch.setattr(bodies, "_weight", counted)
    with pytest.raises(BodyTooLarge):
        bodies.check_weight(b"[" + text * 100_000 + b"]", 500)
    assert calls < 600


def test_text_counts_as_one_value_whatever_is_in_it() -> None:
    code = json.dumps({"prompt": json.dumps({str(i): [[]] for i in range(100_000)})})
    bodies.check_weight(code.encode(), 100_000)  # 400,000 escaped quotes, at eight a value.
    with pytest.raises(BodyTooLarge):
        bodies.check_weight(json.loads(code)["prompt"].encode(), 100_000)
    bodies.check_weight(b'{"prompt":"' + b"[{:,}]" * 1_000_000 + b'"}', 1000)


def test_the_weight_of_random_json_is_what_its_values_weigh() -> None:
    draw = random.Random(3)

    def some(depth: int) -> Any:
        kind = draw.choice("nsslo" if depth else "ns")
        if kind == "n":
            return draw.choice([1, 2.5, None, True])
        if kind == "s":
            return draw.choice(["", 'a "b", {c}: [d]', "\\", "\\\\", 'x\\"', "é\n", "\u2028"])
        if kind == "l":
            return [some(depth - 1) for _ in range(draw.randrange(4))]
        return {f"k:{i}": some(depth - 1) for i in range(draw.randrange(4))}

    def weight(value: Any) -> int:
        """Without escapes, which are not in `value`."""
        if isinstance(value, dict):
            inner = sum(map(weight, value.values())) + bodies.KEY * len(value)
        elif isinstance(value, list):
            inner = sum(map(weight, value))
        else:
            return 0
        return inner + bodies.CONTAINER + bodies.VALUE * max(len(value) - 1, 0)

    for _ in range(300):
        value = [some(5), 'q"[:,' * 50]
        text = json.dumps(value, ensure_ascii=False, indent=draw.choice([None, 1])).encode()
        expected = weight(value) + bodies.ESCAPE * text.count(b"\\")
        bodies.check_weight(text, -(-expected // bodies.VALUE))
        with pytest.raises(BodyTooLarge):
            bodies.check_weight(text, (expected - 1) // bodies.VALUE)


def test_a_large_body_of_text_is_taken(server: Server) -> None:
    response = post(server, json.dumps({"prompt": 'a "b", [c] ' * 500_000}).encode())
    assert response.status_code == 400, "past decoding: the prompt is what is too long"
    assert response.json()["error"]["param"] == "prompt"


def test_more_ids_than_a_context_holds_are_not_turned_into_text(server: Server) -> None:
    response = post(server, json.dumps({"tokens": [5] * 200_000}).encode(), "/detokenize")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "tokens: at most 131072 at once, got 200000"
    response = post(server, json.dumps({"tokens": [40] * 20_000}).encode(), "/detokenize")
    assert response.status_code == 200 and len(response.json()["prompt"]) == 20_000
