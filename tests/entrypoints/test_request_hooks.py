"""`authenticate` and `request_received`, by a distribution from outside that a server finds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest

SOURCE = """
import asyncio

from jackfield import hookimpl
from jackfield.core.errors import AuthenticationFailed, InvalidRequest, RateLimited
from jackfield.core.tenancy import Tenant, TenantLimits

jackfield_api = 3
seen = {}


@hookimpl
async def authenticate(request):
    await asyncio.sleep(0)
    name = request.headers.get("x-account")
    if name == "raises":
        raise KeyError("a secret of the plugin's")
    if name == "banned":
        raise AuthenticationFailed("this account is closed")
    if name == "odd":
        return "not a tenant"
    if name is not None:
        return Tenant(name, f"account:{name}", TenantLimits(max_tokens=4))


@hookimpl
async def request_received(request):
    body, name = request.body, request.tenant.name
    if "raise" in body:
        raise ZeroDivisionError("inside")
    if "spoil" in body:
        request.body = None
        return
    seen[name] = seen.get(name, 0) + 1
    if seen[name] > 3 and name == "poor":
        error = RateLimited(f"{name} has asked {seen[name]} times")
        error.retry_after = 7
        raise error
    if "wish" in body:
        raise InvalidRequest(f"wish: not at {request.route}", param="wish")
    if body.pop("rewrite", None):
        for field in ("prompt", "input"):
            if field in body:
                body[field] = "rewritten"
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "rewritten"}]
        body.setdefault("max_tokens", 2)
"""
MODEL = ("--device", "cpu", "--attention-backend", "torch", "--max-model-len", "256",
         "--num-gpu-blocks-override", "100")  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed distribution, `accounts-for-jackfield`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "accounts_plugin.py").write_text(textwrap.dedent(SOURCE))
    facts = folder / "accounts_for_jackfield-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: accounts-for-jackfield\nVersion: 1.2\n"
    )
    (facts / "entry_points.txt").write_text("[jackfield]\naccounts = accounts_plugin\n")
    return folder


@contextlib.contextmanager
def serving(site: Path, *flags: str) -> Iterator[str]:
    with forked.Tree(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", "--port", "0",
         *MODEL, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": forked.python_path(site)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http"))
        finally:
            process.terminate()


@pytest.fixture(scope="module", params=[(), ("--api-server-count", "2")], ids=["one", "fronts"])
def url(site: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(
        site, "--api-key", "built-in", "--max-model-len", "256", *request.param
    ) as address:
        yield address


ROUTES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
}


def ask(url: str, account: str | None, route: str = "/v1/completions", **body: Any) -> Any:
    headers = {} if account is None else {"X-Account": account}
    return httpx.post(url + route, json={**ROUTES[route], **body}, headers=headers, timeout=60)


def test_a_plugin_says_whose_a_request_is(url: str) -> None:
    assert ask(url, "ann").status_code == 200
    assert ask(url, None).status_code == 401
    keyed = httpx.post(
        url + "/v1/completions", json=ROUTES["/v1/completions"],
        headers={"Authorization": "Bearer built-in"}, timeout=60,
    )  # fmt: skip
    assert keyed.status_code == 200, "the server's own keys come first"
    assert httpx.get(url + "/health").status_code == 200


def test_what_it_refuses_is_the_client_s_answer(url: str) -> None:
    response = ask(url, "banned")
    assert response.status_code == 401
    assert response.json()["error"]["message"] == "this account is closed"


@pytest.mark.parametrize(
    ("account", "what"),
    [("raises", "KeyError in authenticate"), ("odd", "authenticate gave str")],
)
def test_one_that_fails_admits_no_request_and_is_named(url: str, account: str, what: str) -> None:
    response = ask(url, account)
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message == (
        f"plugin accounts of accounts-for-jackfield 1.2 failed on this request: {what}"
    )
    assert ask(url, "ann").status_code == 200


def test_its_tenants_own_what_they_store_and_have_its_limits(url: str) -> None:
    result = ask(url, "ann", "/v1/responses").json()
    for account, status in (("ann", 200), ("bob", 404)):
        actual = httpx.get(f"{url}/v1/responses/{result['id']}", headers={"X-Account": account})
        assert actual.status_code == status
    body = ask(url, "ann", max_tokens=50, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("route", ROUTES)
def test_a_plugin_may_refuse_a_decoded_request(url: str, route: str) -> None:
    response = ask(url, "ann", route, wish="a pony")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"wish: not at {route}"
    assert response.json()["error"]["param"] == "wish"


def test_a_plugin_may_change_a_decoded_request(url: str) -> None:
    plain = ask(url, "ann", "/tokenize", prompt="rewritten").json()["tokens"]
    assert ask(url, "ann", "/tokenize", rewrite=True).json()["tokens"] == plain
    for route in ("/v1/completions", "/v1/chat/completions"):
        request = {
            "rewrite": True,
            "temperature": 0,
            "return_token_ids": True,
            "prompt_logprobs": 0,
        }
        body = ask(url, "ann", route, **request).json()
        first = body["choices"][0]
        ids = body.get("prompt_token_ids") or first.get("prompt_token_ids")
        assert set(plain) <= set(ids)


@pytest.mark.parametrize(
    ("field", "what"), [("raise", "ZeroDivisionError"), ("spoil", "body became NoneType")]
)
@pytest.mark.parametrize("route", ROUTES)
def test_one_that_raises_costs_that_request_alone(
    url: str, route: str, field: str, what: str
) -> None:
    response = ask(url, "ann", route, **{field: 1})
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "accounts of accounts-for-jackfield 1.2" in message and what in message
    assert "inside" not in message
    assert ask(url, "ann", route).status_code == 200


def test_a_quota_is_a_plugin_of_a_few_lines(site: Path) -> None:
    with serving(site) as url:
        responses = [ask(url, "poor") for _ in range(5)]
        assert [response.status_code for response in responses] == [200, 200, 200, 429, 429]
        assert responses[-1].headers["Retry-After"] == "7"
        assert ask(url, "rich").status_code == 200
