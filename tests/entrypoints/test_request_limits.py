"""Every list and text that a request may hold has a bound, and none is worked off on the loop."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield.core import sampling_params as types
from jackfield.core.engine.output_processor import OutputProcessor
from jackfield.core.engine.request_entry import check_name
from jackfield.core.errors import InvalidRequest
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.openai.common import protocol
from jackfield.entrypoints.openai.pooling.protocol import MAX_INPUTS, inputs
from jackfield.entrypoints.openai.responses.input_items import MAX_ITEMS, check_count

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ServerOptions(max_completions_per_request=64)
    with running(config(save_random(tmp_path_factory.mktemp("random"))), options) as running_server:
        yield running_server


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    if route == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    elif route == COMPLETIONS:
        body = {"prompt": "hi", "max_tokens": 2, **body}
    return httpx.post(server.url + route, json=body, timeout=120)


def error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()["error"]
    return body


LISTS = {
    "bad_words": (["x"], types.MAX_BAD_WORDS),
    "stop": (["x"], types.MAX_STOP_STRINGS),
    "stop_token_ids": ([5], types.MAX_STOP_TOKEN_IDS),
    "allowed_token_ids": ([5], types.MAX_ALLOWED_TOKEN_IDS),
}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", LISTS)
def test_lists_of_a_request_are_bounded(server: Server, route: str, field: str) -> None:
    first, most = LISTS[field]
    assert post(server, route, **{field: first * most}, max_tokens=2).status_code == 200
    response = post(server, route, **{field: first * (most + 1)})
    assert response.status_code == 400 and error(response)["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["x" * (types.MAX_BAD_WORD_LENGTH + 1)]),
        ("stop", ["x" * (types.MAX_STOP_LENGTH + 1)]),
        ("logit_bias", {str(i): 1 for i in range(types.MAX_LOGIT_BIAS + 1)}),
        ("request_id", "x" * (types.MAX_NAME_LENGTH + 1)),
        ("cache_salt", "x" * (types.MAX_NAME_LENGTH + 1)),
        ("n", 129),
    ],
)
def test_what_a_request_names_is_bounded(server: Server, field: str, value: Any) -> None:
    for route in (COMPLETIONS, CHAT):
        response = post(server, route, **{field: value})
        assert response.status_code == 400 and error(response)["param"] == field


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (protocol.MAX_PROMPTS, lambda n: protocol.CompletionRequest(prompt=["x"] * n).prompts()),
        (MAX_INPUTS, lambda n: inputs(["x"] * n)),
        (MAX_ITEMS, check_count),
        (
            types.MAX_LOGIT_BIAS,
            lambda n: types.SamplingParams(logit_bias=dict.fromkeys(range(n), 1)),
        ),
        (types.MAX_NAME_LENGTH, lambda n: check_name("request_id", "x" * n)),
    ],
)
def test_a_limit_is_the_most_that_is_taken(limit: int, read: Callable[[int], object]) -> None:
    read(limit)
    with pytest.raises(InvalidRequest):
        read(limit + 1)


def test_many_bad_words_are_tokenized_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, set[str]] = {}
    original = Tokenizer.bad_words_ids

    def noted(self: Tokenizer, words: Any) -> Any:
        threads.setdefault(len(words), set()).add(threading.current_thread().name)
        return original(self, words)

    monkeypatch.setattr(Tokenizer, "bad_words_ids", noted)
    loop_thread = server.call(lambda engine: threading.current_thread().name)
    words = [f"word {i}" for i in range(types.MAX_BAD_WORDS)]
    assert post(server, COMPLETIONS, bad_words=words).status_code == 200
    assert threads[types.MAX_BAD_WORDS] and loop_thread not in threads[types.MAX_BAD_WORDS]


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_may_start_a_bounded_number_of_completions(
    server: Server, stream: bool
) -> None:
    prompts = [[i + 5] for i in range(16)]
    refused = post(server, COMPLETIONS, prompt=prompts, n=5, stream=stream)
    assert refused.status_code == 400 and error(refused)["param"] == "n"
    assert "--max-completions-per-request" in error(refused)["message"]
    assert post(server, CHAT, n=65).status_code == 400
    seconds = post(server, COMPLETIONS, prompt=prompts, n=4, stream=stream)
    assert seconds.status_code == 200
    assert stream or len(seconds.json()["choices"]) == 64


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_are_entered_a_few_in_a_turn_of_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    turn, turns = 0, Counter[int]()
    enter = OutputProcessor.enter_request

    def counted(self: OutputProcessor, state: Any) -> None:
        turns[turn] += 1
        enter(self, state)

    def tick(loop: Any) -> None:
        nonlocal turn
        turn += 1
        if ticking:
            loop.call_soon(tick, loop)

    monkeypatch.setattr(OutputProcessor, "enter_request", counted)
    ticking = True
    server._loop.call_soon_threadsafe(tick, server._loop)
    try:
        response = post(server, COMPLETIONS, prompt=[[i + 5] for i in range(60)], stream=stream)
    finally:
        ticking = False
    assert response.status_code == 200 and turns.total() == 60
    assert max(turns.values()) <= 8, turns


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6, 7], "min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens"),  # The end token.
        ({"allowed_token_ids": [88], "bad_words": ["x"]}, "bad_words"),
    ],
)
def test_parameters_that_leave_no_token_are_refused_by_name(
    server: Server, body: dict[str, Any], named: str
) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    if "bad_words" in body:
        body = {**body, "allowed_token_ids": tokenizer.encode("x", add_special_tokens=False)}
    if body["allowed_token_ids"] == [2]:
        body = {**body, "allowed_token_ids": [tokenizer.eos_token_id]}
    for route in (COMPLETIONS, CHAT):
        response = post(server, route, **body, max_tokens=4)
        assert response.status_code == 400, response.text
        assert (
            error(response)["param"] == "allowed_token_ids" and named in error(response)["message"]
        )
    less = {**body, "min_tokens": 0, "bad_words": []}
    assert post(server, COMPLETIONS, **less).status_code == 200


def test_tokenize_and_detokenize_take_a_bounded_number_of_tokens(server: Server) -> None:
    most = server.engine.tokenize_limit("x").tokens
    response = post(server, "/detokenize", tokens=[5] * (most + 1))
    assert response.status_code == 400 and error(response)["param"] == "tokens"
    response = post(server, "/tokenize", prompt="\u6f22" * most)
    assert response.status_code == 400 and error(response)["param"] == "prompt"
    messages = [{"role": "user", "content": "\u6f22" * most}]
    response = post(server, "/tokenize", messages=messages)
    assert response.status_code == 400 and error(response)["param"] == "messages"
    longer = "one two three " * server.engine.model_config.max_model_len
    response = post(server, "/tokenize", prompt=longer, return_token_strs=True)
    assert response.json()["count"] > server.engine.model_config.max_model_len
    assert post(server, "/detokenize", tokens=response.json()["tokens"]).json()["prompt"] == longer


def test_a_prompt_far_too_long_is_refused_with_the_contexts_sentence(server: Server) -> None:
    for route, body in (
        (COMPLETIONS, {"prompt": "x y " * 200_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x y " * 200_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 10_000}),
    ):
        response = post(server, route, **body)
        assert response.status_code == 400
        assert error(response)["code"] == "context_length_exceeded"
        assert error(response)["message"].startswith("This model's maximum context length is 512")
    cut = post(server, COMPLETIONS, prompt="x y " * 200_000, truncate_prompt_tokens=5)
    assert cut.json()["usage"]["prompt_tokens"] == 5
