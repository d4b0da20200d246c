"""What is counted, at its exact boundaries, with the defaults that most requests leave in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import SCRIPT, Server, engine_config, running, save_scripted

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.batch import manager
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions
from jackfield.entrypoints.openai.responses.store import ResponseStore

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    batches = BatchOptions(tmp_path_factory.mktemp("batches"))
    options = ServerOptions(max_stored_responses=2, batches=batches)
    with running(engine_config(EMBEDDED_MODEL), options) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(folder, tool_call_parser="hermes", reasoning_parser="qwen3")
    with running(config) as running_server:
        yield running_server


def post(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + route, json=body, timeout=60)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events(server: Server, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = {**body, "stream": True}
    text = httpx.post(server.url + route, json=request, timeout=60).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ---------------------------------------------------------------- usage of streams


@pytest.mark.parametrize(
    ("route", "body", "tokens"),
    [
        (COMPLETE, {"prompt": "Hello"}, 9),
        (COMPLETE, {"prompt": "Hello", "n": 2}, 18),
        (COMPLETE, {"prompt": ["Hello", "Hi", "x"]}, 27),
        (COMPLETE, {"prompt": "Hello", "echo": True}, 9),
        (COMPLETE, {"prompt": "Hello", "logprobs": 1}, 9),
        (CHAT, {"messages": MESSAGES}, 9),
        (CHAT, {"messages": MESSAGES, "n": 2}, 18),
        (CHAT, {"messages": MESSAGES, "logprobs": True}, 9),
    ],
)
@pytest.mark.parametrize("continuous", [False, True])
def test_a_stream_counts_all_its_tokens(
    server: Server, route: str, body: dict[str, Any], tokens: int, continuous: bool
) -> None:
    """Whatever way its chunks are encoded."""
    body = {**body, "max_tokens": 9, "ignore_eos": True, "seed": 1}
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = events(server, route, {**body, "stream_options": options})
    assert last["choices"] == [] and len(chunks) > 3
    assert last["usage"]["completion_tokens"] == tokens
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    whole = post(server, route, body)["usage"]
    assert [last["usage"][name] for name in counted] == [whole[name] for name in counted]


@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 9}, ("response", "usage")),
        ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}, ("usage",)),
    ],
)
def test_so_does_a_stream_of_other_protocols(
    server: Server, route: str, body: dict[str, Any], path: tuple[str, ...]
) -> None:
    body = {**body, "ignore_eos": True}
    found: Any = [event for event in events(server, route, body) if path[0] in event][-1]
    for name in path:
        found = found[name]
    assert found["output_tokens"] == 9 == post(server, route, body)["usage"]["output_tokens"]


# ---------------------------------------------------------------- calls that are cut


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", range(5, len(SCRIPT) + 2))
def test_a_call_that_max_tokens_cuts_is_no_finished_call(
    scripted: Server, kept: int, stream: bool
) -> None:
    body = {
        "messages": MESSAGES, "tools": [WEATHER], "temperature": 0, "max_tokens": kept,
    }  # fmt: skip
    if stream:
        chunks = events(scripted, CHAT, body)
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        (reason,) = filter(None, reasons)
        called = any(c["delta"].get("tool_calls") for chunk in chunks for c in chunk["choices"])
    else:
        (choice,) = post(scripted, CHAT, body)["choices"]
        reason, called = choice["finish_reason"], bool(choice["message"].get("tool_calls"))
    ends = kept > len(SCRIPT)
    assert reason == ("tool_calls" if ends else "length")
    if ends:
        assert called


# ---------------------------------------------------------------- stored and background responses


def test_as_many_responses_run_in_the_background_as_are_stored(server: Server) -> None:
    body = {"input": "x", "background": True, "max_output_tokens": 450, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        created = [client.post("/v1/responses", json=body) for _ in range(3)]
        assert [response.status_code for response in created] == [200, 200, 503]
        assert created[2].json()["error"]["type"] == "overloaded_error"
        for response in created[:2]:
            client.post(f"/v1/responses/{response.json()['id']}/cancel")
        last = client.post("/v1/responses", json=body)
        assert last.status_code == 200
        client.post(f"/v1/responses/{last.json()['id']}/cancel")


@pytest.mark.parametrize("body", [{"prompt": 5}, {"prompt": "x", "max_tokens": 1}])
def test_a_request_that_has_ended_is_no_load(server: Server, body: dict[str, Any]) -> None:
    httpx.post(server.url + COMPLETE, json=body, timeout=60)
    assert server.becomes(lambda engine: not engine.core.requests.states)
    assert httpx.get(server.url + "/load").json() == {"server_load": 0}


def test_as_many_batches_are_unfinished_as_the_limit_says(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_UNFINISHED", 2)
    line = {"custom_id": "a", "method": "POST", "url": COMPLETE,
            "body": {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "n": 8}}  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as client:
        files = {"file": ("in.jsonl", json.dumps(line).encode())}
        file = client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        body = {"input_file_id": file["id"], "endpoint": COMPLETE, "completion_window": "24h"}
        created = [client.post("/v1/batches", json=body) for _ in range(3)]
        assert [response.status_code for response in created] == [200, 200, 503]
        for response in created[:2]:
            client.post(f"/v1/batches/{response.json()['id']}/cancel")


def message(id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "user", "content": []}


def test_items_of_responses_that_are_gone_are_gone() -> None:
    """Deleted, dropped to make room, or replaced: nothing is left to grow."""
    store = ResponseStore(2, 1 << 20)
    for number in range(5):
        body = {"id": f"resp_{number}", "output": [message(f"out_{number}")]}
        store.put(body, [message(f"in_{number}")], [message(f"in_{number}")], owner="a")
    find = store.finder("a")
    assert [find(f"in_{n}") is not None for n in range(5)] == [False] * 3 + [True] * 2
    assert [find(f"out_{n}") is not None for n in range(5)] == [False] * 3 + [True] * 2
    assert len(store._brought_by) == 4
    store.put({"id": "resp_4", "output": []}, [], [], owner="a")
    assert store.finder("a")("in_4") is None and len(store._brought_by) == 2
    assert store.delete("resp_3", "a") and store.delete("resp_4", "a")
    assert not store._brought_by and store.num_bytes == 0
