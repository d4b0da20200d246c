"""`kv_compression` over HTTP: requests say how much stays, and responses what is left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import running, save_random

from jackfield import EngineConfig
from jackfield.entrypoints.http.options import ServerOptions

BODY = {"prompt": [5, 6, 7, 8] * 25, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = save_random(tmp_path_factory.mktemp("random"))
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=160,
        kv_compression="window", kv_compression_ratio=0.2,
    )  # fmt: skip
    with (
        running(config, ServerOptions(enable_admin=True)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def model(client: httpx.Client) -> str:
    return str(client.get("/v1/models").json()["data"][0]["id"])


def complete(client: httpx.Client, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {**BODY, "model": model(client), **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    return dict(response.json())


def test_usage_has_the_tokens_that_are_left(client: httpx.Client) -> None:
    details = {
        name: complete(client, kv_compression=value)["usage"].get("kv_cache_details")
        for name, value in {
            "engine": None, "ratio": {"ratio": 0.5}, "budget": {"budget": 30}, "off": "off",
        }.items()
    }  # fmt: skip
    saved = {name: each and each.pop("saved_bytes") for name, each in details.items()}
    assert details == {
        "engine": {"kept_tokens": 22, "dropped_tokens": 80, "compactions": 1},
        "ratio": {"kept_tokens": 52, "dropped_tokens": 50, "compactions": 1},
        "budget": {"kept_tokens": 32, "dropped_tokens": 70, "compactions": 1},
        "off": None,
    }
    # Of 7 blocks of 16 tokens, 5, 3 and 5 come back.
    assert saved["engine"] * 3 == saved["ratio"] * 5 == saved["budget"] * 3 > 0


def test_a_stream_has_them_in_its_last_chunk(client: httpx.Client) -> None:
    body = {
        **BODY,
        "model": model(client),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = client.post("/v1/completions", json=body).text
    assert text.count("kv_cache_details") == 1
    assert '"kept_tokens":22,"dropped_tokens":80' in text.replace(" ", "")


def test_responses_and_messages_have_them_too(client: httpx.Client) -> None:
    """By the request's own budget: the prompt has more tokens than that."""
    text = "a b c d e f g h " * 4
    common = {"model": model(client), "temperature": 0, "ignore_eos": True}
    compression = {"kv_compression": {"budget": 20}}
    messages = [{"role": "user", "content": text}]
    for route, own in (
        ("/v1/responses", {"input": text, "max_output_tokens": 3}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
    ):
        body = {**common, **own}
        usage = client.post(route, json={**body, **compression}).json()["usage"]
        # A message's prompt without what the prefix cache had.
        prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        dropped = prompt + 2 - 22
        details = {"kept_tokens": 22, "dropped_tokens": dropped, "compactions": 1}
        assert usage["kv_cache_details"].pop("saved_bytes") > 0
        assert usage["kv_cache_details"] == details and dropped > 0
        whole = client.post(route, json={**body, "kv_compression": "off"}).json()["usage"]
        assert "kv_cache_details" not in whole
        streamed = client.post(route, json={**body, **compression, "stream": True}).text
        assert '"kept_tokens":22' in streamed.replace(" ", "")


def test_ollama_s_chat_has_them_too(client: httpx.Client) -> None:
    body = {
        "model": model(client),
        "messages": [{"role": "user", "content": "a b c d e f g h " * 4}],
        "options": {"num_predict": 3},
        "ignore_eos": True,
        "kv_compression": {"budget": 20},
    }
    *_, last = (json.loads(line) for line in client.post("/api/chat", json=body).iter_lines())
    dropped = last["prompt_eval_count"] + 2 - 22
    details = {"kept_tokens": 22, "dropped_tokens": dropped, "compactions": 1}
    assert last["kv_cache_details"].pop("saved_bytes") > 0
    assert last["kv_cache_details"] == details and dropped > 0


def test_an_operator_compacts_what_runs(client: httpx.Client) -> None:
    """A request that keeps its whole cache is not touched, and none runs afterwards."""
    assert client.post("/compact_kv_cache").json() == {"requests": 0}


def test_wrong_values_are_refused_by_name(client: httpx.Client) -> None:
    for value, field in (
        ("half", "kv_compression"),
        ({"ratio": 2}, "kv_compression.ratio"),
        ({"budget": 0}, "kv_compression.budget"),
    ):
        assert complete(client, 400, kv_compression=value)["error"]["param"] == field
