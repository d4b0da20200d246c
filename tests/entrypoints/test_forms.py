"""Uploaded forms: read as they are cut, with a bound on parts, headers and what is between."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from serving import Server, engine_config, running, save_random

from jackfield.core.errors import BodyTooLarge, InvalidRequest, JackfieldError
from jackfield.entrypoints.http import forms
from jackfield.entrypoints.http.forms import FormReader
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions

HEADERS = {"Content-Type": "multipart/form-data; boundary=cut"}


class Feed:
    """A protocol that a stream may pause."""

    def pause_reading(self, **_: Any) -> None: ...
    def resume_reading(self, **_: Any) -> None: ...


def request_of(pieces: list[bytes], headers: dict[str, str] | None = None) -> web.Request:
    content = StreamReader(Feed(), 1 << 16, loop=asyncio.get_running_loop())  # type: ignore[arg-type]
    for piece in pieces:
        content.feed_data(piece)
    content.feed_eof()
    return make_mocked_request("POST", "/v1/files", headers=headers or HEADERS, payload=content)


async def read_form(pieces: list[bytes], headers: dict[str, str] | None = None) -> list[Any]:
    """→ (name, filename, content) of each part."""
    form = FormReader(request_of(pieces, headers))
    parts = []
    while (part := await form.next_part()) is not None:
        content = b""
        while piece := await form.read():
            content += piece
        parts.append((part.name, part.filename, content))
    return parts


def field(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


CONTENTS = [b"batch", b"", b"\r\n--cu", b"--cut", b"\r\n\r\n--\r\n", bytes(range(256)) * 3]
FORM = b"".join(field(f"n{i}", content) for i, content in enumerate(CONTENTS)) + b"--cut--\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 20])
async def test_a_form_is_the_same_however_it_arrives(size: int) -> None:
    """Against what was put in: contents that look like delimiters, cut at every place."""
    pieces = [FORM[start : start + size] for start in range(0, len(FORM), size)]
    expected = [(f"n{i}", None, content) for i, content in enumerate(CONTENTS)]
    assert await read_form(pieces) == expected
    assert await read_form([b"a preamble\r\n", *pieces, b"an epilogue"]) == expected


@pytest.mark.parametrize("name", ["in.jsonl", 'a "b" ; c.jsonl', "größe.jsonl"])
async def test_what_clients_send_is_read(name: str) -> None:
    """By httpx, with its own boundary."""
    sent = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": (name, b"\r\n{}\n")}
    )
    parts = await read_form([sent.read()], {"Content-Type": sent.headers["Content-Type"]})
    assert parts[0] == ("purpose", None, b"batch")
    assert parts[1][0] == "file" and parts[1][2] == b"\r\n{}\n"
    assert parts[1][1].replace("%22", '"') == name


async def test_names_are_read_as_they_are_written() -> None:
    more = "; filename=plain; filename*=UTF-8''gr%C3%B6%C3%9Fe"
    (part,) = await read_form([field(r"a\"b", b"x", more) + b"--cut--"])
    assert part == ('a"b', "größe", b"x")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (field("a", b"") * (forms.MAX_PARTS + 1) + b"--cut--", BodyTooLarge),
        (b"x" * (forms.MAX_PREAMBLE + 1) + FORM, BodyTooLarge),
        (b"\n" * 10_000_000, BodyTooLarge),
        (b"--cut\r\n" + b"X: 1\r\n" * (forms.MAX_HEADER_LINES + 1) + b"\r\n", InvalidRequest),
        (b"--cut\r\nX: " + b"1" * forms.MAX_PART_HEADERS, InvalidRequest),
        (b"--cut\r\n" + b"\n" * 10_000_000, InvalidRequest),
        (b"--cutter\r\n\r\n", InvalidRequest),
        (b"--cut\r\n\r\nx\r\n--cut--", InvalidRequest),
        (b"--cut\r\nContent-Disposition: form-data\r\n\r\nx\r\n--cut--", InvalidRequest),
        (FORM[:-9], InvalidRequest),
        (b"", InvalidRequest),
    ],
)
async def test_a_form_without_bounds_is_refused(body: bytes, error: type[JackfieldError]) -> None:
    with pytest.raises(error):
        await read_form([body])
    with pytest.raises(error):
        await read_form([body[: 1 << 17][i : i + 1000] for i in range(0, 1 << 17, 1000)])


async def test_a_form_has_as_many_parts_as_are_allowed() -> None:
    parts = await read_form([field("a", b"") * forms.MAX_PARTS + b"--cut--"])
    assert len(parts) == forms.MAX_PARTS


@pytest.mark.parametrize(
    "kind", ["multipart/form-data", "multipart/mixed; boundary=x", "multipart/form-data; boundary="]
)
async def test_a_form_without_a_boundary_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        await read_form([FORM], {"Content-Type": kind})


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ServerOptions(batches=BatchOptions(tmp_path_factory.mktemp("batches")))
    config = engine_config(save_random(tmp_path_factory.mktemp("random")))
    with running(config, options) as running_server:
        yield running_server


ENDLESS = {
    "parts": (b"", field("a", b"")),
    "preamble": (b"", b"x"),
    "lines": (b"", b"\n"),
    "headers": (b"--cut\r\n", b"X: 1\r\n"),
    "a header": (b"--cut\r\nX: ", b"1"),
    "a field": (b'--cut\r\nContent-Disposition: form-data; name="a"\r\n\r\n', b"\r\n"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_form_without_end_is_refused_while_it_comes(server: Server, kind: str) -> None:
    start, again = ENDLESS[kind]
    at = urlsplit(server.url)
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=cut\r\n\r\n"
    )
    piece = again * math.ceil(65536 / len(again))
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n" % (len(start), start) if start else head)
        sent = 0
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            sent += len(piece)
            assert sent < 256 << 20
        status = int(connection.recv(65536).split()[1])
    assert status == (400 if kind in ("parts", "headers", "a header", "a field") else 413)


def test_parts_beyond_the_limit_cost_the_loop_little(server: Server) -> None:
    """The processor time of the loop's own thread: no other load lengthens it."""

    async def now(_: Any) -> float:
        return time.thread_time()

    def seconds(num_parts: int) -> float:
        body = b"".join(field(f"n{i}", b"") for i in range(num_parts)) + b"--cut--"
        before = server.call(now)
        response = httpx.post(f"{server.url}/v1/files", content=body, headers=HEADERS, timeout=60)
        assert response.status_code == 413 and f"{forms.MAX_PARTS} parts" in response.text
        return float(server.call(now) - before)

    few = max(seconds(forms.MAX_PARTS + 1) for _ in range(3))
    assert seconds(100_000) < 10 * few


def test_a_field_given_twice_is_named(server: Server) -> None:
    body = field("purpose", b"batch") + field("purpose", b"evals") + b"--cut--"
    response = httpx.post(f"{server.url}/v1/files", content=body, headers=HEADERS)
    assert response.status_code == 400 and response.json()["error"]["param"] == "purpose"


def test_an_upload_is_kept_as_it_was_sent(server: Server, tmp_path: Path) -> None:
    content = b"\r\n--cut".join(bytes([i % 256]) * 997 for i in range(3000))
    url = f"{server.url}/v1/files"
    sent = httpx.post(url, data={"purpose": "batch"}, files={"file": ("x", content)})
    assert sent.status_code == 200 and sent.json()["bytes"] == len(content)
    assert httpx.get(f"{url}/{sent.json()['id']}/content").content == content
