"""The server's options over real sockets: TLS, keys, CORS, limits and logs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.tenancy import RequestHead
from jackfield.entrypoints.http.auth.api_keys import KeyRing
from jackfield.entrypoints.http.cross_origin.cors import origin_headers
from jackfield.entrypoints.http.options import Cors, ServerOptions
from jackfield.entrypoints.http.tls import Tls, refreshing
from jackfield.entrypoints.server.serve_settings import listen, make_parser, server_options

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SITE = "https://page.example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed: server.pem with server.key, other.pem with other.key."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        make_certificate(folder, name)
    return folder


def make_certificate(folder: Path, name: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


PARSER = make_parser()


def flags(*argv: str) -> argparse.Namespace:
    return PARSER.parse_args(list(argv))


def options(*argv: str) -> ServerOptions:
    """As `jackfield serve` makes them."""
    return server_options(flags(*argv))


# ---------------------------------------------------------------- TLS


def test_a_process_serves_https_with_keys_from_a_file(
    checkpoint: Path, certificates: Path, tmp_path: Path
) -> None:
    """All of it through `jackfield serve --config`, JSON access lines included."""
    (tmp_path / "keys").write_text("# ours\nfirst\n\n second \n")
    settings = {
        "model": str(checkpoint),
        "port": 0,
        "served_model_name": ["tiny", "other"],
        "device": "cpu",
        "dtype": "float32",
        "max-model-len": 256,
        "num-gpu-blocks-override": 64,
        "ssl-certfile": str(certificates / "server.pem"),
        "ssl-keyfile": str(certificates / "server.key"),
        "api-key-file": str(tmp_path / "keys"),
        "access-log": "text",
        "response-role": "robot",
    }
    (tmp_path / "serve.yaml").write_text(json.dumps(settings))  # JSON is YAML.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = forked.Popen(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve",
         "--config", str(tmp_path / "serve.yaml"), "--access-log=json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment, "VLLM_API_KEY": "third,fourth"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"Serving tiny on (https://127\.0\.0\.1:\d+)", line)
        assert match is not None, process.communicate()
        context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
        with httpx.Client(base_url=match[1], verify=context) as client:
            for key, status in (
                ("first", 200), ("second", 200), ("third", 200), ("fourth", 200),
                ("# ours", 401), ("x", 401), ("third,fourth", 401),
            ):  # fmt: skip
                headers = {"Authorization": f"Bearer {key}"}
                assert client.get("/v1/models", headers=headers).status_code == status, key
            headers = {"Authorization": "Bearer first", "X-Request-Id": "mine"}
            response = client.post("/v1/chat/completions?secret=1", json=CHAT, headers=headers)
            assert response.json()["choices"][0]["message"]["role"] == "robot"
            assert response.json()["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines] == [200, 200, 200, 200, 401, 401, 401, 200]
    last = lines[-1]
    assert (last["method"], last["path"]) == ("POST", "/v1/chat/completions")
    assert last["request_id"] == "mine" and last["bytes"] > 100
    assert 0 < last["seconds"] < 60 and "secret" not in errors and "first" not in errors


async def peer(port: int, context: ssl.SSLContext) -> tuple[bytes, str]:
    """→ (the certificate a server shows, the cipher)"""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    secured = writer.get_extra_info("ssl_object")
    certificate = secured.getpeercert(binary_form=True), secured.cipher()[0]
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return certificate


def trusting_all() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.asynccontextmanager
async def accepting(context: ssl.SSLContext) -> Any:
    """A server that greets, on a free port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    make_certificate(tmp_path, "server")
    options = Tls(str(tmp_path / "server.pem"), str(tmp_path / "server.key"))
    context = options.context()
    async with accepting(context) as port, refreshing(options, context, 0.01):
        before, _ = await peer(port, trusting_all())
        assert before == ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text())
        # A key that does not fit changes nothing.
        make_certificate(tmp_path, "new")
        (tmp_path / "new.pem").replace(tmp_path / "server.pem")
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert (await peer(port, trusting_all()))[0] == before
        (tmp_path / "new.key").replace(tmp_path / "server.key")
        expected = ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text())
        async with asyncio.timeout(300):
            while (await peer(port, trusting_all()))[0] != expected:
                await asyncio.sleep(0.01)


async def test_certificates_are_not_watched_once_the_server_has_ended(certificates: Path) -> None:
    options = Tls(str(certificates / "server.pem"), str(certificates / "server.key"))
    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError):
        async with refreshing(options, options.context()):
            assert len(asyncio.all_tasks() - before) == 1
            raise RuntimeError("the server failed")
    assert asyncio.all_tasks() == before


async def test_clients_without_a_trusted_certificate_are_refused(certificates: Path) -> None:
    server, other = str(certificates / "server.pem"), str(certificates / "other.pem")
    options = listen(
        flags(
            "--ssl-certfile", server, "--ssl-keyfile", str(certificates / "server.key"),
            "--ssl-ca-certs", other, "--ssl-cert-reqs", "2",
            "--ssl-ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384",
        )
    ).tls  # fmt: skip
    assert options is not None

    async def greeted(client: ssl.SSLContext) -> bytes:
        """What the server says; nothing where it refuses, at the handshake or (TLS 1.3) after."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        except (ssl.SSLError, ConnectionError):
            return b""
        try:
            return await reader.read()
        except (ssl.SSLError, ConnectionError):
            return b""
        finally:
            writer.close()

    async with accepting(options.context()) as port:
        client = trusting_all()
        assert await greeted(client) == b""
        client.load_cert_chain(other, str(certificates / "other.key"))
        assert await greeted(client) == b"hello"
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert (await peer(port, client))[1] == "ECDHE-ECDSA-AES256-GCM-SHA384"
        client.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        assert await greeted(client) == b""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ssl-keyfile", "x"], "--ssl-keyfile: needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh: needs --ssl-certfile"),
        (["--ssl-certfile", "nowhere.pem"], "--ssl-certfile: no such file: nowhere.pem"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "OTHER"], "--ssl-keyfile: no certificate"),
        (["--ssl-certfile", "CERT"], "--ssl-certfile: no certificate with its key"),
        (["--ssl-certfile", "BOTH", "--ssl-ciphers", "none"], "'none' names no cipher"),
        (["--ssl-certfile", "BOTH", "--ssl-cert-reqs", "3"], "must be 0, 1 or 2, got 3"),
        (["--ssl-certfile", "BOTH", "--ssl-cert-reqs", "2"], "needs --ssl-ca-certs"),
    ],
)
def test_wrong_tls_options_are_named(
    certificates: Path, tmp_path: Path, argv: list[str], message: str
) -> None:
    both = tmp_path / "both.pem"
    both.write_text(
        (certificates / "server.pem").read_text() + (certificates / "server.key").read_text()
    )
    files = {
        "CERT": str(certificates / "server.pem"),
        "OTHER": str(certificates / "other.key"),
        "BOTH": str(both),
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        listen(flags(*(files.get(word, word) for word in argv)))


# ---------------------------------------------------------------- where to listen, and keys


async def test_a_unix_socket_answers(tmp_path: Path) -> None:
    from jackfield import AsyncEngine
    from jackfield.entrypoints.server.listen import Listen
    from jackfield.entrypoints.server.server import listening

    path = str(tmp_path / "socket")
    async with AsyncEngine(EngineConfig(max_model_len=128, device="cpu")) as engine:
        async with listening(engine, Listen(uds=path)) as where:
            assert where == path
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                response = await client.post("/v1/chat/completions", json=CHAT)
                assert response.status_code == 200
                assert response.json()["usage"]["completion_tokens"] == 2


def test_keys_come_from_flags_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", "e1, e2")
    monkeypatch.setenv("VLLM_API_KEY", "e2")
    (tmp_path / "keys").write_text("f1\n# no\nf2\n")
    parsed = options("--api-key", "a", "--api-key", "b", "--api-key-file", str(tmp_path / "keys"))
    assert parsed.api_keys == ("a", "b", "e1", "e2")
    ring = KeyRing(parsed.api_keys, parsed.api_key_files)
    assert len(ring) == 6
    for key in ("a", "b", "f1", "f2", "e1", "e2"):
        head = RequestHead("GET", "/", "/", {"Authorization": f"Bearer {key}"}, None)
        assert ring.authenticate(head) is not None


@pytest.mark.parametrize("text", ["", " , "])
def test_a_variable_that_was_not_filled_in_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", text)
    with pytest.raises(ConfigError, match="JACKFIELD_API_KEY: is set to no key"):
        options()


@pytest.mark.parametrize("content", ["", "# only this\n\n", None])
def test_a_file_without_keys_is_refused_and_opens_nothing(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        options("--api-key-file", str(path))


# ---------------------------------------------------------------- CORS and headers


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Server]:
    """One site may talk to it, with a key; one request at once; bodies are logged."""
    parsed = options(
        "--api-key", "key", "--allowed-origins", SITE, "--allowed-methods", "get", "POST",
        "--allowed-headers", "Authorization", "content-type", "--allow-credentials",
        "--limit-concurrency", "1", "--enable-log-requests", "--max-log-len", "20",
        "--root-path", "/llm/", "--no-enable-request-id-headers",
    )  # fmt: skip
    with running(config(checkpoint), parsed) as server:
        yield server


def preflight(server: Server, origin: str, method: str, headers: str = "") -> httpx.Response:
    all_headers = {"Origin": origin, "Access-Control-Request-Method": method}
    if headers:
        all_headers["Access-Control-Request-Headers"] = headers
    return httpx.options(server.url + "/v1/chat/completions", headers=all_headers)


def test_a_preflight_of_the_allowed_site_needs_no_key(guarded: Server) -> None:
    response = preflight(guarded, SITE, "POST", "authorization, Content-Type")
    assert response.status_code == 204
    assert response.headers["Access-Control-Allow-Origin"] == SITE
    assert response.headers["Access-Control-Allow-Methods"] == "POST"
    assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert response.headers["Access-Control-Allow-Credentials"] == "true"
    assert "Origin" in response.headers["Vary"]


@pytest.mark.parametrize(
    ("origin", "method", "headers", "refused"),
    [
        ("https://evil.example", "POST", "", "origin"),
        (SITE + ".evil.example", "POST", "", "origin"),
        ("null", "POST", "", "origin"),
        (SITE, "DELETE", "", "method"),
        (SITE, "POST", "x-other", "headers"),
    ],
)
def test_a_preflight_says_what_is_refused(
    guarded: Server, origin: str, method: str, headers: str, refused: str
) -> None:
    response = preflight(guarded, origin, method, headers)
    assert response.status_code == 400
    assert response.text == f"CORS: not allowed: {refused}"
    assert ("Access-Control-Allow-Origin" in response.headers) == (refused != "origin")


def test_answers_errors_and_streams_carry_the_site(guarded: Server) -> None:
    keyed = {"Authorization": "Bearer key", "Origin": SITE}
    url = guarded.url + "/v1/chat/completions"
    whole = httpx.post(url, json=CHAT, headers=keyed)
    stream = httpx.post(url, json={**CHAT, "stream": True}, headers=keyed)
    wrong = httpx.post(url, json={}, headers=keyed)
    no_key = httpx.post(url, json=CHAT, headers={"Origin": SITE})
    assert [a.status_code for a in (whole, stream, wrong, no_key)] == [200, 200, 400, 401]
    for response in (whole, stream, wrong, no_key):
        assert response.headers["Access-Control-Allow-Origin"] == SITE
        assert "X-Request-Id" not in response.headers
    other = httpx.post(url, json=CHAT, headers={**keyed, "Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in other.headers


def test_any_site_is_a_star_unless_credentials_are_allowed() -> None:
    assert origin_headers(Cors(("*",)), SITE) == {"Access-Control-Allow-Origin": "*"}
    with_credentials = origin_headers(Cors(("*",), credentials=True), SITE)
    assert with_credentials["Access-Control-Allow-Origin"] == SITE


def test_no_site_is_let_in_by_default(checkpoint: Path) -> None:
    with running(config(checkpoint)) as server:
        assert preflight(server, SITE, "POST").status_code == 405
        response = httpx.get(
            server.url + "/version", headers={"Origin": SITE, "X-Request-Id": "me"}
        )
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.headers["X-Request-Id"] == "me"


def test_vllms_json_lists_are_words_too() -> None:
    parsed = options(
        "--allowed-origins", '["https://a", "https://b"]', "--allowed-methods", '["*"]'
    )
    assert parsed.cors == Cors(("https://a", "https://b"), ("*",), ("*",))
    assert options().cors == Cors()


# ---------------------------------------------------------------- limits and logs


def test_one_request_more_than_the_limit_is_refused(guarded: Server) -> None:
    keyed = {"Authorization": "Bearer key"}
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    url = guarded.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=keyed, timeout=300) as first:
        lines = first.iter_lines()  # Kept: dropping it would hang up.
        next(lines)
        refused = httpx.post(url, json={"prompt": "x"}, headers=keyed)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert refused.headers["Retry-After"] == "1"
        assert httpx.get(guarded.url + "/health").status_code == 200
        assert httpx.post(url, json={"prompt": "x"}).status_code == 401
    assert guarded.becomes(lambda engine: engine.stats().num_requests_running == 0)
    body = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(url, json=body, headers=keyed).status_code == 200


def test_bodies_are_logged_cut_and_on_one_line(
    guarded: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"prompt":\n"a secret", "max_tokens": 1}'
    with caplog.at_level(logging.INFO, "jackfield.requests"):
        headers = {"Authorization": "Bearer key"}
        httpx.post(guarded.url + "/v1/completions", content=body, headers=headers)
        httpx.post(guarded.url + "/v1/completions", content=body)
    (messages,) = [r.getMessage() for r in caplog.records if r.name == "jackfield.requests"]
    shown = '"{\\"prompt\\":\\n\\"a secret" … (39 characters)'
    assert messages == f'POST "/v1/completions" {shown}'


def test_nothing_is_logged_by_default(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), running(config(checkpoint)) as server:
        body = {"prompt": "a secret", "max_tokens": 1}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
    assert not [r for r in caplog.records if r.name in ("jackfield.access", "jackfield.requests")]
    assert "a secret" not in caplog.text + "".join(capfd.readouterr())


def test_a_text_line_cannot_be_forged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jackfield.access"):
        with running(config(checkpoint), options("--access-log", "text")) as server:
            httpx.get(server.url + "/none%0a127.0.0.1%20%22GET%20/")
    (messages,) = [r.getMessage() for r in caplog.records if r.name == "jackfield.access"]
    assert "\n" not in messages
    line = r'"GET /none\\n127.0.0.1 \\"GET /" 404 \d+ bytes 0\.\d+ s \w+ ttft - tokens -$'
    assert re.search(line, messages)
