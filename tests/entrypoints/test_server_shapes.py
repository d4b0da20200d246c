"""What the server sends, piece by piece: whole and streamed answers agree in every field.

The model is random, so that texts are full of half characters; where reasoning and tool calls
matter it is one whose weights are a table of what to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from serving import (
    MODEL,
    SCRIPT,
    Server,
    engine_config,
    running,
    save_random,
    save_scripted,
)

from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.app import _errors as errors

MESSAGES = [{"role": "user", "content": "Hello there"}]
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 64}
"""More than runs at once, and longer than any test looks at it."""
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_random(tmp_path_factory.mktemp("random"))
    with running(engine_config(checkpoint), ServerOptions(max_body_bytes=1 << 18)) as item:
        yield item


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as item:
        yield item


def post(server: Server, route: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx.post(server.url + route, json={"model": MODEL, **body}, timeout=300)
    assert response.status_code == status, response.text
    return response.json()


def stream(server: Server, route: str, body: dict[str, Any]) -> list[Any]:
    """The frames of a streamed answer, which must end with [DONE]."""
    body = {"model": MODEL, "stream": True, **body}
    with httpx.stream("POST", server.url + route, json=body, timeout=300) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def folded(frames: list[Any], count: int) -> list[dict[str, Any]]:
    """Frames → choices, as the whole answer would have them; completions and chat alike."""
    choices: list[dict[str, Any]] = [{} for _ in range(count)]
    for frame in frames:
        for piece in frame["choices"]:
            into = choices[piece["index"]]
            delta = piece.get("delta", {"text": piece.get("text")})
            for name in ("text", "content", "reasoning_content"):
                if delta.get(name):
                    into[name] = into.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = into.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            for name, values in (piece.get("logprobs") or {}).items():
                into.setdefault("logprobs", {}).setdefault(name, []).extend(values)
            into.setdefault("token_ids", []).extend(piece.get("token_ids") or [])
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    into[name] = piece[name]
    return choices


# ---------------------------------------------------------------- completions

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The quick", "temperature": 0},
    "several": {"prompt": ["The quick", "Hello"], "n": 2, "seed": 5},
    "ids": {"prompt": [[40, 41, 42], [50]], "seed": 1},
    "echo": {"prompt": ["The quick", "日本"], "echo": True, "logprobs": 3, "seed": 2},
    "echo of ids": {"prompt": [40, 41, 42], "echo": True, "logprobs": 0, "seed": 2},
    "only echo": {"prompt": "The quick brown", "echo": True, "logprobs": 1, "max_tokens": 0},
    "repeat": {"prompt": ["fox " * 12] * 2, "seed": 4, "logprobs": 1},
    "cut": {"prompt": "The quick brown fox", "truncate_prompt_tokens": 3, "echo": True, "seed": 3},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_streamed_completion_equals_the_whole_one(server: Server, name: str) -> None:
    body = {"max_tokens": 12, "return_token_ids": True, **COMPLETIONS[name]}
    route = "/v1/completions"
    post(server, route, body)  # So that both find the same prefixes cached.
    whole = post(server, route, body)
    frames = stream(server, route, {**body, "stream_options": {"include_usage": True}})
    choices = folded(frames[:-1], len(whole["choices"]))
    assert len(choices) == len(whole["choices"]) > 0
    for mine, theirs in zip(choices, whole["choices"], strict=True):
        assert mine.get("text", "") == theirs["text"]
        assert mine["token_ids"] == theirs["token_ids"]
        assert mine.get("logprobs") == theirs["logprobs"]
        assert mine["finish_reason"] == theirs["finish_reason"]
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"] == whole["usage"]
    assert len({frame["id"] for frame in frames}) == 1


def test_echo_gives_the_prompt_back_with_its_probabilities(server: Server) -> None:
    prompt = "The quick <|im_end|> brown"
    body = {"prompt": prompt, "echo": True, "max_tokens": 3, "logprobs": 2}
    response = post(server, "/v1/completions", body)
    (choice,) = response["choices"]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    count = response["usage"]["prompt_tokens"]
    assert len(logprobs["tokens"]) == count + 3
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][:count]) == prompt
    assert logprobs["text_offset"][:3] == [0, 3, 4]
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    assert "prompt_logprobs" not in choice


def test_half_a_character_is_shown_as_its_bytes(server: Server) -> None:
    vocabulary = [post(server, "/detokenize", {"tokens": [t]})["prompt"] for t in range(300)]
    half = next(t for t, text in enumerate(vocabulary) if text == "\ufffd")
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1, "logit_bias": {str(half): 100}}
    logprobs = post(server, "/v1/completions", body)["choices"][0]["logprobs"]
    (shown,) = set(logprobs["tokens"])
    assert re.fullmatch(r"bytes:\\x[89a-f][0-9a-f]", shown)
    assert all(shown in top for top in logprobs["top_logprobs"])


def test_cached_tokens_of_all_prompts_are_counted(server: Server) -> None:
    prompts = ["alpha " * 20, "omega " * 30]
    body = {"prompt": prompts, "max_tokens": 1}
    post(server, "/v1/completions", body)
    each = [
        post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1})["usage"]
        for prompt in prompts
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in each]
    assert min(cached) >= 16
    together = post(server, "/v1/completions", body)["usage"]
    assert together["prompt_tokens_details"]["cached_tokens"] == sum(cached)
    salted = post(server, "/v1/completions", {**body, "cache_salt": "other"})["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_one_bad_prompt_refuses_all_and_leaves_nothing_running(server: Server) -> None:
    body = {"prompt": [[40], [10**6]], "max_tokens": 400, "ignore_eos": True}
    for streaming in (False, True):
        error = post(server, "/v1/completions", {**body, "stream": streaming}, 400)["error"]
        assert error["param"] == "prompt" and "1000000" in error["message"]
        assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert server.engine.stats().kv_blocks_used == 0


# ---------------------------------------------------------------- chat

CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "n": {"n": 3, "seed": 9},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "seed": 1},
    "stop": {"stop": ["a", "e", "i"], "seed": 2, "max_tokens": 200},
    "whole stop": {"stop": ["1"], "include_stop_str_in_output": True, "seed": 6, "max_tokens": 200},
    "biased": {"logit_bias": {"70": 100}, "temperature": 0},
    "few": {"allowed_token_ids": [70, 71, 72], "seed": 3},
}


@pytest.mark.parametrize("name", CHATS)
def test_streamed_chat_equals_the_whole_one(server: Server, name: str) -> None:
    body = {"max_tokens": 16, "messages": MESSAGES, **CHATS[name]}
    route = "/v1/chat/completions"
    post(server, route, body)
    whole = post(server, route, body)
    frames = stream(server, route, {**body, "stream_options": {"include_usage": True}})
    choices = folded(frames, body.get("n", 1))
    for mine, theirs in zip(choices, whole["choices"], strict=True):
        assert mine.get("content", "") == theirs["message"]["content"]
        assert mine.get("logprobs") == theirs["logprobs"]
        assert mine["finish_reason"] == theirs["finish_reason"]
        assert mine.get("stop_reason") == theirs["stop_reason"]
    assert frames[-1]["usage"] == whole["usage"]
    assert frames[0]["choices"][0]["delta"]["role"] == "assistant"


def test_bias_and_allowed_ids_reach_the_sampler(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True}
    biased = post(server, "/v1/chat/completions", {**body, "logit_bias": {"70": 100}})
    tokens = [entry["token"] for entry in biased["choices"][0]["logprobs"]["content"]]
    assert tokens == [post(server, "/detokenize", {"tokens": [70]})["prompt"]] * 6
    body = {"prompt": "x", "max_tokens": 8, "allowed_token_ids": [70, 71], "seed": 1}
    few = post(server, "/v1/completions", {**body, "return_token_ids": True})
    assert set(few["choices"][0]["token_ids"]) <= {70, 71}


def test_bytes_of_logprobs_spell_the_text(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 64, "logprobs": True, "seed": 11}
    (choice,) = post(server, "/v1/chat/completions", body)["choices"]
    spelt = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert spelt.decode(errors="replace").rstrip("\ufffd") == choice["message"]["content"].rstrip(
        "\ufffd"
    )
    assert any(byte >= 0x80 for byte in spelt)


def test_reasoning_and_tool_call_come_apart(scripted: Server) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "tools": [TOOL]}
    post(scripted, "/v1/chat/completions", body)  # So that all find the same prefix cached.
    response = post(scripted, "/v1/chat/completions", body)
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("two and two", "Let me look.")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather" and call["type"] == "function" and call["id"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}
    assert response["usage"]["completion_tokens"] == len(SCRIPT) + 1
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}

    frames = stream(
        scripted,
        "/v1/chat/completions",
        {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    (folded_choice,) = folded(frames, 1)
    assert folded_choice["content"] == message["content"]
    assert folded_choice["reasoning_content"] == message["reasoning_content"]
    assert folded_choice["tool_calls"] == [call["function"]]
    assert folded_choice["finish_reason"] == "tool_calls"
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts) and counts[-1] == len(SCRIPT) + 1
    assert frames[-1]["usage"] == response["usage"]


def test_reasoning_and_calls_stay_in_the_text_unless_requested(scripted: Server) -> None:
    body = {"messages": MESSAGES, "temperature": 0}
    response = post(scripted, "/v1/chat/completions", {**body, "include_reasoning": False})
    message = response["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "".join(SCRIPT[4:]), "without tools, a call is text"
    assert response["choices"][0]["finish_reason"] == "stop"
    body |= {"tools": [TOOL], "tool_choice": "none"}
    assert "tool_calls" not in post(scripted, "/v1/chat/completions", body)["choices"][0]["message"]
    frames = stream(scripted, "/v1/chat/completions", {**body, "include_reasoning": False})
    (choice,) = folded(frames, 1)
    assert choice["content"] == message["content"] and "reasoning_content" not in choice


def test_special_tokens_are_shown_on_request(scripted: Server) -> None:
    body = {"prompt": "assistant\n", "temperature": 0, "max_tokens": 30}
    hidden = post(scripted, "/v1/completions", body)["choices"][0]
    shown = post(
        scripted,
        "/v1/completions",
        {**body, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": len(SCRIPT) + 1},
    )["choices"][0]
    assert hidden["text"] == "".join(SCRIPT) and hidden["finish_reason"] == "stop"
    assert shown["text"] == "".join(SCRIPT) + "<|im_end|>" and shown["finish_reason"] == "length"


def test_tools_need_a_parser(server: Server) -> None:
    body = {"messages": MESSAGES, "tools": [TOOL]}
    error = post(server, "/v1/chat/completions", body, 400)["error"]
    assert error["param"] == "tools" and "--tool-call-parser" in error["message"]


# ---------------------------------------------------------------- errors, edges


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": "x", "response_format": {"type": "yaml"}},
         "response_format.type"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ("completions", {"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        ("completions", {"prompt": "x", "n": True}, "n"),
        ("completions", {"prompt": "x", "seed": 10**30}, "seed"),
        ("completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": 3}},
         "stream_options.include_usage"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": ["x", 3]}, "prompt"),
        ("completions", {"prompt": ["x"] * 300}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": {"type": "function"}},
         "tool_choice"),
        ("chat/completions", {"messages": MESSAGES, "guided_json": {"type": "heap"}},
         "guided_json"),
        ("chat/completions", {"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    server: Server, route: str, body: dict[str, Any], param: str
) -> None:
    error = post(server, f"/v1/{route}", body, 400)["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error" and error["code"] == 400


def test_unknown_fields_are_ignored(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "metadata": {"a": 1}, "store": True, "no_such": [1]}
    assert post(server, "/v1/completions", body)["choices"]


def test_refusals_by_method_path_and_size_have_their_own_code(server: Server) -> None:
    wrong_method = httpx.get(server.url + "/v1/completions")
    assert wrong_method.status_code == wrong_method.json()["error"]["code"] == 405
    assert wrong_method.headers["allow"] == "POST"
    nowhere = httpx.get(server.url + "/v1/nothing/%ff%0d%0a")
    assert nowhere.status_code == nowhere.json()["error"]["code"] == 404
    large = httpx.post(server.url + "/v1/completions", json={"prompt": "x" * (1 << 19)})
    assert large.status_code == large.json()["error"]["code"] == 413


def test_request_id_comes_back_on_answers_errors_and_streams(server: Server) -> None:
    for path, body in (
        ("/v1/models", None),
        ("/nowhere", None),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True}),
    ):
        method = "GET" if body is None else "POST"
        for request_id, same in ((b"trace-7", True), (b"", False), (b"\xff\xfe", False)):
            headers = {b"X-Request-Id": request_id}
            response = httpx.request(method, server.url + path, json=body, headers=headers)
            returned = response.headers["x-request-id"]
            assert (returned == "trace-7") is same and returned


def test_a_running_request_keeps_its_id_to_itself(server: Server) -> None:
    body = {**LONG, "request_id": "mine"}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=300
    ) as response:
        lines = response.iter_lines()  # Kept: dropping it would hang up.
        next(lines)
        assert "mine" in post(server, "/v1/completions", body, 400)["error"]["message"]
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


def test_keys_with_any_bytes_are_compared_and_not_crashed_on(tmp_path_factory: Any) -> None:
    checkpoint = save_random(tmp_path_factory.mktemp("keys"))
    with running(engine_config(checkpoint), ServerOptions(api_keys=("schlüssel",))) as server:

        def status(value: bytes) -> int:
            headers = {b"Authorization": value}
            return httpx.get(server.url + "/v1/models", headers=headers).status_code

        assert status("Bearer schlüssel".encode()) == 200
        for wrong in (b"Bearer \xff\xfe", b"Bearer schl", b"Bearer", b"Basic schl"):
            assert status(wrong) == 401, wrong


def test_metrics_are_fresh_without_steps(server: Server) -> None:
    def gauge(name: str) -> float:
        text = httpx.get(server.url + "/metrics").text
        (line,) = [row for row in text.splitlines() if row.startswith(f"jackfield:{name}{{")]
        return float(line.split()[-1])

    body = {**LONG, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as response:
        lines = response.iter_lines()  # Kept: dropping it would hang up.
        next(lines)
        assert gauge("num_requests_running") == 8
        assert gauge("num_requests_waiting") == LONG["n"] - 8
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert gauge("num_requests_running") == 0
    assert gauge("kv_cache_usage_perc") == 0
    text = httpx.get(server.url + "/metrics").text
    assert 'jackfield:cache_config_info{block_size="16"' in text


async def test_draining_refuses_new_work_and_finishes_the_old(tmp_path_factory: Any) -> None:
    checkpoint = save_random(tmp_path_factory.mktemp("drain"))
    with running(engine_config(checkpoint)) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        options = {"model": MODEL, "prompt": "x", "extra_body": {"ignore_eos": True}}
        pieces = await client.completions.create(max_tokens=400, stream=True, **options)
        first = await anext(aiter(pieces))
        draining: list[asyncio.Future[bool]] = []
        server.call(lambda engine: draining.append(asyncio.ensure_future(engine.drain(30))))
        assert server.becomes(lambda engine: engine.stats().num_requests_running == 1)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(max_tokens=1, **options)
        assert caught.value.status_code == 503
        rest = [piece async for piece in pieces]
        assert [first, *rest][-1].choices[0].finish_reason == "length"
        assert server.becomes(lambda _: draining[0].done()) and draining[0].result()
        await client.close()


def test_a_dead_engine_fails_health_and_requests(tmp_path_factory: Any) -> None:
    checkpoint = save_random(tmp_path_factory.mktemp("dead"))
    with running(engine_config(checkpoint)) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        server.call(lambda engine: engine.core._die(RuntimeError("the device is gone")))
        response = httpx.get(server.url + "/health")
        assert response.status_code == 503
        assert "the device is gone" in response.json()["error"]["message"]
        post(server, "/v1/completions", {"prompt": "x"}, 503)


def test_a_busy_moment_turns_no_client_away(server: Server) -> None:
    """Hundreds may connect while the loop does something else; a full queue costs them a second."""
    address = urlsplit(server.url)
    free = threading.Event()
    thread = threading.Thread(target=server.call, args=(lambda _: free.wait(300),))
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(free.set)
        thread.start()
        for _ in range(300):
            connection = socket.create_connection(
                (address.hostname or "", address.port or 0), timeout=60
            )
            stack.enter_context(connection)


@pytest.mark.parametrize("path", ["/", "/playground/playground.js", "/docs/try"])
def test_a_page_is_sent_once_and_then_confirmed(server: Server, path: str) -> None:
    first = httpx.get(server.url + path)
    assert first.status_code == 200 and first.content
    for tags in (first.headers["ETag"], f'"other", {first.headers["ETag"]}', "*"):
        again = httpx.get(server.url + path, headers={"If-None-Match": tags})
        assert (again.status_code, again.content) == (304, b"")
    other = httpx.get(server.url + path, headers={"If-None-Match": '"other"'})
    assert other.content == first.content


@pytest.mark.parametrize("folder", ["/playground", "/docs/try"])
def test_a_file_that_no_page_has_is_not_found(server: Server, folder: str) -> None:
    answer = httpx.get(f"{server.url}{folder}/none.js")
    assert answer.status_code == 404 and "none.js" in answer.json()["error"]["message"]


async def test_a_refusal_of_400_that_a_handler_raises_is_an_error_of_ours() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPBadRequest(reason="no such colour")

    answer = await errors(make_mocked_request("GET", "/x"), handler)
    assert answer.status == 400 and "no such colour" in json.loads(answer.body)["error"]["message"]
    with pytest.raises(web.HTTPFound):

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound("/y")

        await errors(make_mocked_request("GET", "/x"), elsewhere)
