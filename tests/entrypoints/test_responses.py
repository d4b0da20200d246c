"""/v1/responses with the real `openai` client: text, streams, thought, schemas, tools, chains."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from responding import ADD, COLOR, CONFIG, FORMAT, LOGPROBS, Flags, both, folded
from serving import MODEL, Server, engine_config, running, save_scripted

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(CONFIG) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks, says something, and calls a tool."""
    checkpoint = save_scripted(tmp_path_factory.mktemp("scripted"))
    config = engine_config(checkpoint, reasoning_parser="qwen3", tool_call_parser="hermes")
    with running(config) as item:
        yield item


# ---------------------------------------------------------------- text


async def test_streaming_equals_not_streaming_for_every_seed(asynchronous: Any) -> None:
    results = await asyncio.gather(
        *(
            both(asynchronous, input="Once upon a time", temperature=1.2, max_output_tokens=40,
                 include=LOGPROBS, top_logprobs=seed % 3, extra_body={"seed": seed})
            for seed in range(4)
        )
    )  # fmt: skip
    assert len({entry.output_text for entry in results}) > 2
    for seed, entry in enumerate(results):
        assert entry.status in ("completed", "incomplete")
        assert (entry.status == "incomplete") == (entry.incomplete_details is not None)
        (message,) = (item for item in entry.output if item.type == "message")
        (part,) = message.content
        assert part.logprobs and all(len(p.top_logprobs) == seed % 3 for p in part.logprobs)
        assert b"".join(bytes(p.bytes) for p in part.logprobs).decode(errors="replace") == part.text


def test_a_response_has_every_field_of_openais(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=5,
        temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="me",
    )  # fmt: skip
    assert (
        response.id.startswith("resp_")
        and response.object == "response"
        and response.model == MODEL
    )
    assert (
        response.instructions == "Be brief."
        and response.metadata == {"a": "b"}
        and response.user == "me"
    )
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 5)
    assert response.tool_choice == "auto" and response.tools == [] and response.parallel_tool_calls
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "text" and response.truncation == "disabled"
    usage = response.usage
    assert usage is not None and usage.output_tokens == 5
    assert usage.total_tokens == usage.input_tokens + 5 and usage.input_tokens > 5
    openai.types.responses.Response.model_validate(response.to_dict())


async def test_reasoning_text_and_calls_are_items_in_order(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        response = await both(
            client, input="Hi", tools=[tool], temperature=0, include=LOGPROBS, top_logprobs=1
        )
        thought, message, call = response.output
        assert thought.type == "reasoning" and thought.summary == []
        assert thought.content[0].text == "two and two"
        assert message.type == "message" and message.content[0].text == "Let me look."
        assert [p.token for p in message.content[0].logprobs] == ["Let me look."]
        assert call.type == "function_call" and call.status == "completed"
        assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Lisbon"}
        assert response.usage.output_tokens_details.reasoning_tokens == 2
        assert response.status == "completed" and response.completed_at >= response.created_at

        stream = await client.responses.create(
            model=MODEL, input="Hi", tools=[tool], temperature=0, stream=True
        )
        events = await folded(stream)
        order = [kind for kind, _ in itertools.groupby(events.types)]
        text = ["response.output_item.added", "response.content_part.added"]
        ending = ["response.content_part.done", "response.output_item.done"]
        assert order == [
            "response.created", "response.in_progress",
            *text, "response.reasoning_text.delta", "response.reasoning_text.done", *ending,
            *text, "response.output_text.delta", "response.output_text.done", *ending,
            "response.output_item.added", "response.function_call_arguments.delta",
            "response.function_call_arguments.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip

        for cut in range(1, 12):  # tokens: thought, text, and call are cut off in turn
            first = await both(
                client, input="Hi", tools=[tool], temperature=0, max_output_tokens=cut
            )
            assert first.status == "incomplete"
            assert first.incomplete_details.reason == "max_output_tokens"
            assert all(item.status == "completed" for item in first.output[:-1])
            for item in first.output[-1:]:
                whole = item.type == "function_call" and cut == 11
                assert item.status == ("completed" if whole else "incomplete")


async def test_a_call_that_was_cut_off_breaks_no_chain(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        options: Any = {"model": MODEL, "temperature": 0, "tools": [tool]}
        cut = await client.responses.create(input="Hi", max_output_tokens=9, **options)
        call = cut.output[-1]
        assert call.type == "function_call" and call.status == "incomplete"
        after = await client.responses.create(input="Go on", previous_response_id=cut.id, **options)
        assert after.output[-1].type == "function_call" and after.status == "completed"
        items = (await client.responses.input_items.list(after.id, order="asc")).data
        assert [item.type for item in items] == [
            "message", "reasoning", "message", "function_call", "message",
        ]  # fmt: skip
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "not run"}
        ids = [cut.id, None]
        for before, items in zip(ids, ([result], [*cut.output, result]), strict=True):
            answer = await client.responses.create(
                input=items, previous_response_id=before, **options
            )
            assert answer.output[-1].type == "function_call"


@pytest.mark.parametrize(
    ("effort", "text"),
    [("none", "False "), ("minimal", "True low"), ("high", "True high"), ("xhigh", "True high"),
     (None, " ")],
)  # fmt: skip
def test_the_effort_reaches_the_template(effort: Any, text: str) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    config = engine_config(EMBEDDED_MODEL, chat_template=template)
    with running(config) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        response = client.responses.create(
            model=MODEL, input="Hi", temperature=0, max_output_tokens=8,
            reasoning={"effort": effort},
        )  # fmt: skip
        expected = client.completions.create(
            model=MODEL, prompt=f"Hi {text}", temperature=0, max_tokens=8
        )
        assert response.output_text == expected.choices[0].text
        assert response.usage and expected.usage
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        assert response.reasoning is not None and response.reasoning.effort == effort


# ---------------------------------------------------------------- forms


async def test_a_schema_holds_for_every_seed(asynchronous: Any) -> None:
    results = await asyncio.gather(
        *(
            both(asynchronous, input="A pair", text={"format": FORMAT}, temperature=1.5,
                 extra_body={"seed": seed})
            for seed in range(4)
        )
    )  # fmt: skip
    for item in results:
        assert item.status == "completed" and item.text.format.name == "pair"
        pair = json.loads(item.output_text)
        assert list(pair) == ["left", "right"] and pair["left"] in ("a", "b")
        assert type(pair["right"]) is int and pair["right"] <= 99
    assert len({item.output_text for item in results}) > 1


def test_the_client_parses_and_streams_into_a_class(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input="A pair", text_format=Flags)
    assert isinstance(response.output_parsed, Flags)
    with client.responses.stream(model=MODEL, input="A pair", text_format=Flags) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert isinstance(stream.get_final_response().output_parsed, Flags)


async def test_a_json_object_is_one(asynchronous: Any) -> None:
    first = await both(
        asynchronous, input="A thing", text={"format": {"type": "json_object"}},
        extra_body={"seed": 1}, max_output_tokens=400,
    )  # fmt: skip
    assert first.status == "incomplete" or isinstance(json.loads(first.output_text), dict)


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
async def test_a_required_call_is_made_for_every_seed(
    asynchronous: Any, choice: Any, names: set[str]
) -> None:
    results = await asyncio.gather(
        *(
            both(asynchronous, input="3 and 4", tools=[ADD, COLOR], tool_choice=choice,
                 parallel_tool_calls=False, temperature=1.5, extra_body={"seed": seed})
            for seed in range(3)
        )
    )  # fmt: skip
    for item in results:
        (call,) = item.output
        assert call.type == "function_call" and call.name in names
        assert call.call_id.startswith("call_") and call.status == "completed"
        parameters = {"add": {"a", "b"}, "color": {"of"}}
        assert set(json.loads(call.arguments)) == parameters[call.name]
        assert item.tool_choice == choice or item.to_dict()["tool_choice"] == choice


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
    conversation: Any = [{"role": "user", "content": "3 and 4"}, *first.output, result]
    listed = client.responses.create(input=conversation, store=False, **options)
    assert chained.output_text == listed.output_text
    assert chained.usage and listed.usage
    assert chained.usage.input_tokens == listed.usage.input_tokens
    referenced = client.responses.create(
        input=[conversation[0], {"type": "item_reference", "id": call.id or ""}, result], **options
    )
    assert referenced.output_text == chained.output_text
    items = client.responses.input_items.list(chained.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_chain_reads_as_the_conversation_it_is(client: openai.OpenAI) -> None:
    """Equal tokens, and so equal answers, as a chat with the same messages."""
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(input="Hello", instructions="Be brief.", **options)
    two = client.responses.create(input="And now?", previous_response_id=first.id, **options)
    three = client.responses.create(
        input=[{"role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
               {"role": "user", "content": "So?"}],
        previous_response_id=two.id, instructions="Be long.", **options,
    )  # fmt: skip
    messages: Any = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
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


async def test_the_asynchronous_helper_streams(asynchronous: Any) -> None:
    async with asynchronous.responses.stream(
        model=MODEL, input="Hello", max_output_tokens=40, text_format=Flags
    ) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        response = await stream.get_final_response()
    assert response.output_text == text and isinstance(response.output_parsed, Flags)


async def test_reasoning_may_be_left_out_of_the_output(scripted: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        response = await both(
            client, input="Hi", tools=[tool], temperature=0, include=LOGPROBS, top_logprobs=1,
            extra_body={"include_reasoning": False},
        )  # fmt: skip
        assert [item.type for item in response.output] == ["message", "function_call"]
        (part,) = response.output[0].content
        assert [p.token for p in part.logprobs] == [part.text] == ["Let me look."]
        assert response.usage.output_tokens_details.reasoning_tokens == 2
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                model=MODEL, input="Hi", extra_body={"vllm_xargs": {"nothing": 1}}
            )
        assert "nothing" in str(refused.value)
