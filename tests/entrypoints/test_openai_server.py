"""The server through the real `openai` client, on the embedded model."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import forked
import httpx
import openai
import pytest
from aiohttp import web

from jackfield import AsyncEngine, EngineConfig
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.app import make_app

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}


class Server:
    """The application on a thread and loop of its own."""

    def __init__(self, options: ServerOptions) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.run(self._start(options))

    async def _start(self, options: ServerOptions) -> None:
        config = EngineConfig(
            served_model_name=("tiny", "alias"),
            reasoning_parser="think_tags",
            tool_call_parser="hermes",
            max_num_seqs=32,
        )
        self.engine = AsyncEngine(config)
        await self.engine.start()
        app = make_app(self.engine, options)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def wait_idle(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if stats.num_requests_running + stats.num_requests_waiting == 0:
                assert stats.kv_blocks_used == 0
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy: {self.engine.stats()}")

    def close(self) -> None:
        self.run(self.runner.cleanup())
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    first = Server(ServerOptions(api_keys=("secret", "other"), max_body_bytes=1 << 20))
    yield first
    first.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(
        **{
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 200,
            **options,
        }
    )


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list().data] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_chat_answers(client: openai.OpenAI) -> None:
    response = ask(client, "What is Jackfield?", extra_body=DIRECT)
    assert "Jackfield is an LLM serving engine" in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens > 5
    assert (
        response.usage.total_tokens
        == response.usage.prompt_tokens + response.usage.completion_tokens
    )


def folded(chunks: list[Any]) -> dict[str, Any]:
    """A stream as one message."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            message["finish"] = choice.finish_reason or message["finish"]
            for call in choice.delta.tool_calls or []:
                entry = message["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                entry["name"] += call.function.name or ""
                entry["arguments"] += call.function.arguments or ""
    return message


CASES: dict[str, dict[str, Any]] = {
    "chat": {"text": "Tell me a joke.", "extra_body": DIRECT},
    "reasoning": {
        "text": "Tom has 5 apples and buys 3 more. Then he gives away 2. How many apples are left?"
    },
    "tool": {"text": "What is the weather in Paris?", "tools": [WEATHER], "extra_body": DIRECT},
    "cut tool": {"text": "Weather in Oslo?", "tools": [WEATHER], "max_tokens": 12},
    "sampled": {"text": "Hello", "temperature": 1.5, "seed": 3, "max_tokens": 40},
}


@pytest.mark.parametrize("name", CASES)
def test_streaming_equals_not_streaming(client: openai.OpenAI, name: str) -> None:
    options = dict(CASES[name])
    text = options.pop("text")
    whole = ask(client, text, **options).choices[0]
    stream = folded(list(ask(client, text, stream=True, **options)))
    assert stream["content"] == (whole.message.content or "")
    assert stream["reasoning"] == (getattr(whole.message, "reasoning_content", None) or "")
    assert stream["finish"] == whole.finish_reason
    calls = whole.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        (c["name"], c["arguments"]) for c in stream["calls"].values()
    ]


def test_tool_loop(client: openai.OpenAI) -> None:
    first = ask(client, "What is the weather in Paris?", tools=[WEATHER], extra_body=DIRECT)
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    second = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            first.choices[0].message.model_dump(exclude_none=True),
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": json.dumps({"city": "Paris", "temperature": 7, "condition": "rainy"}),
            },
        ],
        tools=[WEATHER],
        temperature=0,
        extra_body=DIRECT,
    )
    assert "7 degrees" in second.choices[0].message.content


def test_reasoning_comes_apart(client: openai.OpenAI) -> None:
    response = ask(client, CASES["reasoning"]["text"])
    message = response.choices[0].message
    assert "5 + 3 = 8" in message.reasoning_content
    assert "6" in message.content and "<think>" not in message.content
    assert response.usage.completion_tokens_details.reasoning_tokens > 5


def test_tool_choice_none_calls_nothing(client: openai.OpenAI) -> None:
    response = ask(client, "Hello", tools=[WEATHER], tool_choice="none", extra_body=DIRECT)
    assert response.choices[0].message.tool_calls is None


def test_usage_in_the_stream(client: openai.OpenAI) -> None:
    chunks = list(
        ask(client, "Hello", stream=True, stream_options={"include_usage": True}, n=2, seed=1)
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert {c.index for chunk in chunks for c in chunk.choices} == {0, 1}


def test_n_seed_and_stop(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        response = ask(client, "Repeat exactly: river stone", temperature=1.0, n=3, seed=5)
        return [choice.message.content for choice in response.choices]

    assert len(sample()) == 3
    assert sample() == sample()
    stopped = ask(client, "Repeat exactly: red river stone", stop=["river"], extra_body=DIRECT)
    assert stopped.choices[0].message.content == "red "
    assert stopped.choices[0].finish_reason == "stop"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    response = ask(client, "Hello", logprobs=True, top_logprobs=3, max_tokens=4, extra_body=DIRECT)
    content = response.choices[0].logprobs.content
    assert len(content) == response.usage.completion_tokens
    for position in content:
        assert len(position.top_logprobs) == 3
        assert position.logprob == position.top_logprobs[0].logprob, "greedy takes the best"
        assert bytes(position.bytes).decode() == position.token


def test_completions_echo_and_logprobs(client: openai.OpenAI) -> None:
    response = client.completions.create(
        model="tiny", prompt="12 + 7 =", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    choice = response.choices[0]
    assert choice.text.startswith("12 + 7 =")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens).removesuffix("<|im_end|>") == choice.text
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)
    only = client.completions.create(
        model="tiny", prompt="12 + 7 =", max_tokens=0, echo=True, logprobs=1
    )
    assert only.choices[0].text == "12 + 7 ="
    assert only.usage.completion_tokens == 0


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    first = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    tokens = [5, 6, 7]
    many = client.completions.create(
        model="tiny", prompt=["Hello", "Copy"], max_tokens=5, temperature=0
    )
    assert many.choices[0].text == first.choices[0].text
    assert [choice.index for choice in many.choices] == [0, 1]
    by_ids = client.completions.create(model="tiny", prompt=tokens, max_tokens=2)
    assert by_ids.usage.prompt_tokens == 3
    pieces: dict[int, str] = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="tiny", prompt=["Hello", "Copy"], max_tokens=5, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert [pieces[0], pieces[1]] == [choice.text for choice in many.choices]


async def test_async_client(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)

    async def run_one(number: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"What is {number} + 4?"}],
            temperature=0,
            stream=True,
            extra_body=DIRECT,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    responses = await asyncio.gather(*(run_one(number) for number in range(12)))
    await client.close()
    right = sum(str(number + 4) in response for number, response in enumerate(responses))
    assert right >= 10


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"extra_body": {"suffix": "x"}}, "suffix"),
        ({"extra_body": {"temperature": "warm"}}, "temperature"),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": 1}}},
            "chat_template_kwargs.messages",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
    ],
)
def test_bad_fields_are_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello", **options)
    assert caught.value.body["param"] == param  # type: ignore[index]
    assert param.split(".")[0].split("[")[0] in caught.value.body["message"]  # type: ignore[index]


def test_bad_field_in_a_stream_keeps_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, "Hello", stream=True, max_tokens=0)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x " * 5000, stream=True)
    assert caught.value.body["code"] == "context_length_exceeded"  # type: ignore[index]


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "Hello", model="gpt-99")
    assert caught.value.body["code"] == "model_not_found"  # type: ignore[index]


def test_keys_are_needed_where_they_should_be(server: Server) -> None:
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/models", "/version", "/no/such/route", "/health/../v1/models"):
            response = httpx.get(server.url + path, headers=header)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ping", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    other = httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer other"})
    assert other.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b"{}", 400),
        ("POST", "/v1/completions", b'{"prompt": {"a": 1}}', 400),
        ("POST", "/v1/completions", b'{"prompt": [1, "a", null]}', 400),
        ("POST", "/v1/completions", b'{"prompt": [99999]}', 400),
        ("POST", "/v1/completions", b" " * (2 << 20), 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/nowhere", b"", 404),
        ("POST", "/detokenize", b'{"tokens": [-1]}', 400),
        ("POST", "/tokenize", b"{}", 400),
    ],
)
def test_garbage_gets_an_error_body(
    server: Server, method: str, path: str, body: bytes, status: int
) -> None:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    response = httpx.request(method, server.url + path, content=body, headers=headers)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and "site-packages" not in response.text


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "; did you mean /v1/messages?"),
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/models/", "; did you mean /v1/models?"),
        ("/v1/files/file-1/content", " (the server was started without --batch-dir)"),
        ("/sleep", " (the server was started without --enable-admin)"),
        ("/v1/load_lora_adapter", " without --enable-admin and --enable-lora)"),
        ("/v1/moderations", "/v1/moderations: Not Found"),
    ],
)
def test_an_unknown_route_names_the_one_that_was_probably_meant(
    server: Server, path: str, ends: str
) -> None:
    headers = {"Authorization": "Bearer secret"}
    response = httpx.post(server.url + path, json={}, headers=headers)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"].endswith(ends) and error["code"] == 404


def test_tokenize_round_trip(server: Server) -> None:
    headers = {"Authorization": "Bearer secret"}
    response = httpx.post(
        server.url + "/tokenize",
        json={"prompt": "Grüße, 日本 😀", "return_token_strs": True},
        headers=headers,
    ).json()
    assert response["count"] == len(response["tokens"]) == len(response["token_strs"])
    back = httpx.post(
        server.url + "/detokenize", json={"tokens": response["tokens"]}, headers=headers
    ).json()
    assert back["prompt"] == "Grüße, 日本 😀"
    chat = httpx.post(
        server.url + "/tokenize",
        json={"messages": [{"role": "user", "content": "hi"}]},
        headers=headers,
    ).json()
    assert chat["count"] > 4


def test_metrics_have_the_usual_names(server: Server, client: openai.OpenAI) -> None:
    ask(client, "Hello", max_tokens=3)
    text = httpx.get(server.url + "/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_sum",
    ):  # fmt: skip
        assert f"jackfield:{name}{{" in text, name


def test_client_gone_means_request_aborted(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}
    headers = {"Authorization": "Bearer secret"}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, headers=headers
    ) as response:
        next(response.iter_lines())
    server.wait_idle()
    address = urllib.parse.urlsplit(server.url)
    data = json.dumps(body).encode()
    with socket.create_connection((address.hostname or "", address.port or 0)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer secret\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        while not server.engine.stats().num_requests_running:
            time.sleep(0.001)
    server.wait_idle()
    assert server.engine.stats().requests_finished.get("abort", 0) >= 2


def test_sigterm_lets_a_stream_finish_and_exits_zero(tmp_path: Any) -> None:
    process = forked.Popen(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", "--port", "0",
         "--attention-backend", "torch", "--uds", str(tmp_path / "socket")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "ready in" in process.stdout.readline()
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
        with httpx.Client(transport=transport, base_url="http://server", timeout=300) as http:
            body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
