"""/v1/responses with the real `openai` client: streams, chains, background, tools, schemas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
import torch
import transformers
from serving import MODEL, Server, engine_config, running, save_scripted

from jackfield import EngineConfig
from jackfield.core.engine.output import RequestState
from jackfield.core.loading.model_config import EMBEDDED_MODEL
from jackfield.entrypoints.openai.context import ServerOptions
from jackfield.entrypoints.openai.responses_job import ResponseJob
from jackfield.entrypoints.openai.responses_protocol import ResponsesRequest

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99},
            "b": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": False,
}
COLOR: Any = {"type": "function", "name": "color", "strict": False, "parameters": {
    "type": "object", "properties": {"of": {"enum": ["sky", "sea"]}}, "required": ["of"],
    "additionalProperties": False}}  # fmt: skip
PAIR = {
    "type": "object",
    "properties": {"left": {"enum": ["a", "b"]}, "right": {"type": "integer", "maximum": 99}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "name": "pair", "schema": PAIR, "strict": True}
LOGPROBS: Any = ["message.output_text.logprobs"]


class Flags(pydantic.BaseModel):
    """What the client turns into a schema."""

    left: bool
    right: bool


EVENT = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        served_model_name=(MODEL,),
        max_num_seqs=16,
        num_gpu_blocks_override=800,
        attention_backend="torch",
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        structured_outputs_config={"disable_any_whitespace": True},  # type: ignore[arg-type]
    )
    with running(config) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def asynchronous(server: Server) -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks, says something, and calls a tool."""
    checkpoint = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as one:
        yield one


def plain(items: Any) -> list[Any]:
    """Output items without what is drawn anew each time; what was computed in another batch is
    nearly the same."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: kept(v) for k, v in value.items() if k not in ("id", "call_id")}
        if isinstance(value, list):
            return [kept(part) for part in value]
        return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value

    return [kept(item if isinstance(item, dict) else item.to_dict()) for item in items]


class Folded:
    """A stream's events, checked for their order and put together by their deltas alone."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.items: list[dict[str, Any]] = []
        self.final: Any = None

    def take(self, event: dict[str, Any]) -> None:
        EVENT.validate_python(event)
        assert event["sequence_number"] == len(self.types)
        kind = event["type"]
        self.types.append(kind)
        assert self.final is None, "nothing comes after the terminal event"
        if "response" in event:
            if kind in TERMINAL:
                self.final = event["response"]
            return
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(self.items) and event["item"]["status"] == "in_progress"
            self.items.append(json.loads(json.dumps(event["item"])))
            return
        item = self.items[index]
        if kind == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            return
        assert event["item_id"] == item["id"] and index == len(self.items) - 1
        match kind:
            case "response.content_part.added":
                item["content"].append(event["part"])
            case "response.output_text.delta":
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "response.function_call_arguments.done":
                assert event["arguments"] == item["arguments"] and event["name"] == item["name"]
            case "response.content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case other:
                raise AssertionError(other)


async def folded(stream: Any) -> Folded:
    made = Folded()
    async for event in stream:
        made.take(event.to_dict())
    assert made.final is not None
    assert made.final["output"] == made.items
    return made


async def both(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """Ask twice, whole and streamed: the same, but for ids and times."""
    options = {"model": MODEL, "max_output_tokens": 300, **options}
    one = await client.responses.create(**options)
    other = await folded(await client.responses.create(stream=True, **options))
    assert plain(one.output) == plain(other.items)
    left, right = one.to_dict(), dict(other.final)
    for name in ("id", "created_at", "completed_at", "output"):
        left.pop(name, None), right.pop(name, None)
    cached: Any = [
        one["usage"]["input_tokens_details"].pop("cached_tokens") for one in (left, right)
    ]
    assert len(cached) == 2 and left == right
    return one


# ---------------------------------------------------------------- text


async def test_streaming_equals_not_streaming_for_every_seed(asynchronous: Any) -> None:
    made = await asyncio.gather(
        *(
            both(asynchronous, input="Once upon a time", temperature=1.2, max_output_tokens=40,
                 include=LOGPROBS, top_logprobs=seed % 3, extra_body={"seed": seed})
            for seed in range(8)
        )
    )  # fmt: skip
    assert len({one.output_text for one in made}) > 4
    for seed, one in enumerate(made):
        assert one.status in ("completed", "incomplete")
        assert (one.status == "incomplete") == (one.incomplete_details is not None)
        (message,) = (item for item in one.output if item.type == "message")
        (part,) = message.content
        assert part.logprobs and all(len(p.top_logprobs) == seed % 3 for p in part.logprobs)
        assert b"".join(bytes(p.bytes) for p in part.logprobs).decode(errors="replace") == part.text


def test_a_response_has_every_field_of_openais(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=5,
        temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="me",
    )  # fmt: skip
    assert made.id.startswith("resp_") and made.object == "response" and made.model == MODEL
    assert made.instructions == "Be brief." and made.metadata == {"a": "b"} and made.user == "me"
    assert (made.temperature, made.top_p, made.max_output_tokens) == (0.5, 0.9, 5)
    assert made.tool_choice == "auto" and made.tools == [] and made.parallel_tool_calls
    assert made.text is not None and made.text.format is not None
    assert made.text.format.type == "text" and made.truncation == "disabled"
    usage = made.usage
    assert usage is not None and usage.output_tokens == 5
    assert usage.total_tokens == usage.input_tokens + 5 and usage.input_tokens > 5
    openai.types.responses.Response.model_validate(made.to_dict())


async def test_thought_text_and_calls_are_items_in_order(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        made = await both(
            client, input="Hi", tools=[tool], temperature=0, include=LOGPROBS, top_logprobs=1
        )
        thought, message, call = made.output
        assert thought.type == "reasoning" and thought.summary == []
        assert thought.content[0].text == "two and two"
        assert message.type == "message" and message.content[0].text == "Let me look."
        assert [p.token for p in message.content[0].logprobs] == ["Let me look."]
        assert call.type == "function_call" and call.status == "completed"
        assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Lisbon"}
        assert made.usage.output_tokens_details.reasoning_tokens == 2
        assert made.status == "completed" and made.completed_at >= made.created_at

        stream = await client.responses.create(
            model=MODEL, input="Hi", tools=[tool], temperature=0, stream=True
        )
        events = await folded(stream)
        order = [kind for kind, _ in itertools.groupby(events.types)]
        text = ["response.output_item.added", "response.content_part.added"]
        done = ["response.content_part.done", "response.output_item.done"]
        assert order == [
            "response.created", "response.in_progress",
            *text, "response.reasoning_text.delta", "response.reasoning_text.done", *done,
            *text, "response.output_text.delta", "response.output_text.done", *done,
            "response.output_item.added", "response.function_call_arguments.delta",
            "response.function_call_arguments.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip

        for cut in range(1, 12):  # tokens: thought, text, and call are cut off in turn
            one = await both(client, input="Hi", tools=[tool], temperature=0, max_output_tokens=cut)
            assert one.status == "incomplete"
            assert one.incomplete_details.reason == "max_output_tokens"
            assert all(item.status == "completed" for item in one.output[:-1])
            for item in one.output[-1:]:
                whole = item.type == "function_call" and cut == 11
                assert item.status == ("completed" if whole else "incomplete")


async def test_a_call_that_was_cut_off_breaks_no_chain(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        options: Any = {"model": MODEL, "temperature": 0, "tools": [tool]}
        cut = await client.responses.create(input="Hi", max_output_tokens=9, **options)
        assert cut.output[-1].type == "function_call" and cut.output[-1].status == "incomplete"
        after = await client.responses.create(input="Go on", previous_response_id=cut.id, **options)
        assert after.output[-1].type == "function_call" and after.status == "completed"
        items = (await client.responses.input_items.list(after.id, order="asc")).data
        assert [item.type for item in items] == ["message", "reasoning", "message", "message"]


@pytest.mark.parametrize(
    ("effort", "said"),
    [("none", "False "), ("minimal", "True low"), ("high", "True high"), ("xhigh", "True high"),
     (None, " ")],
)  # fmt: skip
def test_the_effort_reaches_the_template(effort: Any, said: str) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    config = engine_config(EMBEDDED_MODEL, chat_template=template)
    with running(config) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        made = client.responses.create(
            model=MODEL, input="Hi", temperature=0, max_output_tokens=8,
            reasoning={"effort": effort},
        )  # fmt: skip
        expected = client.completions.create(
            model=MODEL, prompt=f"Hi {said}", temperature=0, max_tokens=8
        )
        assert made.output_text == expected.choices[0].text
        assert made.usage and expected.usage
        assert made.usage.input_tokens == expected.usage.prompt_tokens
        assert made.reasoning is not None and made.reasoning.effort == effort


# ---------------------------------------------------------------- forms


async def test_a_schema_holds_for_every_seed(asynchronous: Any) -> None:
    made = await asyncio.gather(
        *(
            both(asynchronous, input="A pair", text={"format": FORMAT}, temperature=1.5,
                 extra_body={"seed": seed})
            for seed in range(8)
        )
    )  # fmt: skip
    for one in made:
        assert one.status == "completed" and one.text.format.name == "pair"
        pair = json.loads(one.output_text)
        assert list(pair) == ["left", "right"] and pair["left"] in ("a", "b")
        assert type(pair["right"]) is int and pair["right"] <= 99
    assert len({one.output_text for one in made}) > 2


def test_the_client_parses_and_streams_into_a_class(client: openai.OpenAI) -> None:
    made = client.responses.parse(model=MODEL, input="A pair", text_format=Flags)
    assert isinstance(made.output_parsed, Flags)
    with client.responses.stream(model=MODEL, input="A pair", text_format=Flags) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert isinstance(stream.get_final_response().output_parsed, Flags)


async def test_a_json_object_is_one(asynchronous: Any) -> None:
    one = await both(
        asynchronous, input="A thing", text={"format": {"type": "json_object"}},
        extra_body={"seed": 1}, max_output_tokens=400,
    )  # fmt: skip
    assert one.status == "incomplete" or isinstance(json.loads(one.output_text), dict)


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "color"}),
        ({"type": "function", "name": "add"}, {"add"}),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "color"}]}, {"color"}),
    ],
    ids=["required", "named", "allowed"],
)  # fmt: skip
async def test_a_forced_call_is_made_for_every_seed(
    asynchronous: Any, choice: Any, names: set[str]
) -> None:
    made = await asyncio.gather(
        *(
            both(asynchronous, input="3 and 4", tools=[ADD, COLOR], tool_choice=choice,
                 parallel_tool_calls=False, temperature=1.5, extra_body={"seed": seed})
            for seed in range(6)
        )
    )  # fmt: skip
    for one in made:
        (call,) = one.output
        assert call.type == "function_call" and call.name in names
        assert call.call_id.startswith("call_") and call.status == "completed"
        asked = {"add": {"a", "b"}, "color": {"of"}}
        assert set(json.loads(call.arguments)) == asked[call.name]
        assert one.tool_choice == choice or one.to_dict()["tool_choice"] == choice


def test_a_tool_loop_by_previous_response_and_by_items(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="3 and 4", tools=[ADD], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = first.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    result: Any = {
        "type": "function_call_output", "call_id": call.call_id,
        "output": str(arguments["a"] + arguments["b"]),
    }  # fmt: skip
    options: Any = {
        "model": MODEL, "tools": [ADD], "tool_choice": "none", "temperature": 0,
        "max_output_tokens": 20,
    }  # fmt: skip
    chained = client.responses.create(previous_response_id=first.id, input=[result], **options)
    told: Any = [{"role": "user", "content": "3 and 4"}, *first.output, result]
    listed = client.responses.create(input=told, store=False, **options)
    assert chained.output_text == listed.output_text
    assert chained.usage and listed.usage
    assert chained.usage.input_tokens == listed.usage.input_tokens
    referenced = client.responses.create(
        input=[told[0], {"type": "item_reference", "id": call.id or ""}, result], **options
    )
    assert referenced.output_text == chained.output_text
    items = client.responses.input_items.list(chained.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_chain_reads_as_the_conversation_it_is(client: openai.OpenAI) -> None:
    """Equal tokens, and so equal answers, as a chat with the same messages."""
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    one = client.responses.create(input="Hello", instructions="Be brief.", **options)
    two = client.responses.create(input="And now?", previous_response_id=one.id, **options)
    three = client.responses.create(
        input=[{"role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
               {"role": "user", "content": "So?"}],
        previous_response_id=two.id, instructions="Be long.", **options,
    )  # fmt: skip
    messages: Any = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": one.output_text},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": two.output_text},
        {"role": "system", "content": "Go on."},
        {"role": "user", "content": "So?"},
    ]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=16
    )
    assert chat.choices[0].message.content == three.output_text
    assert chat.usage and three.usage
    assert chat.usage.prompt_tokens == three.usage.input_tokens
    assert three.usage.input_tokens_details.cached_tokens >= 0


# ---------------------------------------------------------------- kept ones


def test_what_is_kept_is_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id)
    assert item.type == "message" and item.to_dict()["content"][0]["text"] == "Hello"  # type: ignore[index]
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel,
                 client.responses.input_items.list):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2, store=False)
    assert unkept.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    kept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(kept.id)


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    told: Any = [{"role": "user", "content": str(n)} for n in range(7)]
    made = client.responses.create(model=MODEL, input=told, max_output_tokens=2)
    for order, numbers in (("asc", list("0123456")), ("desc", list("6543210"))):
        pages = client.responses.input_items.list(made.id, limit=3, order=order)  # type: ignore[arg-type]
        assert len(pages.data) == 3 and pages.has_more
        shown = [item.to_dict()["content"][0]["text"] for item in pages]  # type: ignore[index]
        assert shown == numbers


async def test_a_streamed_response_is_kept_when_its_last_event_comes(asynchronous: Any) -> None:
    stream = await asynchronous.responses.create(
        model=MODEL, input="Hello", max_output_tokens=5, stream=True
    )
    async for event in stream:
        if event.type in TERMINAL:
            kept = await asynchronous.responses.retrieve(event.response.id)
            assert kept.to_dict() == event.response.to_dict()
            break
    else:
        raise AssertionError("no terminal event")


def test_the_oldest_are_dropped_for_the_newest() -> None:
    config = engine_config(EMBEDDED_MODEL)
    small = ServerOptions(max_stored_responses=2, max_stored_response_bytes=16_000)
    with running(config, small) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def made(text: str) -> str:
            return client.responses.create(model=MODEL, input=text, max_output_tokens=2).id

        def kept(ids: list[str]) -> list[bool]:
            return [httpx.get(f"{server.url}/v1/responses/{id}").status_code == 200 for id in ids]

        ids = [made("a"), made("b"), made("c")]
        assert kept(ids) == [False, True, True]
        ids.append(made("d " * 500))
        assert kept(ids) == [False, False, True, True]
        long = {"model": MODEL, "input": "e", "max_output_tokens": 2, "metadata": {
            str(n): "x" * 500 for n in range(16)}}  # fmt: skip
        ids.append(httpx.post(f"{server.url}/v1/responses", json=long).json()["id"])
        ids.append(httpx.post(f"{server.url}/v1/responses", json=long).json()["id"])
        assert kept(ids[2:]) == [False, False, False, True]


def test_a_server_may_keep_nothing() -> None:
    with running(engine_config(EMBEDDED_MODEL), ServerOptions(max_stored_responses=0)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = client.responses.create(model=MODEL, input="a", max_output_tokens=2, store=True)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(model=MODEL, input="a", background=True)


# ---------------------------------------------------------------- in the background

LONG: Any = {"model": MODEL, "input": "Hello", "extra_body": {"ignore_eos": True}}


async def polled(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(60):
        while (made := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0)
    return made


async def test_a_background_response_is_polled_to_its_end(asynchronous: Any) -> None:
    begun = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=30)
    assert begun.status == "queued" and begun.background and begun.usage is None
    with pytest.raises(openai.BadRequestError, match="still running"):
        await asynchronous.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    ended = await polled(asynchronous, begun.id)
    assert ended.status == "incomplete" and ended.usage.output_tokens == 30
    assert (await asynchronous.responses.cancel(begun.id)).status == "incomplete"


async def test_a_background_response_is_cancelled(server: Server, asynchronous: Any) -> None:
    begun = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=1900)
    cancelled = await asynchronous.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert (await asynchronous.responses.cancel(begun.id)).to_dict() == cancelled.to_dict()
    assert (await asynchronous.responses.retrieve(begun.id)).to_dict() == cancelled.to_dict()
    other = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=1900)
    await asynchronous.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        await asynchronous.responses.retrieve(other.id)
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


async def test_a_stream_that_is_left_goes_on_only_in_the_background(
    server: Server, asynchronous: Any
) -> None:
    ids = []
    for background in (False, True):
        stream = await asynchronous.responses.create(
            **LONG, background=background, stream=True, max_output_tokens=200
        )
        async for event in stream:
            if event.type == "response.created":
                ids.append(event.response.id)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    with pytest.raises(openai.NotFoundError):
        await asynchronous.responses.retrieve(ids[0])
    ended = await polled(asynchronous, ids[1])
    assert ended.usage.output_tokens == 200
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert server.call(lambda engine: engine.stats().requests_finished.get("abort", 0)) > 0

    again = await folded(await asynchronous.responses.retrieve(ids[1], stream=True))
    assert again.types[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert again.final == ended.to_dict()
    rest = await asynchronous.responses.retrieve(ids[1], stream=True, starting_after=4)
    numbers = [event.sequence_number async for event in rest]
    assert numbers == list(range(5, len(again.types)))


async def test_several_follow_one_response(asynchronous: Any) -> None:
    stream = await asynchronous.responses.create(
        **LONG, background=True, stream=True, max_output_tokens=60
    )
    first = await anext(stream)

    async def follow() -> Folded:
        return await folded(await asynchronous.responses.retrieve(first.response.id, stream=True))

    one, other = await asyncio.gather(follow(), follow())
    assert one.final == other.final and one.types == other.types
    assert first.response.id == one.final["id"]
    await stream.close()
    unstreamed = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=2)
    with pytest.raises(openai.BadRequestError):
        await asynchronous.responses.retrieve(unstreamed.id, stream=True)


async def test_a_server_that_stops_leaves_no_background_work() -> None:
    with running(engine_config(EMBEDDED_MODEL)) as one:
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none") as client:
            await client.responses.create(**LONG, background=True, max_output_tokens=400)
        engine = one.engine
    assert engine.stats().num_requests_running == 0
    assert engine.stats().requests_finished.get("abort") == 1


def test_a_stream_that_is_followed_ends_with_the_server() -> None:
    body = {"model": MODEL, "input": "Hello", "background": True, "stream": True,
            "ignore_eos": True, "max_output_tokens": 400}  # fmt: skip
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(engine_config(EMBEDDED_MODEL)))
        url = f"{server.url}/v1/responses"
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            stack.close()
            assert not any(line == "event: response.completed" for line in lines)


async def test_the_asynchronous_helper_streams(asynchronous: Any) -> None:
    async with asynchronous.responses.stream(
        model=MODEL, input="Hello", max_output_tokens=40, text_format=Flags
    ) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        made = await stream.get_final_response()
    assert made.output_text == text and isinstance(made.output_parsed, Flags)


# ---------------------------------------------------------------- limits


def test_a_whole_response_that_nobody_waits_for_is_aborted(server: Server) -> None:
    before = server.call(lambda engine: engine.stats().requests_finished.get("abort", 0))
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 1900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/responses", json=body, timeout=0.3)
    assert server.becomes(
        lambda engine: engine.stats().requests_finished.get("abort", 0) == before + 1
    )
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


async def test_a_kept_response_holds_no_job_and_no_engine_request(
    server: Server, asynchronous: Any
) -> None:
    def jobs(_: Any) -> int:
        gc.collect()
        kinds = (ResponseJob, RequestState)
        return sum(type(one) in kinds for one in gc.get_objects())

    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    before = server.call(jobs)
    for way in ({}, {"background": True}):
        made = await asynchronous.responses.create(
            model=MODEL, input="Hello", max_output_tokens=3, **way
        )
        await polled(asynchronous, made.id)
    assert server.call(jobs) <= before


async def test_a_response_that_fails_says_so(tmp_path: Path) -> None:
    """Its logits are no numbers."""
    checkpoint = save_scripted(tmp_path / "broken")
    model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(checkpoint)
    with running(engine_config(checkpoint)) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model=MODEL, input="Hi")
            made = await folded(await client.responses.create(model=MODEL, input="Hi", stream=True))
            assert made.types[-1] == "response.failed" and made.final["status"] == "failed"
            assert made.final["error"]["code"] == "server_error"
            assert made.final["error"]["message"]
            begun = await client.responses.create(model=MODEL, input="Hi", background=True)
            ended = await polled(client, begun.id)
            assert ended.status == "failed" and ended.error is not None


def test_truncation_drops_the_oldest_turns() -> None:
    with running(engine_config(EMBEDDED_MODEL, max_model_len=128)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        turns: Any = []
        for number in range(6):
            turns += [{"role": "user", "content": f"{number} " + "word " * 20},
                      {"role": "assistant", "content": "Yes."}]  # fmt: skip
        turns.append({"role": "user", "content": "So?"})
        options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8,
                        "instructions": "Be brief."}  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input=turns, **options)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
        cut = client.responses.create(input=turns, truncation="auto", **options)
        assert cut.truncation == "auto" and cut.usage and cut.usage.input_tokens <= 120
        fitting = []
        for start in range(0, len(turns), 2):
            try:
                fitting.append(client.responses.create(input=turns[start:], **options))
            except openai.BadRequestError:
                continue
        within = [one for one in fitting if one.usage and one.usage.input_tokens <= 120]
        assert within[0].usage and within[0].usage.input_tokens == cut.usage.input_tokens
        assert within[0].output_text == cut.output_text
        short = client.responses.create(input="So?", truncation="auto", **options)
        plain = client.responses.create(input="So?", **options)
        assert short.output_text == plain.output_text


USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [USER, {**CALL, "arguments": "{"}]}, "input[1].arguments"),
        ({"input": [USER, {**CALL, "name": ""}]}, "input[1].name"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
         "input"),
        ({"input": [USER, CALL, {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": "x"}]}]}, "input[2].output[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, {"type": "custom", "name": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "required", "text": {"format": FORMAT}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "?"}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 3}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 200}, "temperature"),
        ({"background": True, "store": False}, "background"),
        ({"input": "word " * 4000}, "input"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_wrong_wishes_are_refused_by_name(
    server: Server, options: dict[str, Any], param: str
) -> None:
    for way in ({}, {"stream": True}, {"background": True}):
        body = {"model": MODEL, "input": "x", "max_output_tokens": 3, **way, **options}
        answer = httpx.post(f"{server.url}/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    listed = httpx.get(f"{server.url}/v1/responses/resp_none?stream=true")
    assert listed.status_code == 404


def test_fields_of_other_clients_are_taken(server: Server) -> None:
    body = {
        "model": MODEL, "input": "x", "max_output_tokens": 2, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "unheard_of": 1,
        "stream_options": {"include_obfuscation": False}, "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"},
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/responses", json=body).json()
    assert answer["prompt_cache_key"] == "k" and answer["safety_identifier"] == "s"
    assert answer["service_tier"] == "default" and answer["max_tool_calls"] == 3


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**400, 1e308, "", "x", "\x00", "\ud800", "<|im_end|>",
    [], {}, [None], [[]], [{}], [3], ["x"], ["\ud800"], {"x": None}, {"x": "\ud800"},
    {"\ud800": "x"}, {"type": None}, {"type": "x"}, {"type": "message"},
    [{"role": "user", "content": "\ud800"}], [{"type": "function", "name": "\ud800"}],
    {"type": "json_schema"}, {"type": "json_schema", "schema": 3}, {"format": []},
    {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}, {"effort": 3},
    {"type": "function"}, {"type": "function", "name": None}, {"type": "allowed_tools"},
    {"type": "allowed_tools", "mode": "auto", "tools": [None]}, [{"type": "function", "name": 3}],
    [{"type": "function", "name": "f", "parameters": {"type": 3}, "strict": True}],
    [{"role": "user"}], [{"role": "user", "content": [None]}], [{"type": []}], [{"id": []}],
    [{"type": "message", "role": [], "content": "x"}], [{"role": "assistant", "content": []}],
    [{"type": "reasoning", "content": 3, "summary": 3}], [{"type": "reasoning", "id": 3}],
    [{"type": "function_call", "name": "f", "arguments": "[" * 5000, "call_id": "x"}],
    [{"type": "function_call_output", "call_id": "x", "output": {}}],
    [{"type": "item_reference"}], [{"role": "system", "content": "x"}], {"k": "v"},
]  # fmt: skip


def test_odd_values_in_any_field_are_refused_or_answered(server: Server) -> None:
    answered = refused = 0
    fields = [*ResponsesRequest.__struct_fields__, "zebra"]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for field in fields:
            for value in ODD:
                body = {"model": MODEL, "input": "x", "max_output_tokens": 1, field: value}
                if field == "max_output_tokens" and value not in (0, -1, 1):
                    body["stop"] = ["e", "a", " "]
                answer = client.post("/v1/responses", content=json.dumps(body))
                assert answer.status_code in (200, 400, 404), (body, answer.text[:300])
                answered += answer.status_code == 200
                refused += answer.status_code == 400
    assert answered > 200 and refused > 800
    assert server.becomes(lambda engine: engine.stats().kv_blocks_used == 0)
