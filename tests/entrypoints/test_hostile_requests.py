"""What no honest client sends: refused by name and in few words, and no traceback in the log."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield.entrypoints.http.unreadable_values import MOST_BYTES, unreadable_value

JSON = {"Content-Type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(config(save_random(tmp_path_factory.mktemp("random")))) as running_server:
        yield running_server


def refused(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + route, json=body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def raw(server: Server, data: bytes) -> bytes:
    """All that the server answers before it closes the connection."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=300) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_limit_of_tokens_is_refused_under_the_name_that_it_came_under(server: Server) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = refused(server, "/v1/chat/completions", {**CHAT, name: 2**63})
        assert error["param"] == name
        assert error["message"] == f"{name} must be a 64-bit integer, got {2**63}"


def test_a_key_of_the_wrong_type_is_reported_with_its_field(server: Server) -> None:
    error = refused(server, "/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}})
    assert error["param"] == "logit_bias"
    assert error["message"] == "logit_bias: wrong key: Expected `int`, got `str`"


def test_a_part_without_its_text_is_not_called_unsupported(server: Server) -> None:
    content = [{"type": "text"}]
    error = refused(
        server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert error["message"] == "messages[0].content[0].text: must be a string"


def test_a_refusal_does_not_repeat_a_large_value(server: Server) -> None:
    error = refused(server, "/v1/completions", {"prompt": "x", "stop": ["x"] * 100_000})
    assert error["message"].startswith("stop must be at most 64 strings, got ('x', 'x'")
    assert len(error["message"]) < 300


LONG = "q" * 20_000
CHAT_ROUTE = "/v1/chat/completions"
LARGE: list[tuple[str, dict[str, Any]]] = [
    (CHAT_ROUTE, {"messages": [{"role": LONG, "content": "x"}]}),
    (CHAT_ROUTE, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    (CHAT_ROUTE, {**CHAT, "tool_choice": LONG}),
    (CHAT_ROUTE, {**CHAT, "chat_template_kwargs": {LONG: 1}}),
    (CHAT_ROUTE, {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": f"{n}{LONG}"}} for n in range(20)],
        "tool_choice": {"type": "function", "function": {"name": LONG}},
    }),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": LONG}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {LONG: 1}}),
    ("/v1/completions", {"prompt": "x", "kv_compression": {LONG: 1}}),
    ("/api/chat", {"model": "x", "messages": [], "options": {LONG: 1}}),
    ("/v1/responses", {"input": [{"role": LONG, "content": "x"}]}),
    ("/v1/responses", {"input": "x", "truncation": LONG}),
    ("/v1/responses", {"input": "x", "include": [LONG]}),
    ("/v1/responses", {"input": "x", "previous_response_id": LONG}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": LONG}}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), LARGE, ids=lambda value: str(value)[:50])
def test_a_refusal_repeats_no_long_name(server: Server, path: str, body: dict[str, Any]) -> None:
    assert len(json.dumps(refused(server, path, body))) < 3000


NINES = "9" * 5000
ROUTES = [
    "/v1/completions", CHAT_ROUTE, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/pooling", "/classify", "/rerank", "/score", "/v2/embed", "/tokenize",
    "/detokenize",
]  # fmt: skip


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    return message


@pytest.mark.parametrize("path", ROUTES)
def test_a_number_that_cannot_be_read_is_refused_with_its_field(server: Server, path: str) -> None:
    for text, field, words in (
        ('{"max_tokens": 1e400}', "max_tokens", "1e400 is out of range"),
        ('{"a": 1, "temperature": -1e999}', "temperature", "-1e999 is out of range"),
        ('{"seed": ' + NINES + "}", "seed", NINES[:200] + "… is out of range"),
        ('{"logit_bias": {"5": 1e999}}', "logit_bias.5", "1e999 is out of range"),
        ('{"messages": [{}, {"x": [1, NaN]}]}', "messages[1].x[1]", "NaN is not a number in JSON"),
        ('{"top_p": -Infinity}', "top_p", "-Infinity is not a number in JSON"),
    ):
        response = httpx.post(server.url + path, content=text, headers=JSON)
        assert response.status_code == 400
        assert message_of(response) == f"{field}: {words}"
        error = response.json()["error"]
        assert not isinstance(error, dict) or error.get("param", field) == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/invocations", '{"prompt": "x", "n": %s}', "n"),
        ("/api/chat", '{"messages": [], "options": {"seed": %s}}', "options.seed"),
        ("/api/generate", '{"prompt": "x", "options": {"num_predict": %s}}', "options.num_predict"),
        ("/api/embed", '{"input": [%s]}', "input[0]"),
    ],
)
def test_other_routes_name_the_field_of_such_a_number(
    server: Server, path: str, body: str, field: str
) -> None:
    for number in ("1e999", "NaN"):
        response = httpx.post(server.url + path, content=body % number, headers=JSON)
        assert response.status_code == 400
        assert message_of(response).startswith(f"{field}: {number} is ")


def test_other_values_that_cannot_be_read_are_reported(server: Server) -> None:
    for body, words in (
        (b'{"n": 1e999,}', "the body is not JSON: "),
        (b'{"\xff": 1e999}', "the body is not JSON: "),
        (b"[" * 100_000 + b"1e999", "the body is not JSON: "),
        (b'{"n": 1e999, "n": 1}', "n: 1e999 is out of range"),
        (b'{"\\ud800": 1e999}', "?: the name has half of a surrogate pair"),
        (b'{"prompt": ["a", "b\\ud83d"]}', "prompt[1]: has half of a surrogate pair"),
        (b'{"prompt": "a\\ude00", "n": NaN}', "prompt: has half of a surrogate pair"),
        (b"1e999", "body: 1e999 is out of range"),
    ):
        response = httpx.post(server.url + "/v1/completions", content=body, headers=JSON)
        assert response.status_code == 400
        assert message_of(response).startswith(words)


def test_deep_and_long_names_do_not_make_a_long_message(server: Server) -> None:
    name = "n" * 2000
    body = f'{{"{name}": ' * 200 + "1e999" + "}" * 200
    response = httpx.post(server.url + "/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400 and len(response.text) < 1000
    assert message_of(response).endswith("…: 1e999 is out of range")


def test_lists_that_leave_no_token_are_the_client_s_fault(server: Server) -> None:
    """At the first token, or later, where longer bad words say so."""
    url = server.url + "/v1/completions"
    text = {"prompt": "qq", "add_special_tokens": False}
    twice = httpx.post(server.url + "/tokenize", json=text).json()["tokens"]
    assert len(twice) == 2 and twice[0] == twice[1]
    body = {"prompt": "x", "allowed_token_ids": twice[:1], "bad_words": ["qq"], "max_tokens": 4}
    error = refused(server, "/v1/completions", body)
    assert error["param"] == "allowed_token_ids" and "bad_words" in error["message"]
    lines = [line for line in httpx.post(url, json={**body, "stream": True}).text.split("\n\n")]
    assert '"text":"q"' in lines[0] and '"param":"allowed_token_ids"' in lines[1]
    error = refused(server, "/v1/completions", {**body, "bad_words": ["q"]})
    assert error["param"] == "allowed_token_ids" and "bad_words" in error["message"]
    vocabulary = server.engine.model_config.vocab_size
    assert vocabulary <= 1024, "as many stop_token_ids as a request may have"
    every = {"prompt": "x", "min_tokens": 1, "stop_token_ids": list(range(vocabulary))}
    assert refused(server, "/v1/completions", every)["param"] == "min_tokens"


def test_a_body_that_is_not_packed_as_it_says_is_the_client_s_fault(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    response = raw(
        server,
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Encoding: gzip\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 4\r\nConnection: close\r\n\r\njunk",
    )
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"the body cannot be unpacked: Error -3 while decompressing data" in response
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_what_is_not_http_leaves_no_traceback(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jackfield")
    for data in (
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        assert raw(server, data).startswith(b"HTTP/1.0 400 ")
    mine = ("jackfield.server", "jackfield.http", "aiohttp.server")
    records = [record for record in caplog.records if record.name in mine]
    assert len(records) == 2
    for record in records:
        assert record.message.startswith("refused what is not HTTP: 400")
        assert record.exc_info is None and record.levelno == logging.INFO
    assert httpx.get(server.url + "/health").status_code == 200


def test_only_texts_of_some_length_are_searched_for_what_cannot_be_read() -> None:
    """The parser that names the field holds up other threads."""
    short = b'{"a": [' + b"1," * 100 + b"1e999]}"
    found = unreadable_value(short)
    assert found is not None and found.path == "a[100]"
    assert unreadable_value(short + b" " * MOST_BYTES) is None
