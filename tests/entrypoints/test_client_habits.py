"""What client libraries do that OpenAI's own does not: whole numbers as floats, null contents, the
older fields left empty; and the sentence by which they recognise a prompt that is too long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec.inspect
import openai
import pytest
from serving import MODEL, Server, running

from jackfield import EngineConfig
from jackfield.core.errors import InvalidRequest
from jackfield.entrypoints.openai.common import protocol
from jackfield.entrypoints.openai.common.decoding import decode
from jackfield.entrypoints.openai.pooling import protocol as pooling_protocol
from jackfield.entrypoints.openai.responses import protocol as responses_protocol

USER: Any = [{"role": "user", "content": "Hello"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/responses", {"input": "Hello"}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        max_num_seqs=8,
        max_model_len=256,
    )
    with running(config) as item:
        yield item


def post(server: Server, route: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx.post(server.url + route, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


# ---------------------------------------------------------------- whole numbers

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (protocol.ChatRequest, {"messages": USER}),
    (protocol.CompletionRequest, {}),
    (protocol.TokenizeRequest, {}),
    (responses_protocol.ResponsesRequest, {}),
    (pooling_protocol.EmbeddingRequest, {}),
    (pooling_protocol.RerankRequest, {"query": "a", "documents": []}),
]


def takes_integers(kind: Any, *, listed: bool) -> list[str]:
    names = []
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        types = getattr(field.type, "types", (field.type,))
        if listed:
            types = [
                first.item_type for first in types if isinstance(first, msgspec.inspect.ListType)
            ]
        if any(isinstance(first, msgspec.inspect.IntType) for first in types):
            names.append(field.name)
    return names


@pytest.mark.parametrize(("kind", "least"), KINDS)
def test_every_integer_may_be_written_as_a_float(kind: Any, least: dict[str, Any]) -> None:
    single, lists = takes_integers(kind, listed=False), takes_integers(kind, listed=True)
    assert single or lists or kind is protocol.TokenizeRequest
    for name in single:
        read = getattr(decode(json.dumps({**least, name: 3.0}).encode(), kind), name)
        assert read == 3 and type(read) is int
        with pytest.raises(InvalidRequest) as refused:
            decode(json.dumps({**least, name: 3.5}).encode(), kind)
        assert refused.value.param == name
    for name in lists:
        body = json.dumps({**least, name: [3.0, 4]}).encode()
        assert [type(item) for item in getattr(decode(body, kind), name)] == [int, int]


def test_ids_in_a_detokenize_request_and_large_floats() -> None:
    read = decode(b'{"tokens": [1e0, 2.0]}', protocol.DetokenizeRequest)
    assert read.tokens == [1, 2]
    body = b'{"messages": [], "temperature": 1.0, "max_tokens": 1e999}'
    with pytest.raises(InvalidRequest):
        decode(body, protocol.ChatRequest)


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_limit_written_as_a_float_holds(server: Server, route: str, body: dict[str, Any]) -> None:
    field = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    response = post(server, route, {**body, field: 3.0, "ignore_eos": True})
    usage = response["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 3


# ---------------------------------------------------------------- nothing asked for


def test_an_assistant_message_without_content_is_empty(server: Server) -> None:
    def tokens(*assistant: Any) -> list[int]:
        messages = [*USER, *assistant, *USER]
        return post(server, "/tokenize", {"messages": messages})["tokens"]

    empty = tokens({"role": "assistant", "content": ""})
    assert tokens({"role": "assistant", "content": None}) == empty
    assert tokens({"role": "assistant"}) == empty
    assert tokens({"role": "assistant", "content": None, "tool_calls": []}) == empty
    body = {"messages": [{"role": "user", "content": None}]}
    error = post(server, "/v1/chat/completions", {**body, "max_tokens": 1}, 400)["error"]
    assert error["param"] == "messages[0].content"


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": []},
        {"functions": [], "function_call": "auto"},
        {"function_call": "none"},
        {"functions": None, "function_call": None},
        {"tools": [], "tool_choice": "auto"},
        {"tools": []},
    ],
)
def test_no_functions_are_no_functions(server: Server, fields: dict[str, Any]) -> None:
    post(server, "/v1/chat/completions", {"messages": USER, "max_tokens": 1, **fields})


def test_functions_are_still_refused_by_name(server: Server) -> None:
    for field, value in (("functions", [{"name": "f"}]), ("function_call", {"name": "f"})):
        body = {"messages": USER, "max_tokens": 1, field: value}
        error = post(server, "/v1/chat/completions", body, 400)["error"]
        assert error["param"] == field


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_a_responses_verbosity_is_taken_as_a_chats(server: Server, verbosity: str) -> None:
    body = {"input": "Hello", "max_output_tokens": 1, "text": {"verbosity": verbosity}}
    assert post(server, "/v1/responses", body)["text"]["verbosity"] == verbosity


# ---------------------------------------------------------------- too long


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_prompt_that_is_too_long_gets_openais_sentence(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    (field,) = body
    long: Any = "word " * 300
    if field == "messages":
        long = [{"role": "user", "content": long}]
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    for request in ({field: long}, {**body, limit: 256.0}):
        error = post(server, route, request, 400)["error"]
        assert error["message"].startswith(
            "This model's maximum context length is 256 tokens. However, you"
        )
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in (field, limit, "prompt")


# ---------------------------------------------------------------- input tokens


def test_input_tokens_are_counted_as_a_response_counts_them(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"},
                 "strict": False}  # fmt: skip
    requests: list[dict[str, Any]] = [
        {"input": "Hello"},
        {"input": "Hello", "instructions": "Be brief."},
        {"input": "Hello", "tools": [tool]},
        {"input": "Hello", "reasoning": {"effort": "none"}},
    ]
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
    requests.append({"input": "And?", "previous_response_id": first.id})
    counts = []
    for request in requests:
        counted = client.responses.input_tokens.count(model=MODEL, **request)
        assert counted.object == "response.input_tokens"
        response = client.responses.create(model=MODEL, max_output_tokens=1, **request)
        assert response.usage and counted.input_tokens == response.usage.input_tokens
        counts.append(counted.input_tokens)
    assert len(set(counts)) == len(counts)


def test_input_tokens_are_counted_past_the_context_and_refused_by_name(
    client: openai.OpenAI,
) -> None:
    assert client.responses.input_tokens.count(input="word " * 300).input_tokens > 256
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(input=[{"role": "zebra", "content": "x"}])  # type: ignore
    assert refused.value.param == "input[0].role"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(input="Hello", model="other")
