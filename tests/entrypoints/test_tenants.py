"""Keys and their owners: what one stores no other finds, each has its own limits."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import openai
import pytest
from serving import Server, engine_config, running, save_random

from jackfield.core.errors import ConfigError, RateLimited
from jackfield.core.tenancy import Tenant, TenantLimits
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.http.auth import usage
from jackfield.entrypoints.http.auth.api_keys import KeyRing, read_keys
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions

POSTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize",
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/files", "/v1/batches",
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull",
)  # fmt: skip
LONG = {"max_tokens": 900, "ignore_eos": True}
HTTP = httpx.Client(timeout=60)
"""With connections that are open already: a request that runs must not end before the next."""


def entry(name: str, key: str, **limits: int) -> str:
    """A line of a key file, by the command."""
    stdin, stdout = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO(key), io.StringIO()
    try:
        flags = [f"--{limit.replace('_', '-')}={value}" for limit, value in limits.items()]
        assert main(["keys", "add", name, *flags]) == 0
        return sys.stdout.getvalue()
    finally:
        sys.stdin, sys.stdout = stdin, stdout


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    path.write_text(
        "# who may come\n"
        + entry("ann", "ann-1")
        + entry("ann", "ann-2")
        + entry("tight", "tight", max_concurrency=1, max_tokens=3)
        + entry("single", "single", max_concurrency=1)
        + entry("rare", "rare", requests_per_minute=3)
        + "".join(entry(route, route, requests_per_minute=1) for route in POSTED)
        + "bob\n"
    )
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Server]:
    options = ServerOptions(
        api_keys=("eve",),
        api_key_files=(key_file,),
        batches=BatchOptions(tmp_path_factory.mktemp("batches")),
    )
    config = engine_config(save_random(tmp_path_factory.mktemp("random")), max_model_len=1024)
    with running(config, options) as running_server:
        yield running_server


def client(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def complete(server: Server, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    request = {"prompt": "x", "max_tokens": 2, **body}
    return HTTP.post(server.url + "/v1/completions", json=request, headers=headers)


# ---------------------------------------------------------------- owners


def batch_file(number: int = 1) -> bytes:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "x", "max_tokens": 50, "ignore_eos": True}}
        for i in range(number)
    ]  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_files_and_batches_of_one_key_are_not_there_for_another(server: Server) -> None:
    ann, bob = client(server, "ann-1"), client(server, "bob")
    file = ann.files.create(file=("a.jsonl", batch_file()), purpose="batch")
    batch = ann.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while (final := ann.batches.retrieve(batch.id)).status != "completed":
        time.sleep(0.02)
    assert final.output_file_id is not None
    for file_id in (file.id, final.output_file_id):
        for method in (bob.files.retrieve, bob.files.delete, bob.files.content):
            with pytest.raises(openai.NotFoundError):
                method(file_id)
    for method in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            method(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    with pytest.raises(openai.NotFoundError):
        bob.files.list(after=file.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.list(after=batch.id)
    assert bob.files.list().data == [] and bob.batches.list().data == []
    renewed = client(server, "ann-2")
    assert {item.id for item in renewed.files.list().data} == {file.id, final.output_file_id}
    assert [item.id for item in renewed.batches.list().data] == [batch.id]
    assert renewed.files.content(final.output_file_id).text
    renewed.files.delete(file.id)


def test_responses_of_one_key_are_not_there_for_another(server: Server) -> None:
    ann, bob = client(server, "ann-1"), client(server, "bob")
    response = ann.responses.create(input="hello", max_output_tokens=2)
    item = ann.responses.input_items.list(response.id).data[0]
    for method in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel,
                bob.responses.input_items.list):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            method(response.id)
    for wish in ({"previous_response_id": response.id},
                 {"input": [{"type": "item_reference", "id": item.id}]}):  # fmt: skip
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            bob.responses.create(**{"input": "x", "max_output_tokens": 2, **wish})
        assert ann.responses.create(**{"input": "x", "max_output_tokens": 2, **wish})
    assert client(server, "ann-2").responses.retrieve(response.id).id == response.id


def test_a_background_response_is_its_owner_s_while_it_runs(server: Server) -> None:
    ann, bob = client(server, "ann-1"), client(server, "bob")
    response = ann.responses.create(
        input="hello", background=True, max_output_tokens=300, extra_body={"ignore_eos": True}
    )
    for method in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            method(response.id)
    assert ann.responses.retrieve(response.id).status in ("queued", "in_progress", "completed")
    ann.responses.delete(response.id)


def test_ids_that_clients_choose_are_each_key_s_own(server: Server) -> None:
    """Of items: what one key sends does not hide another's item of the same id."""
    for key in ("ann-1", "bob"):
        item = {"id": "msg_same", "type": "message", "role": "user", "content": f"from {key}"}
        client(server, key).responses.create(
            input=[item],  # type: ignore[list-item]
            max_output_tokens=2,
        )
    for key in ("ann-1", "bob"):
        owner = client(server, key)
        response = owner.responses.create(
            input=[{"type": "item_reference", "id": "msg_same"}], max_output_tokens=2
        )
        (found,) = owner.responses.input_items.list(response.id).data
        assert found.content[0].text == f"from {key}"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_running_request_s_id_is_in_use_for_its_own_key_alone(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    def send(key: str, **fields: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        request = {**body, **LONG, "request_id": "same", **fields}
        return HTTP.stream("POST", server.url + route, json=request, headers=headers)

    with send("ann-1", stream=True) as running_request:
        lines = running_request.iter_lines()
        next(lines)
        with send("ann-2", max_tokens=1) as again:
            assert again.status_code == 400
            error = json.loads(again.read())["error"]
        with send("bob", max_tokens=1) as other:
            assert other.status_code == 200
            assert json.loads(other.read())["id"].endswith("-same")
    assert error["param"] == "request_id" and "-same' is in use" in error["message"]
    assert "\\" not in error["message"], "the id as the client sees it"


def cached(server: Server, key: str, route: str, body: dict[str, Any]) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(server.url + route, json=body, headers=headers, timeout=60)
    assert response.status_code == 200
    usage_fields = response.json()["usage"]
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage_fields:
            return int(usage_fields[details]["cached_tokens"])
    return int(usage_fields["cache_read_input_tokens"])


def prompts(text: str) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": f"{text} chat " * 30}]
    return [
        ("/v1/completions", {"prompt": f"{text} completion " * 30, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
        ("/v1/responses", {"input": f"{text} response " * 30, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": f"{text} message " * 30}],
                          "max_tokens": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize("salt", [None, "mine"])
def test_the_cache_tells_no_key_what_another_sent(server: Server, salt: str | None) -> None:
    for route, request in prompts(f"salt {salt}"):
        body = request if salt is None else {**request, "cache_salt": salt}
        assert cached(server, "ann-1", route, body) == 0
        assert cached(server, "ann-2", route, body) > 0, f"{route}: the owner's own"
        assert cached(server, "bob", route, body) == 0, route
        assert cached(server, "eve", route, body) == 0, route


def test_keys_share_cached_prefixes_where_the_server_says_so(
    tmp_path: Path, key_file: Path
) -> None:
    options = ServerOptions(api_key_files=(key_file,), share_prefix_cache=True)
    with running(engine_config(save_random(tmp_path)), options) as sharing:
        for route, request in prompts("shared"):
            assert cached(sharing, "ann-1", route, request) == 0
            assert cached(sharing, "bob", route, request) > 0, route
            salted = {**request, "cache_salt": "mine"}
            assert cached(sharing, "bob", route, salted) == 0, "but with a salt of its own"


def test_a_client_cannot_name_its_tenant(server: Server) -> None:
    from jackfield.entrypoints.http.auth.tenants import HEADER, tenant_header

    ann = client(server, "ann-1")
    response = ann.responses.create(input="hello", max_output_tokens=2)
    forged = tenant_header(Tenant("ann", KeyRing(["x"])._keys[0].tenant.owner))
    with pytest.raises(openai.NotFoundError):
        client(server, "bob").responses.retrieve(response.id, extra_headers={HEADER: forged})


# ---------------------------------------------------------------- limits


def test_a_key_has_its_own_number_of_requests_at_once(server: Server) -> None:
    headers = {"Authorization": "Bearer single"}
    body = {"input": "x", "stream": True, "max_output_tokens": 900, "ignore_eos": True}
    with HTTP.stream("POST", server.url + "/v1/responses", json=body, headers=headers) as first:
        lines = first.iter_lines()
        next(lines)
        usage_full = complete(server, "single")
        others = complete(server, "bob")
    assert first.status_code == others.status_code == 200 and usage_full.status_code == 429
    assert usage_full.headers["Retry-After"] == "1"
    assert usage_full.json()["error"]["type"] == "rate_limit_error"
    assert server.becomes(lambda engine: not engine.core.requests.states)


def test_no_answer_is_longer_than_the_key_allows(server: Server) -> None:
    for request in ({"max_tokens": 50}, {"max_tokens": None}, {"max_tokens": 2}):
        body = complete(server, "tight", ignore_eos=True, **request).json()
        assert body["usage"]["completion_tokens"] == min(request["max_tokens"] or 3, 3)
    tight = client(server, "tight")
    response = tight.responses.create(input="x", extra_body={"ignore_eos": True})
    assert response.usage is not None and response.usage.output_tokens == 3
    chat = tight.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_completion_tokens=9,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert chat.usage is not None and chat.usage.completion_tokens == 3


@pytest.mark.parametrize("route", POSTED)
def test_every_route_that_does_work_counts(server: Server, route: str) -> None:
    """Its key, which has the route's name, has one request a minute."""
    headers = {"Authorization": f"Bearer {route}"}
    first, second = (
        httpx.post(server.url + route, json={}, headers=headers, timeout=60) for _ in range(2)
    )
    assert 400 <= first.status_code < 500 and first.status_code != 429
    assert second.status_code == 429 and int(second.headers["Retry-After"]) > 1
    assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("route", "content"),
    [
        ("/v1/completions", b'{"prompt": "x", "n": -1}'),
        ("/v1/chat/completions", b'{"messages": 5}'),
        ("/v1/responses", b'{"input": []}'),
        ("/v1/messages", b"{}"),
        ("/tokenize", b"no JSON"),
        ("/v1/completions", b"x" * (33 << 20)),
    ],
)
def test_a_request_that_fails_is_counted_no_longer(
    server: Server, route: str, content: bytes
) -> None:
    headers = {"Authorization": "Bearer tight", "Content-Type": "application/json"}
    refused = httpx.post(server.url + route, content=content, headers=headers, timeout=60)
    assert refused.status_code in (400, 413)
    assert complete(server, "tight").status_code == 200


def test_a_client_that_leaves_is_counted_no_longer(server: Server) -> None:
    headers = {"Authorization": "Bearer single"}
    body = {"prompt": "x", "stream": True, **LONG}
    url = server.url + "/v1/completions"
    with HTTP.stream("POST", url, json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        assert complete(server, "single").status_code == 429
    assert server.becomes(lambda engine: not engine.core.requests.states)
    assert complete(server, "single").status_code == 200


def test_a_background_response_counts_until_it_ends(server: Server) -> None:
    single = client(server, "single")
    for stream in (False, True):
        created: Any = single.responses.create(
            input="x", background=True, stream=stream, max_output_tokens=900,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        if stream:
            events = iter(created)
            id = next(events).response.id
            created.close()  # The response goes on without its client.
            assert server.becomes(lambda engine: bool(engine.core.requests.states))
        else:
            id = created.id
        assert complete(server, "single").status_code == 429
        cancelled = single.responses.cancel(id)  # Which is always possible.
        assert cancelled.status == "cancelled" and cancelled.usage.output_tokens < 900
        assert complete(server, "single").status_code == 200


def test_lines_of_a_batch_count_and_wait(server: Server) -> None:
    rare = client(server, "rare")
    file = rare.files.create(file=("a.jsonl", batch_file(3)), purpose="batch")
    batch = rare.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while (state := rare.batches.retrieve(batch.id)).request_counts.completed < 1:
        assert state.status != "failed"
    assert complete(server, "rare").status_code == 429, "the line was the third request"
    counts = rare.batches.cancel(batch.id).request_counts
    assert counts is not None and counts.failed == 0 and counts.completed < 3


def test_nor_in_a_batch(server: Server) -> None:
    tight = client(server, "tight")
    file = tight.files.create(file=("a.jsonl", batch_file(2)), purpose="batch")
    batch = tight.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while (final := tight.batches.retrieve(batch.id)).status != "completed":
        time.sleep(0.02)
    assert final.output_file_id is not None
    for line in tight.files.content(final.output_file_id).text.splitlines():
        assert json.loads(line)["response"]["body"]["usage"]["completion_tokens"] == 3


def test_requests_a_minute_come_back_evenly() -> None:
    now = [1000.0]
    counts = usage.Usage(clock=lambda: now[0])
    tenant = Tenant("t", "t", TenantLimits(requests_per_minute=6))
    for _ in range(6):
        counts.begin(tenant)
    with pytest.raises(RateLimited) as caught:
        counts.begin(tenant)
    assert caught.value.retry_after is not None and 9 <= caught.value.retry_after <= 11
    now[0] += 10.5
    counts.begin(tenant)
    with pytest.raises(RateLimited):
        counts.begin(tenant)
    counts.begin(Tenant("other", "other", TenantLimits(requests_per_minute=1)))


def test_an_idle_hour_saves_up_one_minute_s_requests() -> None:
    now = [1000.0]
    counts = usage.Usage(clock=lambda: now[0])
    tenant = Tenant("t", "t", TenantLimits(requests_per_minute=3))
    counts.begin(tenant)
    now[0] += 3600
    for _ in range(3):
        counts.begin(tenant)
    with pytest.raises(RateLimited):
        counts.begin(tenant)


def test_a_clock_that_is_set_back_locks_no_one_out() -> None:
    now = [10_000.0]
    counts = usage.Usage(clock=lambda: now[0])
    tenant = Tenant("t", "t", TenantLimits(requests_per_minute=6))
    for _ in range(6):
        counts.begin(tenant)
    now[0] -= 9000
    with pytest.raises(RateLimited):
        counts.begin(tenant)
    now[0] += 10.5
    counts.begin(tenant)
    with pytest.raises(RateLimited):
        counts.begin(tenant)


def test_front_ends_count_together_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    first, second = (usage.Usage(2, front, path) for front in (0, 1))
    tenant = Tenant("t", "t", TenantLimits(max_concurrency=2, requests_per_minute=100))
    first.begin(tenant)
    second.begin(tenant)
    for counts in (first, second):
        with pytest.raises(RateLimited, match="2 requests are being answered"):
            counts.begin(tenant)
    again = usage.Usage(2, 1, path)  # In the place of the second one, which was killed.
    again.begin(tenant)
    with pytest.raises(RateLimited):
        first.begin(tenant)
    again.end(tenant)
    first.end(tenant)
    rate = Tenant("r", "r", TenantLimits(requests_per_minute=3))
    for counts in (first, again, first):
        counts.begin(rate)
    with pytest.raises(RateLimited):
        again.begin(rate)


def test_more_tenants_than_rows_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "NUM_ROWS", 8)
    monkeypatch.setattr(usage, "NEAR", 8)
    counts = usage.Usage()
    for number in range(50):
        tenant = Tenant(str(number), str(number), TenantLimits(max_concurrency=1))
        counts.begin(tenant)
        with pytest.raises(RateLimited):
            counts.begin(tenant)
        counts.end(tenant)


# ---------------------------------------------------------------- files of keys


def test_a_key_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    ring = KeyRing((), [path])
    assert len(ring) == 1
    path.write_text(entry("two", "two") + "one\n")
    ring.reload()
    assert len(ring) == 2
    path.write_text('{"name": "x"}\n')
    ring.reload()
    assert len(ring) == 2
    assert "the keys stay as they were" in caplog.text and f"{path}:1" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "x"}', "digest"),
        ('{"name": "x", "digest": "abc"}', "must be sha256:"),
        ('{"name": "", "digest": "abc"}', "name"),
        ('{"name": "x", "digest": "abc", "max_token": 1}', "max_token"),
        ('{"name": "x", "digest": "abc", "max_tokens": 0}', "max_tokens"),
        ("{", "truncated"),
    ],
)
def test_a_wrong_line_is_reported_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# one\n\n{line}\n")
    with pytest.raises(ConfigError, match="api-key-file") as caught:
        read_keys(path)
    assert f"{path}:3" in str(caught.value) and message in str(caught.value)


def test_a_new_key_is_shown_once_and_its_file_holds_the_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    assert main(["keys", "new", "ann", "--file", str(path), "--requests-per-minute", "5"]) == 0
    key = capsys.readouterr().out.strip()
    assert len(key) > 40 and key not in path.read_text()
    assert os.stat(path).st_mode & 0o077 == 0
    (read,) = read_keys(path)
    assert read.tenant.name == "ann" and read.tenant.limits.requests_per_minute == 5
    assert read == read_keys(path)[0]


@pytest.mark.slow
def test_front_ends_know_owners_limits_and_new_keys(tmp_path: Path) -> None:
    """As processes: whichever answers, one key's limits are counted together, and SIGHUP reaches
    all."""
    path = tmp_path / "keys"
    path.write_text(entry("ann", "ann") + entry("bob", "bob", requests_per_minute=2))
    command = [
        sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", "--port", "0",
        "--api-server-count", "2", "--api-key-file", str(path), "--device", "cpu",
        "--attention-backend", "torch", "--max-model-len", "256",
        "--num-gpu-blocks-override", "100",
    ]  # fmt: skip
    with forked.Tree(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = next(word for word in line.split() if word.startswith("http"))

            def status(key: str, route: str, body: Any = None) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
                method = "GET" if body is None else "POST"
                response = httpx.request(
                    method, url + route, json=body, headers=headers, timeout=60
                )
                return response.status_code, response.json()

            request = {"input": "x", "max_output_tokens": 2}
            for _ in range(4):  # Connections reach one front end or the other.
                _, created = status("ann", "/v1/responses", request)
                assert status("ann", f"/v1/responses/{created['id']}")[0] == 200
                assert status("bob", f"/v1/responses/{created['id']}")[0] == 404
            statuses = [status("bob", "/v1/responses", request)[0] for _ in range(6)]
            assert statuses == [200, 200, 429, 429, 429, 429]
            assert status("new", "/v1/models")[0] == 401
            with path.open("a") as file:
                file.write("new\n")
            process.send_signal(signal.SIGHUP)
            known = 0
            while known < 8:  # In a row, so by both.
                known = known + 1 if status("new", "/v1/models")[0] == 200 else 0
        finally:
            process.terminate()
