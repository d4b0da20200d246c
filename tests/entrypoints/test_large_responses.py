"""Log-probabilities and vectors are bounded, and large responses are built off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from encoders import minilm
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield.core.engine.async_engine import AsyncEngine
from jackfield.entrypoints.http import context, large_responses, streaming
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.openai.common import logprobs
from jackfield.entrypoints.openai.pooling import routes as pooling
from jackfield.entrypoints.server.app import make_app

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LIMIT = 4000
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "temperature": 0, "ignore_eos": True, "logprobs": 5},
    CHAT: {
        "messages": MESSAGES, "temperature": 0, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 5,
    },
    RESPONSES: {"input": "hi", "temperature": 0, "top_logprobs": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_random(tmp_path_factory.mktemp("random"))
    with running(config(checkpoint, max_logprobs_per_request=LIMIT)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    options = {"max_model_len": None, "attention_backend": "auto"}
    with running(config(minilm(), **options)) as server:
        yield server


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + route, json={**BODIES.get(route, {}), **body}, timeout=120)


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert f"max_logprobs_per_request={LIMIT}" in error["message"]
    return error


PROMPT = [5] * 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "fits", "param", "more"),
    [
        (CHAT, {"n": 6, "max_tokens": 111}, "logprobs", {"n": 7, "max_tokens": 111}),
        (CHAT, {"top_logprobs": 0, "n": 10, "max_tokens": 400}, "logprobs",
         {"top_logprobs": 0, "n": 10, "max_completion_tokens": 401}),
        (COMPLETIONS, {"n": 8, "max_tokens": 83}, "logprobs", {"n": 8, "max_tokens": 84}),
        # All prompts of a body together.
        (COMPLETIONS, {"prompt": ["hi"] * 8, "max_tokens": 83}, "logprobs",
         {"prompt": ["hi"] * 8, "max_tokens": 84}),
        (COMPLETIONS, {"prompt": [PROMPT] * 6, "logprobs": None, "prompt_logprobs": 5},
         "prompt_logprobs", {"prompt": [PROMPT] * 7, "logprobs": None, "prompt_logprobs": 5}),
        (COMPLETIONS, {"prompt": [PROMPT] * 6, "echo": True, "max_tokens": 1}, "logprobs",
         {"prompt": [PROMPT] * 7, "echo": True, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [PROMPT] * 20, "logprobs": None, "prompt_logprobs": 5,
                       "truncate_prompt_tokens": 30, "max_tokens": 1},
         "prompt_logprobs", {"prompt": [PROMPT] * 20, "logprobs": None, "prompt_logprobs": 5,
                             "truncate_prompt_tokens": 35, "max_tokens": 1}),
    ],
)  # fmt: skip
def test_log_probabilities_of_a_request_are_bounded_in_sum(
    server: Server,
    route: str,
    fits: dict[str, Any],
    param: str,
    more: dict[str, Any],
    stream: bool,
) -> None:
    error = refusal(post(server, route, stream=stream, **more))
    if "echo" not in more:
        assert error["param"] == param
        assert param in error["message"]
    if param == "logprobs" and "echo" not in more:
        name = "max_completion_tokens" if "max_completion_tokens" in more else "max_tokens"
        assert f"{name}=" in error["message"] and "n=" in error["message"]
    if not stream:
        assert post(server, route, **fits).status_code == 200


def test_a_request_without_max_tokens_ends_at_the_bound(server: Server) -> None:
    response = post(server, CHAT, n=8)
    (reason,) = {choice["finish_reason"] for choice in response.json()["choices"]}
    assert reason == "length"
    for choice in response.json()["choices"]:
        assert len(choice["logprobs"]["content"]) == LIMIT // (8 * 6)
    refusal(post(server, RESPONSES, max_output_tokens=490, top_logprobs=20))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that build log-probabilities."""
    names: set[str] = set()
    for name in ("_ranked", "_prompt_position"):
        real = getattr(logprobs, name)

        def noted(position: Any, real: Any = real) -> Any:
            names.add(threading.current_thread().name)
            return real(position)

        monkeypatch.setattr(logprobs, name, noted)
    return names


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few tokens a large response of many pieces."""
    monkeypatch.setattr(large_responses, "FEW_VALUES", 4)
    monkeypatch.setattr(streaming, "FEW_VALUES", 4)
    monkeypatch.setattr(logprobs, "AT_ONCE", 3)
    monkeypatch.setattr(pooling, "AT_ONCE", 100)
    monkeypatch.setattr(pooling, "BASE64_BYTES", 300)
    monkeypatch.setattr(context, "LARGE_BODY", 1000)


def without_ids(body: dict[str, Any]) -> Any:
    text = json.dumps(body)
    for name in ("id", "request_id", "item_id"):
        text = text.replace(f'"{body.get(name)}"', '"-"')
    plain = json.loads(text)
    for name in ("created", "created_at", "completed_at"):
        plain.pop(name, None)
    for item in plain.get("output", ()):
        item.pop("id")
    return plain


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (COMPLETIONS, {"max_tokens": 16}),
        (COMPLETIONS, {"max_tokens": 16, "return_tokens_as_token_ids": True}),
        (COMPLETIONS, {"max_tokens": 16, "echo": True, "prompt": "One two three four five"}),
        (COMPLETIONS, {"max_tokens": 1, "logprobs": None, "prompt_logprobs": 5, "prompt": PROMPT}),
        (CHAT, {"max_tokens": 16, "n": 2}),
        (CHAT, {"max_tokens": 1, "prompt_logprobs": 3}),
        (RESPONSES, {"max_output_tokens": 20}),
    ],
)
def test_a_large_response_is_built_on_a_thread_and_is_the_same(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    threads: set[str],
    route: str,
    fields: dict[str, Any],
) -> None:
    loop = server.call(lambda _: threading.current_thread().name)
    whole = post(server, route, **fields)
    assert whole.status_code == 200 and threads == {loop}
    lower_limits(monkeypatch)
    threads.clear()
    in_pieces = post(server, route, **fields)
    assert int(in_pieces.headers["Content-Length"]) == len(in_pieces.content)
    assert without_ids(in_pieces.json()) == without_ids(whole.json())
    assert threads and loop not in threads


def chunks(text: str) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.split("\n")
        if line.startswith("data: {")
    ]


def streamed(server: Server, route: str, **fields: Any) -> list[Any]:
    """The log-probabilities of a stream, in order of its choices, of all chunks together: of
    tokens, then of prompts, wherever the stream was cut into chunks."""
    found: list[Any] = []
    prompts: list[Any] = []
    received = chunks(post(server, route, stream=True, **fields).text)
    received.sort(key=lambda c: c["choices"][0]["index"] if c.get("choices") else 0)
    for chunk in received:
        for choice in chunk.get("choices", ()):
            table = choice.get("logprobs") or {}
            found += table.get("content") or table.get("token_logprobs") or ()
            prompts += choice.get("prompt_logprobs") or ()
        prompts += chunk.get("prompt_logprobs") or ()
        if chunk.get("type") == "response.output_text.delta":
            found += chunk["logprobs"]
    return found + prompts


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (COMPLETIONS, {"max_tokens": 8, "logprobs": None, "prompt_logprobs": 5, "prompt": PROMPT}),
        (COMPLETIONS, {"max_tokens": 8, "prompt_logprobs": 5, "prompt": ["One two three"] * 2}),
        (CHAT, {"max_tokens": 8, "prompt_logprobs": 5}),
        (CHAT, {"max_tokens": 8}),
        (RESPONSES, {"max_output_tokens": 20}),
    ],
)
def test_large_chunks_of_a_stream_are_encoded_on_a_thread(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    threads: set[str],
    route: str,
    fields: dict[str, Any],
) -> None:
    loop = server.call(lambda _: threading.current_thread().name)
    whole = streamed(server, route, **fields)
    assert whole
    lower_limits(monkeypatch)
    for module in (large_responses, streaming):  # Every chunk with log-probabilities is large.
        monkeypatch.setattr(module, "FEW_VALUES", 1)
    threads.clear()
    assert streamed(server, route, **fields) == whole
    assert threads and loop not in threads


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling", "token_embed"])
def test_many_vectors_are_encoded_on_a_thread_and_are_the_same(
    embedder: Server, monkeypatch: pytest.MonkeyPatch, route: str, encoding: str
) -> None:
    body: dict[str, Any] = {"input": ["one two three", "four"], "encoding_format": encoding}
    if route == "token_embed":
        route, body["task"] = "/pooling", "token_embed"
    loop = embedder.call(lambda _: threading.current_thread().name)
    whole = post(embedder, route, **body).json()["data"]
    lower_limits(monkeypatch)
    names = set()
    real = pooling.numbers

    def noted(data: np.ndarray, encoding_format: str) -> Any:
        names.add(threading.current_thread().name)
        return real(data, encoding_format)

    monkeypatch.setattr(pooling, "numbers", noted)
    assert post(embedder, route, **body).json()["data"] == whole
    assert names and loop not in names


def test_the_numbers_of_all_vectors_are_bounded_in_sum(
    embedder: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = post(embedder, "/v1/embeddings", input="x").json()["data"][0]["embedding"]
    monkeypatch.setattr(pooling, "MAX_VALUES", 3 * len(size))
    assert post(embedder, "/v1/embeddings", input=["x"] * 3).status_code == 200
    response = post(embedder, "/v1/embeddings", input=["x"] * 4)
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"
    tokens = "one two three four five six"
    response = post(embedder, "/pooling", input=tokens, task="token_embed")
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"
    embedder.call(lambda engine: engine.core.check_idle())


async def test_an_engine_refuses_and_bounds_as_the_server_does() -> None:
    from jackfield import EngineConfig, SamplingParams
    from jackfield.core.errors import InvalidRequest

    config = EngineConfig(
        device="cpu", attention_backend="torch", max_model_len=128, num_gpu_blocks_override=50,
        max_logprobs_per_request=60,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:

        async def run(prompt: Any, **params: Any) -> Any:
            sampling = SamplingParams(temperature=0, ignore_eos=True, **params)
            async for output in engine.generate(prompt, sampling):
                last = output
            return last

        assert len((await run([5], logprobs=4)).outputs[0].token_ids) == 12
        output = await run([5] * 20, prompt_logprobs=1, logprobs=4)
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(InvalidRequest, match="max_logprobs_per_request=60") as refused:
            await run([5], logprobs=4, max_tokens=13)
        assert refused.value.param == "logprobs"
        with pytest.raises(InvalidRequest) as refused:
            await run([5] * 31, prompt_logprobs=1, max_tokens=1)
        assert refused.value.param == "prompt_logprobs"
        # More than the context leaves is reduced to that first.
        await run([5] * 117, logprobs=4, max_tokens=1000)
        # Without log-probabilities nothing is bounded.
        assert len((await run([5])).outputs[0].token_ids) == 127


async def test_log_probabilities_of_running_requests_are_bounded_in_sum() -> None:
    """Each may get 20 x 5 and 100 of its prompt; a request without any is let in always."""
    from jackfield import EngineConfig, SamplingParams
    from jackfield.core.errors import EngineOverloaded

    options = EngineConfig(
        device="cpu", attention_backend="torch", max_model_len=128, num_gpu_blocks_override=50,
        max_logprobs_per_request=200,
    )  # fmt: skip
    async with AsyncEngine(options) as engine:

        async def run(**params: Any) -> Any:
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, **params)
            async for output in engine.generate([5] * 50, sampling):
                last = output
            return last

        async def run_all(count: int) -> list[Any]:
            runs = [run(logprobs=4, prompt_logprobs=1) for _ in range(count)]
            done = await asyncio.gather(*runs, run(), return_exceptions=True)
            assert len(done.pop().outputs[0].token_ids) == 20
            return [each for each in done if isinstance(each, EngineOverloaded)]

        for limit, refused in ((400, 1), (399, 2), (1, 2), (0, 0)):
            make_app(engine, ServerOptions(max_live_logprobs=limit))
            failures = await run_all(3)
            assert len(failures) == refused, limit
            assert all("log-probabilities" in str(failure) for failure in failures)
            assert engine.core.requests._num_logprobs == 0, "those of ended requests do not count"


def test_a_vector_longer_than_a_piece_is_a_piece() -> None:
    data = np.arange(4 * (pooling.AT_ONCE + 1), dtype=np.float32).reshape(4, -1)
    assert json.loads(b"".join(pooling.numbers(data, "float").parts)) == data.tolist()
