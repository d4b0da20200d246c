"""/v1/messages with the real `anthropic` client: text, streams, tools, thinking, counts, errors."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
import transformers
from serving import MODEL, Server, engine_config, running, save_scripted

from jackfield import EngineConfig
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.http.options import ServerOptions

if TYPE_CHECKING:
    import anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ADD: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
HELLO: Any = [{"role": "user", "content": "Hello"}]
ONCE: Any = [{"role": "user", "content": "Once upon a time"}]
ASKS: Any = [{"role": "user", "content": "What is the weather in Lisbon?"}]
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def sdk() -> None:
    """Import the client where these tests run: every process collects this file, and the import
    takes 1.5 s."""
    global anthropic
    import anthropic


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        max_num_seqs=16,
        max_model_len=512,
    )
    with running(config) as item:
        yield item


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks, says something, and calls a tool."""
    checkpoint = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as item:
        yield item


def client_of(server: Server, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, **options}
    )


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return client_of(server)


def ask(client: anthropic.Anthropic, **options: Any) -> anthropic.types.Message:
    """A whole answer, which is the stream's, too."""
    extra = {**GREEDY, **options.pop("extra_body", {})}
    options = {"model": MODEL, "max_tokens": 300, "messages": HELLO, "extra_body": extra, **options}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert plain(whole) == plain(streamed)
    anthropic.types.Message.model_validate(whole.to_dict())
    return whole


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    facts = message.to_dict()
    facts.pop("id")
    usage: Any = facts["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    for block in facts["content"]:  # type: ignore[attr-defined]
        block.pop("id", None), block.pop("parsed_output", None)
    return {k: v for k, v in facts.items() if v is not None}


def kinds(message: anthropic.types.Message) -> list[str]:
    return [block.type for block in message.content]


# ---------------------------------------------------------------- text and streams


def test_a_message_has_every_field(client: anthropic.Anthropic) -> None:
    message = ask(client, metadata={"user_id": "somebody"}, service_tier="auto")
    assert (
        message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    )
    assert (
        message.model == MODEL
        and message.stop_reason == "end_turn"
        and message.stop_sequence is None
    )
    (block,) = message.content
    assert block.type == "text" and block.text.startswith("Hello")
    usage = message.usage
    assert usage.output_tokens > 0 and usage.cache_creation_input_tokens == 0
    assert usage.output_tokens_details and usage.output_tokens_details.thinking_tokens == 0
    assert message._request_id


async def test_streaming_equals_not_streaming_for_every_seed(server: Server) -> None:
    client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)

    async def both(seed: int) -> anthropic.types.Message:
        options: Any = {
            "model": MODEL, "max_tokens": 40, "messages": ONCE, "tools": [WEATHER, ADD],
            "extra_body": {"temperature": 1.4, "seed": seed},
        }  # fmt: skip
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            assert plain(await stream.get_final_message()) == plain(whole)
        return whole

    results = await asyncio.gather(*(both(seed) for seed in range(8)))
    assert len({json.dumps(plain(item), sort_keys=True) for item in results}) > 2
    await client.close()


def test_the_events_of_a_stream_are_anthropics(scripted: Server) -> None:
    body = {"max_tokens": 100, "messages": HELLO, "tools": [WEATHER], "stream": True, **GREEDY}
    with httpx.stream("POST", f"{scripted.url}/v1/messages", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    events = []
    for name, data in frames:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in itertools.groupby(e["type"] for e in events)] == [
        "message_start", "ping", *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert [kind for kind, _ in itertools.groupby(deltas)] == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    indexes = [e["index"] for e in events if "index" in e]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1, 2}
    final = events[-2]
    assert final["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert final["usage"]["output_tokens"] > start["usage"]["output_tokens"]


def test_system_and_turns_are_the_prompt_of_the_same_chat(
    server: Server, client: anthropic.Anthropic
) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "And?", "cache_control":
                                      {"type": "ephemeral"}}]},
    ]  # fmt: skip
    message = ask(client, system=[{"type": "text", "text": "Be brief."}], messages=turns)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ]
    counted = httpx.post(f"{server.url}/tokenize", json={"messages": chat}).json()["count"]
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    body = {"messages": chat, "max_tokens": 300, **GREEDY}
    same = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    (block,) = message.content
    assert block.type == "text" and same["choices"][0]["message"]["content"] == block.text


def test_an_answer_goes_on_from_what_the_assistant_began(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    (block,) = whole.content
    assert block.type == "text"
    begun = block.text.partition("!")[0] + "!"
    going_on = ask(client, messages=[*HELLO, {"role": "assistant", "content": begun}])
    (rest,) = going_on.content
    assert rest.type == "text" and begun + rest.text == block.text


# ---------------------------------------------------------------- why it stops, and sampling


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    (block,) = ask(client).content
    assert block.type == "text"
    word = block.text.split()[2]
    stopped = ask(client, stop_sequences=["never this", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    (cut,) = stopped.content
    assert cut.type == "text" and cut.text == block.text.partition(word)[0]
    short = ask(client, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    called = ask(client, messages=ASKS, tools=[WEATHER])
    assert called.stop_reason == "tool_use"


def test_max_tokens_past_the_context_is_as_much_as_fits(
    server: Server, client: anthropic.Anthropic
) -> None:
    long: Any = [{"role": "user", "content": "a " * 440}]
    options: Any = {"extra_body": {"ignore_eos": True}, "timeout": 300}
    message = ask(client, messages=long, max_tokens=100_000, **options)
    limit = server.engine.model_config.max_model_len
    usage = message.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    assert total == limit and message.stop_reason == "model_context_window_exceeded"


def test_sampling_parameters_have_their_effect(client: anthropic.Anthropic) -> None:
    def said(**extra: Any) -> str:
        message = ask(client, max_tokens=12, messages=ONCE, extra_body=extra)
        return json.dumps(plain(message)["content"])

    hot = {"temperature": 2.0, "seed": 5}
    assert said(**hot, top_k=1) == said(**hot, top_p=1e-6) == said(temperature=0)
    assert len({said(temperature=2.0, seed=seed) for seed in range(4)}) > 1


# ---------------------------------------------------------------- tools


def test_a_tool_is_called_and_its_result_comes_back(client: anthropic.Anthropic) -> None:
    called = ask(client, messages=ASKS, tools=[WEATHER])
    use = called.content[-1]
    assert use.type == "tool_use" and use.id.startswith("toolu_")
    assert use.name == "get_weather" and use.input == {"city": "Lisbon"}
    turns = [
        *ASKS,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 24 degrees"}]},
    ]  # fmt: skip
    reply = ask(client, messages=turns, tools=[WEATHER])
    (block,) = reply.content
    assert block.type == "text" and reply.stop_reason == "end_turn"


def test_the_sdks_tool_runner_goes_through(client: anthropic.Anthropic) -> None:
    """It begins with a thread that the server would keep, and goes on without on its refusal."""
    requests = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        requests.append(city)
        return "Sunny, 24 degrees"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[get_weather], messages=ASKS, extra_body=GREEDY
    )
    reasons = [message.stop_reason for message in runner]
    assert requests == ["Lisbon"] and reasons == ["tool_use", "end_turn"]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model=MODEL, max_tokens=1, messages=HELLO, extra_body={"thread": {"type": "create"}}
        )
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    "parallel",
    [pytest.param({}, marks=pytest.mark.slow), {"disable_parallel_tool_use": True}],
)
def test_tool_choice_forces_calls_and_forbids_them(
    client: anthropic.Anthropic, parallel: dict[str, Any]
) -> None:
    tools = [WEATHER, ADD]
    for kind, names in (
        ({"type": "tool", "name": "add"}, {"add"}),
        ({"type": "any"}, {"add", "get_weather"}),
    ):
        message = ask(client, tools=tools, tool_choice={**kind, **parallel})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and {call.name for call in calls} <= names
        assert len(calls) == 1 or not parallel
        assert message.stop_reason == "tool_use"
        assert all(set(call.input) == {"a"} for call in calls if call.name == "add")
    none = ask(client, messages=ASKS, tools=tools, tool_choice={"type": "none"})
    assert "tool_use" not in kinds(none)
    auto = ask(client, messages=ASKS, tools=tools, tool_choice={"type": "auto", **parallel})
    assert kinds(auto)[-1] == "tool_use"


def test_a_strict_tool_holds_to_its_schema(client: anthropic.Anthropic) -> None:
    for seed in range(2):
        message = ask(
            client, messages=ASKS, tools=[{**WEATHER, "strict": True}],
            extra_body={"temperature": 1.5, "seed": seed},
        )  # fmt: skip
        for block in message.content:
            if block.type == "tool_use" and message.stop_reason == "tool_use":
                assert set(block.input) == {"city"}


def test_a_call_that_is_cut_off_has_the_arguments_so_far(scripted: Server) -> None:
    client = client_of(scripted)
    seen = []
    for cut in range(1, 15):  # tokens: thought, text, and call are cut off in turn
        message = ask(client, tools=[WEATHER], max_tokens=cut)
        assert message.stop_reason == ("max_tokens" if cut < 13 else "tool_use")
        seen.append((kinds(message), [b.input for b in message.content if b.type == "tool_use"]))
    assert seen[0][0] in ([], ["thinking"]) and ([], []) != seen[3]
    assert (["thinking", "text", "tool_use"], [{}]) in seen
    assert seen[-1] == (["thinking", "text", "tool_use"], [{"city": "Lisbon"}])


def test_output_follows_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Lisbon"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(client, output_config=output, thinking={"type": "disabled"})
    (block,) = message.content
    assert block.type == "text" and json.loads(block.text)["city"] in ("Paris", "Lisbon")


# ---------------------------------------------------------------- thinking


def test_reasoning_is_a_signed_block_that_may_be_sent_back(scripted: Server) -> None:
    client = client_of(scripted)
    message = ask(client, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    assert kinds(message) == ["thinking", "text", "tool_use"]
    thought, text, use = message.content
    assert thought.type == "thinking" and thought.thinking == "two and two" and thought.signature
    assert text.type == "text" and text.text == "Let me look."
    assert use.type == "tool_use" and use.input == {"city": "Lisbon"}
    details = message.usage.output_tokens_details
    assert details and details.thinking_tokens == 2
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
    turns = [*HELLO, {"role": "assistant", "content": message.content},
             {"role": "user", "content": [result]}]  # fmt: skip
    assert ask(client, tools=[WEATHER], messages=turns).content
    hidden = ask(client, tools=[WEATHER], thinking={"type": "adaptive", "display": "omitted"})
    first = hidden.content[0]
    assert first.type == "thinking" and first.thinking == "" and first.signature
    assert kinds(hidden) == kinds(message)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "True "),
        ({"thinking": {"type": "adaptive"}}, "True "),
        ({"thinking": {"type": "disabled"}}, "False "),
        ({}, " "),
        ({"output_config": {"effort": "low"}}, " low"),
    ],
)
def test_thinking_and_effort_reach_the_template(fields: dict[str, Any], text: str) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    with running(
        engine_config(EMBEDDED_MODEL, chat_template=template, reasoning_parser="think_tags")
    ) as server:
        counted = client_of(server).messages.count_tokens(model=MODEL, messages=HELLO, **fields)
        same = httpx.post(f"{server.url}/tokenize", json={"prompt": f"Hello {text}"}).json()
        assert counted.input_tokens == same["count"]


# ---------------------------------------------------------------- counts


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic) -> None:
    requests: list[dict[str, Any]] = [
        {"messages": HELLO},
        {"messages": HELLO, "system": "Be brief."},
        {"messages": HELLO, "tools": [WEATHER]},
        {"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"messages": HELLO, "thinking": {"type": "disabled"}},
        {"messages": [*HELLO, {"role": "assistant", "content": "Well,"}]},
    ]
    counts = []
    for request in requests:
        counted = client.messages.count_tokens(model=MODEL, **request).input_tokens
        usage = ask(client, max_tokens=1, **request).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counts.append(counted)
    assert len(set(counts)) >= 5
    long = [{"role": "user", "content": "word " * 2000}]
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 2000  # type: ignore


def test_a_prompt_read_from_the_cache_is_counted_separately(client: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    first = client.messages.create(model=MODEL, max_tokens=2, messages=turns).usage
    again = client.messages.create(model=MODEL, max_tokens=2, messages=turns).usage
    assert again.cache_read_input_tokens and again.cache_read_input_tokens > 0
    assert (first.input_tokens + (first.cache_read_input_tokens or 0)) == (
        again.input_tokens + again.cache_read_input_tokens
    )


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "other"}, "NotFoundError", "model: 'other' is not served here"),
        ({"messages": []}, "BadRequestError", "messages: must not be empty"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "BadRequestError", "temperature"),
        ({"extra_body": {"stop_sequences": [""]}}, "BadRequestError", "stop_sequences"),
        ({"extra_body": {"chat_template_kwargs": {"nothing": 1}}}, "BadRequestError",
         "chat_template_kwargs.nothing"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "BadRequestError",
         "prompt is too long: 6"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
         "BadRequestError", "messages[0].content[0].source.url: 'image' parts are not supported"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "object", "properties":
                    {"a": {"$ref": "#/nowhere"}}}}], "tool_choice": {"type": "any"}},
         "BadRequestError", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_a_refusal_is_anthropics(
    client: anthropic.Anthropic, fields: Any, kind: str, message: str, streaming: bool
) -> None:
    options = {"model": MODEL, "max_tokens": 8, "messages": HELLO, **fields}
    with pytest.raises(getattr(anthropic, kind)) as refused:
        client.messages.create(stream=streaming, **options)
    body: Any = refused.value.body
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    expected = "not_found_error" if kind == "NotFoundError" else "invalid_request_error"
    assert body["error"]["type"] == expected and body["error"]["message"].startswith(message)
    assert refused.value.request_id


def test_what_no_route_answers_has_the_same_shape(server: Server) -> None:
    for method, path, content, status, kind in (
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[]", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"max_tokens": 1}', 400, "invalid_request_error"),
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
    ):
        response = httpx.request(
            method, server.url + path, content=content, headers={"Content-Type": "application/json"}
        )
        body = response.json()
        assert response.status_code == status and body["type"] == "error", body
        assert body["error"]["type"] == kind
    other = httpx.post(f"{server.url}/v1/messagesX", json={}).json()
    assert "type" not in other and other["error"]["code"] == 404, "OpenAI's, as everywhere else"


def test_keys_come_in_either_header(server: Server) -> None:
    with running(
        engine_config(EMBEDDED_MODEL), ServerOptions(api_keys=("right",), max_body_bytes=4096)
    ) as guarded:
        options: Any = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
        for right in ({"api_key": "right"}, {"auth_token": "right", "api_key": None}):
            assert client_of(guarded, **right).messages.create(**options).usage.output_tokens == 1
        for wrong in ({"api_key": "wrong"}, {"auth_token": "wrong", "api_key": None}):
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client_of(guarded, **wrong).messages.create(**options)
            body: Any = refused.value.body
            assert body["error"]["type"] == "authentication_error" and body["type"] == "error"
        long = {**options, "messages": [{"role": "user", "content": "x" * 5000}]}
        with pytest.raises(anthropic.APIStatusError) as large:
            client_of(guarded, api_key="right").messages.create(**long)
        assert large.value.status_code == 413
        assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


def test_a_keys_limit_of_tokens_holds_for_messages(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "a", "digest": f"sha256:{digest}", "max_tokens": 3}))
    with running(engine_config(EMBEDDED_MODEL), ServerOptions(api_key_files=(keys,))) as guarded:
        message = client_of(guarded, api_key="secret").messages.create(
            model=MODEL, max_tokens=50, messages=HELLO, extra_body={"ignore_eos": True}
        )
        assert message.usage.output_tokens == 3 and message.stop_reason == "max_tokens"


def test_a_request_that_fails_says_so_in_a_stream_too(tmp_path: Path) -> None:
    """Its logits are no numbers."""
    checkpoint = save_scripted(tmp_path / "broken")
    model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(checkpoint)
    with running(engine_config(checkpoint)) as server:
        client = client_of(server)
        for streaming in (False, True):
            with pytest.raises(anthropic.APIStatusError) as failed:
                message = client.messages.create(
                    model=MODEL, max_tokens=8, messages=HELLO, stream=streaming
                )
                for _ in message:
                    pass
            assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_an_abort_in_a_stream_is_an_error_event(server: Server) -> None:
    client = client_of(server)
    options: Any = {"model": MODEL, "max_tokens": 400, "messages": HELLO}
    with client.messages.stream(**options, extra_body={"ignore_eos": True}) as stream:
        events = iter(stream)
        start = next(events)
        assert start.type == "message_start"
        assert server.call(lambda engine: engine.abort(start.message.id))
        with pytest.raises(anthropic.APIStatusError) as raised:
            for _ in events:
                pass
    assert raised.value.body["error"]["message"] == "the request was aborted"  # type: ignore[index]


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    client = client_of(server)
    with client.messages.stream(
        model=MODEL, max_tokens=400, messages=HELLO, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 1}
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert server.becomes(lambda engine: engine.stats().num_requests_waiting == 0)
