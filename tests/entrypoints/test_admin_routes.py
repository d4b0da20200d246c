"""The utility routes for operators: load, health, admin; and the model cards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import AsyncEngine
from jackfield.core.errors import EngineStopped
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server import health as health_route

LONG = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    config = engine_config(
        checkpoint,
        device="cpu",
        served_model_name=(MODEL, "other"),
        max_model_len=1024,
        num_gpu_blocks_override=400,
    )
    with running(config, ServerOptions(enable_admin=True)) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("method", "route"), [("POST", "/reset_prefix_cache"), ("GET", "/server_info")]
)
def test_admin_routes_exist_only_where_enabled(
    method: str, route: str, server: Server, checkpoint: Path
) -> None:
    assert httpx.request(method, server.url + route).status_code == 200
    with running(engine_config(checkpoint, device="cpu")) as plain:
        assert httpx.request(method, plain.url + route).status_code == 404


def test_admin_routes_need_the_key(checkpoint: Path) -> None:
    options = ServerOptions(enable_admin=True, api_keys=("a-key-of-an-admin",))
    with running(engine_config(checkpoint, device="cpu"), options) as guarded:
        for method, route in (("POST", "/reset_prefix_cache"), ("GET", "/server_info")):
            assert httpx.request(method, guarded.url + route).status_code == 401
        assert httpx.get(guarded.url + "/load").status_code == 401
        response = httpx.get(
            guarded.url + "/server_info", headers={"Authorization": "Bearer a-key-of-an-admin"}
        )
        assert response.status_code == 200 and "a-key-of-an-admin" not in response.text


def test_the_prefix_cache_is_forgotten_unless_in_use(server: Server) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 4, "max_tokens": 1}

    def cached() -> int:
        response = httpx.post(server.url + "/v1/completions", json=body, timeout=300).json()
        return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    done = httpx.post(server.url + "/reset_prefix_cache")
    assert done.status_code == 200 and done.json() == {"success": True}
    assert cached() == 0
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=300) as response:
        answer_lines = response.iter_lines()
        next(answer_lines)
        refused = httpx.post(server.url + "/reset_prefix_cache")
        assert refused.status_code == 409 and "in use" in refused.json()["error"]["message"]
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


def test_no_cache_is_compacted_without_compression(server: Server) -> None:
    refused = httpx.post(server.url + "/compact_kv_cache")
    assert refused.status_code == 400
    assert "kv_compression" in refused.json()["error"]["message"]


def test_server_info_returns_the_resolved_options(server: Server) -> None:
    info = httpx.get(server.url + "/server_info").json()
    assert info["config"]["max_num_seqs"] == 8 and info["device"] == "cpu"
    assert info["attention_backend"] == "torch" and info["num_blocks"] == 400


def test_server_info_has_what_trainers_read_of_vllms(server: Server) -> None:
    """TRL 1.16 reads each of these, and stops without it."""
    query = {"config_format": "json"}
    config = httpx.get(server.url + "/server_info", params=query).json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert config["model_config"]["dtype"].startswith("torch.")
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["lora_config"] is None


def test_server_info_shows_no_secret(checkpoint: Path) -> None:
    config = engine_config(
        checkpoint, device="cpu", hf_overrides={"x": {"api_key": "s3cret", "url": "u"}}
    )
    with running(config, ServerOptions(enable_admin=True)) as shown:
        response = httpx.get(shown.url + "/server_info")
    assert "s3cret" not in response.text
    assert response.json()["config"]["hf_overrides"] == {"x": {"api_key": "(hidden)", "url": "u"}}


def test_load_counts_requests_until_their_streams_end(server: Server) -> None:
    def load() -> int:
        return int(httpx.get(server.url + "/load").json()["server_load"])

    assert load() == 0
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=300) as item:
        one_lines = item.iter_lines()
        next(one_lines)
        assert load() == 1
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=300) as two:
            two_lines = two.iter_lines()
            next(two_lines)
            assert load() == 2
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    deadline = time.monotonic() + 300
    while load():
        assert time.monotonic() < deadline
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "n": 0})
    assert refused.status_code == 400 and load() == 0


def test_each_served_name_has_a_card_and_is_answered_under(
    server: Server, checkpoint: Path
) -> None:
    cards = httpx.get(server.url + "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [MODEL, "other"]
    for card in cards:
        assert card["root"] == str(checkpoint) and card["parent"] is None
        assert card["max_model_len"] == 1024
        assert httpx.get(f"{server.url}/v1/models/{card['id']}").json() == card
        body = {"model": card["id"], "prompt": "x", "max_tokens": 1}
        response = httpx.post(server.url + "/v1/completions", json=body, timeout=300)
        assert response.json()["model"] == card["id"]
    missing = httpx.get(server.url + "/v1/models/gpt-6")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_tokenize_shows_the_tokens_of_messages(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    body: dict[str, Any] = {"messages": messages, "return_token_strs": True}
    info = httpx.post(server.url + "/tokenize", json=body).json()
    assert info["count"] == len(info["tokens"]) == len(info["token_strs"])
    assert info["token_strs"][0] == "<|im_start|>" and info["max_model_len"] == 1024
    back = httpx.post(server.url + "/detokenize", json={"tokens": info["tokens"]}).json()
    assert back["prompt"] == ("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")


# ---------------------------------------------------------------- health


def test_health_asks_the_worker(checkpoint: Path) -> None:
    """A worker thread that hangs is found out; when it goes on, all is well again."""
    with running(engine_config(checkpoint, device="cpu")) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        hold, held = threading.Event(), threading.Event()

        def hang() -> None:
            held.set()
            hold.wait(300)

        def block(engine: AsyncEngine) -> None:
            engine.core.executor._thread.call(hang)  # type: ignore[attr-defined]

        server.call(block)
        assert held.wait(300)
        with pytest.raises(EngineStopped, match=r"has not answered for 0\.2 seconds"):
            server.call(lambda engine: engine.check_health(0.2))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asking = pool.submit(httpx.get, server.url + "/health", timeout=300)
            hold.set()
            assert asking.result(300).status_code == 200


def test_health_answers_while_the_worker_is_silent(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first how long it has been silent, then that it is at fault, until it replies."""
    monkeypatch.setattr(health_route, "ANSWER_SECONDS", 0.01)
    hold, held, overdue = threading.Event(), threading.Event(), asyncio.Event()
    check_health = AsyncEngine.check_health

    async def check(engine: AsyncEngine) -> dict[str, str]:
        await overdue.wait()
        return await check_health(engine, 300.0 if hold.is_set() else 0.2)

    monkeypatch.setattr(AsyncEngine, "check_health", check)
    with running(engine_config(checkpoint, device="cpu")) as server, httpx.Client() as client:

        def hang() -> None:
            held.set()
            hold.wait(300)

        before = time.monotonic()
        server.call(lambda engine: engine.core.executor._thread.call(hang) and None)  # type: ignore[attr-defined]
        assert held.wait(300)
        url = server.url + "/health"
        first = client.get(url, timeout=300)
        elapsed = time.monotonic() - before
        assert first.status_code == 200 and 0 <= first.json()["silent_seconds"] <= round(elapsed, 1)
        server.call(lambda _: overdue.set())
        while (late := client.get(url, timeout=300)).status_code == 200:
            assert "silent_seconds" in late.json()
        for _ in range(5):  # While the next check runs, too.
            assert client.get(url, timeout=300).status_code == 503
        assert "has not answered for 0.2 seconds" in late.json()["error"]["message"]
        hold.set()
        while client.get(url, timeout=300).status_code == 503:
            pass
        while client.get(url, timeout=300).content:
            pass


def test_health_reports_that_the_step_loop_ended(checkpoint: Path) -> None:
    with running(engine_config(checkpoint, device="cpu")) as server:
        server.call(lambda engine: engine.core.steps.stop())
        response = httpx.get(server.url + "/health")
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"
