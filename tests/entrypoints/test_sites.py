"""Pages of other sites: what a browser sends for them is refused on a server without keys."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Server, engine_config, running, save_random

from jackfield.entrypoints.http.cross_origin import cross_site as sites
from jackfield.entrypoints.http.options import Cors, ServerOptions

ASK = {"prompt": "x", "max_tokens": 1}
FRIEND, STRANGER = "https://friend.example", "https://stranger.example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """As `jackfield serve` comes, and one site let in."""
    with running(engine_config(checkpoint), ServerOptions(cors=Cors((FRIEND,)))) as running_server:
        yield running_server


def status(server: Server, route: str = "/v1/completions", **headers: str) -> int:
    return httpx.post(server.url + route, json=ASK, headers=headers, timeout=60).status_code


def test_a_page_of_another_site_cannot_make_the_server_work(server: Server) -> None:
    assert status(server, Origin=STRANGER) == 403
    assert status(server, Origin="null") == 403
    assert status(server, Origin="http://127.0.0.1:1") == 403, "another port is another site"
    text = httpx.post(
        server.url + "/v1/completions", content=b'{"prompt":"x"}',
        headers={"Content-Type": "text/plain"},
    )  # fmt: skip
    assert text.status_code == 415, "which a browser would send unasked"
    blob = httpx.post(server.url + "/v1/completions", content=b'{"prompt":"x"}')
    assert blob.status_code == 415, "and without a type, too"
    assert status(server, "/v1/responses/x/cancel", Origin=STRANGER) == 403, "nor without a body"


def test_its_own_page_and_sites_that_are_let_in_can(server: Server) -> None:
    assert status(server) == 200
    assert status(server, Origin=FRIEND) == 200
    assert status(server, Origin=server.url) == 200
    host = f"localhost:{urlsplit(server.url).port}"
    assert status(server, Host=host, Origin=f"http://{host}") == 200


@pytest.mark.parametrize("host", ["rebound.example", "localhost.example", "127.0.0.1.example"])
def test_a_name_that_was_made_to_lead_here_is_not_answered_to(server: Server, host: str) -> None:
    for route in ("/v1/models", "/metrics", "/", "/v1/responses/x"):
        response = httpx.get(server.url + route, headers={"Host": host})
        assert response.status_code == 403, route
        assert "--allowed-hosts" in response.json()["error"]["message"]
    assert status(server, Host=f"{host}:80", Origin=f"http://{host}") == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "me.localhost", "127.0.0.1", "[::1]"])
def test_names_and_addresses_of_this_machine_are(server: Server, host: str) -> None:
    assert httpx.get(server.url + "/v1/models", headers={"Host": host}).status_code == 200


def test_a_check_of_health_without_a_host_is_answered(server: Server) -> None:
    """HTTP/1.0 permits it, and load balancers send it; every browser sends `Host`."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(100).split()[1] == b"200"


def test_a_key_stands_for_both_checks(checkpoint: Path) -> None:
    with running(engine_config(checkpoint), ServerOptions(api_keys=("k",))) as item:
        assert status(item, Origin=STRANGER, Authorization="Bearer k", Host="proxy.example") == 200
        assert status(item, Origin=STRANGER) == 401


def test_allowed_hosts_hold_with_a_key_too(checkpoint: Path) -> None:
    options = ServerOptions(api_keys=("k",), allowed_hosts=("llm.example", "*.inner.example"))
    with running(engine_config(checkpoint), options) as item:
        for host, expected in (
            ("llm.example", 200), ("LLM.example.:443", 200), ("a.b.inner.example", 200),
            ("inner.example", 403), ("xinner.example", 403), ("localhost", 403), ("10.0.0.7", 200),
        ):  # fmt: skip
            assert status(item, Host=host, Authorization="Bearer k") == expected, host


@pytest.mark.parametrize(
    ("host", "hosts"),
    [
        ("127.0.0.1", ("localhost", "*.localhost", "127.0.0.1")),
        ("localhost", ("localhost", "*.localhost", "localhost")),
        ("::1", ("localhost", "*.localhost", "::1")),
        ("0.0.0.0", ("*",)),
        ("", ("*",)),
        ("gpu7", ("*",)),
    ],
)
def test_a_server_that_others_reach_answers_to_every_name(host: str, hosts: tuple[str]) -> None:
    assert sites.default_hosts(host) == hosts


def test_sites_are_compared_by_name_and_port() -> None:
    assert sites.same_site("https://a.example", "a.example")
    assert sites.same_site("https://A.example:443", "a.example")
    assert sites.same_site("http://[::1]:8000", "[::1]:8000")
    assert not sites.same_site("https://a.example:8443", "a.example")
    assert not sites.same_site("https://b.example", "a.example")
    assert not sites.same_site("null", "a.example")
