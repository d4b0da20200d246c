"""Structured outputs over HTTP, with the real `openai` client, on the embedded model."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
from serving import MODEL, Server, running

from jackfield import EngineConfig

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 12},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
EVENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "day": {"enum": ["monday", "friday"]},
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "first": {"type": "string", "maxLength": 8},
                    "age": {"type": ["integer", "null"]},
                },
                "required": ["first", "age"],
                "additionalProperties": False,
            },
            "maxItems": 2,
        },
    },
    "required": ["name", "day", "people"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "event", "strict": True, "schema": EVENT},
}
PATHS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "maxLength": 5},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b"]},
            "uniqueItems": True,
            "maxItems": 2,
        },
        "sizes": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxProperties": 0,
        },
    },
    "required": ["path", "tags", "sizes"],
    "additionalProperties": False,
}
"""As pydantic writes a Path and a set, and zod a record."""
UNHELD = {
    "type": "json_schema",
    "json_schema": {"name": "paths", "strict": True, "schema": PATHS},
}
MESSAGES: Any = [
    {"role": "user", "content": "What is the weather in Lisbon on friday? Add 3 and 4."}
]


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


DEEP = deep(300)


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
        structured_outputs_config={  # type: ignore[arg-type]
            "disable_any_whitespace": True, "compile_timeout": 5.0,
        },
    )  # fmt: skip
    with running(config) as running_server:
        yield running_server


async def whole(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, **options}
    response = await client.chat.completions.create(**body)
    (choice,) = response.choices
    return {
        "content": choice.message.content,
        "calls": [
            (c.function.name, c.function.arguments)  # type: ignore[union-attr]
            for c in choice.message.tool_calls or []
        ],
        "finish": choice.finish_reason,
    }


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    content: str | None = None
    calls: dict[int, list[str]] = {}
    finish = None
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=300, stream=True, **options
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.content:
            content = (content or "") + choice.delta.content
        for call in choice.delta.tool_calls or []:
            parts = calls.setdefault(call.index, ["", ""])
            assert call.function is not None
            if call.function.name:
                assert call.id and parts == ["", ""]
                parts[0] = call.function.name
            parts[1] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return {"content": content, "calls": [tuple(c) for _, c in sorted(calls.items())],
            "finish": finish}  # fmt: skip


def check_event(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "day", "people"] and len(value["name"]) <= 16
    assert value["day"] in ("monday", "friday") and len(value["people"]) <= 2
    for person in value["people"]:
        assert list(person) == ["first", "age"] and len(person["first"]) <= 8
        assert person["age"] is None or type(person["age"]) is int


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "add":
        assert list(value) == ["a", "b"] and all(
            type(v) is int and 0 <= v <= 99 for v in value.values()
        )
    else:
        assert name == "get_weather" and list(value) == ["city", "unit"]
        assert 1 <= len(value["city"]) <= 12 and value["unit"] in ("celsius", "fahrenheit")


async def both(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    first, other = await asyncio.gather(whole(client, **options), streamed(client, **options))
    assert first == other
    return first


async def test_a_strict_schema_holds_for_every_seed_and_temperature(asynchronous: Any) -> None:
    settings = [
        {"seed": seed, "temperature": temperature}
        for temperature in (0.0, 0.7, 1.0, 1.8)
        for seed in range(3)
    ]
    results = await asyncio.gather(
        *(both(asynchronous, response_format=FORMAT, **setting) for setting in settings)
    )
    complete = [response for response in results if response["finish"] == "stop"]
    assert len(complete) >= 10
    for response in complete:
        check_event(response["content"])
    assert len({response["content"] for response in results}) > 5


async def test_required_tools_are_called_for_every_seed(asynchronous: Any) -> None:
    results = await asyncio.gather(
        *(
            both(asynchronous, tools=[WEATHER, ADD], tool_choice="required", seed=seed,
                 temperature=1.5, parallel_tool_calls=seed % 2 == 0)
            for seed in range(8)
        )
    )  # fmt: skip
    for seed, response in enumerate(results):
        assert response["content"] is None and response["calls"]
        if response["finish"] == "length":
            continue
        assert response["finish"] == "tool_calls"
        assert seed % 2 == 0 or len(response["calls"]) == 1
        for call in response["calls"]:
            check_call(*call)
    assert sum(response["finish"] == "tool_calls" for response in results) >= 6


async def test_a_named_tool_is_called_for_every_seed(asynchronous: Any) -> None:
    for tool in (WEATHER, ADD):
        name: Any = tool["function"]["name"]  # type: ignore[index]
        choice = {"type": "function", "function": {"name": name}}
        for response in await asyncio.gather(
            *(both(asynchronous, tools=[WEATHER, ADD], tool_choice=choice, seed=seed)
              for seed in range(4))
        ):  # fmt: skip
            assert response["finish"] == "stop" and response["content"] is None
            ((called, arguments),) = response["calls"]
            assert called == name
            check_call(called, arguments)


async def test_a_strict_tool_is_constrained_to_its_schema_when_it_is_called(
    asynchronous: Any,
) -> None:
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    opened = {"1532": 100.0}  # <tool_call>, so that the model does call something
    results = await asyncio.gather(
        *(
            both(asynchronous, tools=[strict], seed=seed, temperature=1.8, logit_bias=opened,
                 parallel_tool_calls=False)
            for seed in range(6)
        )
    )  # fmt: skip
    for response in results:
        ((name, arguments),) = response["calls"]
        assert response["finish"] == "tool_calls" and response["content"] is None
        check_call(name, arguments)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "(red|blue){2}!"}, "(red|blue){2}!"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" ("b" | "c")'}, "ab|ac"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, "ab|ac"),
        ({"guided_json": json.dumps({"enum": [1, 2]})}, "1|2"),
        ({"structured_outputs": {"json": {"const": None}}}, "null"),
        ({"structured_outputs": {"regex": "[xy]"}}, "x|y"),
        ({"response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<n>", "schema": {"enum": [7, 8]}, "end": "</n>"}],
            "triggers": ["<n>"], "at_least_one": True, "stop_after_first": True}},
         "<n>(7|8)</n>"),
    ],
    ids=lambda value: str(value)[:32],
)  # fmt: skip
def test_every_kind_works_in_chat_and_completions(
    client: openai.OpenAI, extra: dict[str, Any], pattern: str
) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, seed=2, extra_body=extra
    )
    completion = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=200, seed=2, extra_body=extra
    )
    for text, finish in (
        (chat.choices[0].message.content, chat.choices[0].finish_reason),
        (completion.choices[0].text, completion.choices[0].finish_reason),
    ):
        assert finish == "stop" and re.fullmatch(pattern, text or "", re.DOTALL), text


async def test_a_json_object_is_one(asynchronous: Any) -> None:
    requests = (
        whole(asynchronous, response_format={"type": "json_object"}, seed=s) for s in range(4)
    )
    complete = [a["content"] for a in await asyncio.gather(*requests) if a["finish"] == "stop"]
    assert complete and all(isinstance(json.loads(content), dict) for content in complete)


def test_the_client_parses_a_response_format(client: openai.OpenAI) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Pair(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        left: int
        right: bool

    response = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, max_tokens=100, seed=4, response_format=Pair
    )
    assert isinstance(response.choices[0].message.parsed, Pair)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}},
         "response_format"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_choice": "a"}}, "guided_choice"),
        ({"extra_body": {"structured_outputs": {"regexp": "a"}}}, "structured_outputs.regexp"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
         "tool_choice"),
        ({"response_format": UNHELD}, "response_format"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": PATHS}}], "tool_choice": "required"},
         "tools"),
        ({"tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": PATHS}}]}, "tools"),
        ({"response_format": FORMAT, "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "?"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
          "tool_choice": "required"}, "tools"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=5, stream=stream, **options
            )
        assert caught.value.body["param"] == param, caught.value.body  # type: ignore[index]


def chain(count: int, last: str = "last") -> Any:
    """References, each to the next; to the first one: a cycle."""
    schemas: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"const": i}]} for i in range(count)
    }
    schemas[f"a{count}"] = {"$ref": f"#/$defs/{last}"}
    return {"$ref": "#/$defs/a0", "$defs": {**schemas, "last": {"type": "string"}}}


async def test_a_required_call_wins_over_any_other_grammar(asynchronous: Any) -> None:
    """As agents ask that want a call now and a format at last."""
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        for extra in ({"response_format": FORMAT}, {"extra_body": {"guided_regex": "x"}}):
            reply = await both(
                asynchronous, tools=[ADD], tool_choice=choice, seed=3, parallel_tool_calls=False,
                **extra,
            )  # fmt: skip
            assert reply["content"] is None
            ((name, arguments),) = reply["calls"]
            check_call(name, arguments)
    response = await asynchronous.responses.create(
        model=MODEL,
        input="Add 3 and 4.",
        tools=[{"type": "function", **ADD["function"], "strict": False}],  # type: ignore[dict-item]
        tool_choice="required",
        text={"format": {"type": "json_schema", "name": "event", "schema": EVENT}},
        max_output_tokens=300,
    )
    assert {item.type for item in response.output} == {"function_call"}


async def test_with_auto_the_answer_is_a_call_or_follows_the_format(asynchronous: Any) -> None:
    requests = [
        both(asynchronous, tools=[{**ADD, "function": {**ADD["function"], "strict": True}}],  # type: ignore[dict-item]
             response_format=FORMAT, seed=seed, parallel_tool_calls=False, logit_bias=bias)
        for seed in range(3)
        for bias in ({"1532": -100.0}, {"1532": 100.0})
    ]  # fmt: skip
    results = await asyncio.gather(*requests)
    for response in results:
        if response["calls"]:
            assert response["content"] is None
            check_call(*response["calls"][0])
        elif response["finish"] == "stop":
            check_event(response["content"])
    assert {bool(response["calls"]) for response in results} == {True, False}


def test_older_fields_that_say_the_same_are_accepted(client: openai.OpenAI) -> None:
    for extra in (
        {"guided_regex": "ab?c", "structured_outputs": {"regex": "ab?c"}},
        {"guided_choice": ["abc", "ac"], "structured_outputs": {"choice": ["abc", "ac"]}},
        {"guided_json": '{"enum": [1]}', "structured_outputs": {"json": {"enum": [1]}}},
        {"guided_json": {"enum": [1]}, "structured_outputs": {"json": '{"enum": [1]}'}},
    ):
        response = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=20, extra_body=extra
        )
        assert response.choices[0].text in ("abc", "ac", "1")


def test_older_fields_without_a_meaning_here_are_ignored_and_logged(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    from jackfield.entrypoints.openai.common import decoding

    decoding._log_ignored.cache_clear()
    older = {"guided_decoding_backend": "outlines", "guided_whitespace_pattern": "[ ]?"}
    decoding.logger.addHandler(caplog.handler)  # A server's log goes nowhere else.
    with caplog.at_level("INFO", logger="jackfield.server"):
        for _ in range(2):
            response = client.completions.create(
                model=MODEL, prompt="Once", max_tokens=9, extra_body={"guided_regex": "ab", **older}
            )
            assert response.choices[0].text == "ab"
    for name in older:
        assert len({m for m in caplog.messages if name in m}) == 1
    assert len(caplog.messages) <= 2 * len(older)
    decoding.logger.removeHandler(caplog.handler)


async def test_what_grammars_cannot_hold_is_left_unchecked_where_nothing_is_strict(
    asynchronous: Any,
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": PATHS}}
    format = {"type": "json_schema", "json_schema": {"name": "paths", "schema": PATHS}}
    response = await whole(asynchronous, response_format=format, seed=0)
    called = await whole(asynchronous, tools=[tool], tool_choice="required", seed=0,
                         parallel_tool_calls=False)  # fmt: skip
    for text in (response["content"], called["calls"][0][1]):
        value = json.loads(text)
        assert list(value) == ["path", "tags", "sizes"] and value["sizes"] == {}
        assert len(value["path"]) <= 5 and len(value["tags"]) <= 2


HOSTILE: list[dict[str, Any]] = [
    {"guided_json": deep(200)},
    {"guided_json": {"enum": ["x" * 10 + str(i) for i in range(50_000)]}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"anyOf": [{"$ref": "#/anyOf/0"}]}},
    {"guided_regex": "(" * 300 + "a" + ")" * 300},
    {"guided_regex": "a{1000000000}"},
    {"guided_regex": "((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}){1,99}b"},
    {"guided_regex": "a" * 70_000},
    {"guided_grammar": "start: start start | \n"},
    {"guided_grammar": 'start: "' + "(" * 500},
    {"guided_choice": ["a" * 60_000, "b" * 60_000]},
    {"guided_json": chain(1000)},
    {"guided_json": chain(1000, "a0")},
    {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000))},
    {"guided_grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000))},
    {"structural_tag": {"structures": [{"begin": "x", "schema": chain(1000), "end": ""}],
                        "triggers": ["x"]}},
    {"structural_tag": {"structures": [{"begin": "x", "schema": deep(150), "end": ""}],
                        "triggers": ["x"]}},
]  # fmt: skip


async def test_hostile_grammars_cost_their_request_alone(server: Server, asynchronous: Any) -> None:
    """Every one is a 400, or an answer; meanwhile others are answered and the loop goes round."""

    async def longest_turn() -> float:
        """Processor time of the loop's thread, as a share of all the time."""
        longest, start, last = 0.0, time.monotonic(), time.thread_time()
        while not done.is_set():
            await asyncio.sleep(0.005)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        return longest / (time.monotonic() - start)

    async def hostile(extra: dict[str, Any]) -> int:
        try:
            await asynchronous.completions.create(
                model=MODEL, prompt="Once", max_tokens=4, extra_body=extra
            )
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    holder: dict[str, Any] = {}

    async def watch(_: Any) -> None:
        nonlocal done
        done = asyncio.Event()
        holder["loop"], holder["done"] = asyncio.get_running_loop(), done
        holder["longest"] = await longest_turn()

    done: asyncio.Event
    watching = asyncio.get_running_loop().run_in_executor(None, server.call, watch)
    plain = [whole(asynchronous, response_format=FORMAT, seed=seed) for seed in range(4)]
    *statuses, responses = await asyncio.gather(
        *(hostile(extra) for extra in HOSTILE), asyncio.gather(*plain)
    )
    holder["loop"].call_soon_threadsafe(holder["done"].set)
    await watching
    assert set(statuses) <= {200, 400}, list(zip(statuses, map(str, HOSTILE), strict=True))
    assert statuses.count(400) >= 13
    assert holder["longest"] < 0.25, "the event loop stood still"
    for response in responses:
        if response["finish"] == "stop":
            check_event(response["content"])


def _chain_requests(count: int) -> list[tuple[str, dict[str, Any], str]]:
    """Return (route, fields, the parameter to blame) of each way in for a schema."""
    defs = chain(count)["$defs"]
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": defs}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    format = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    flat = [{"type": "function", **function}]
    return [
        ("chat/completions", {"response_format": format}, "response_format"),
        ("chat/completions", {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "f", "schema": schema}}},
         "text.format"),
        ("chat/completions", {"tools": tools, "tool_choice": "required"}, "tools"),
        ("chat/completions", {"tools": strict}, "tools"),
        ("responses", {"tools": flat, "tool_choice": "required"}, "tools"),
    ]  # fmt: skip


async def _assert_chain_refused(
    client: openai.AsyncOpenAI, route: str, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "input": "Hi", "max_tokens": 4, **fields}
    body.pop("messages" if route == "responses" else "input")
    with pytest.raises(openai.BadRequestError, match="max_grammar_references") as caught:
        await client.post(f"/{route}", body=body, cast_to=object)
    assert caught.value.body["param"] == param  # type: ignore[index]


async def test_chains_of_references_are_refused_on_every_way_in(asynchronous: Any) -> None:
    """The process lives: the last request is answered.

    Tools stand in the prompt, too, which is checked first and would be too long for this model."""
    for route, fields, param in _chain_requests(1000):
        if param != "tools":
            await _assert_chain_refused(asynchronous, route, fields, param)
    assert (await whole(asynchronous, response_format=FORMAT, seed=1))["content"]


async def test_chains_in_tools_are_refused() -> None:
    limits = {"max_grammar_references": 8}
    config = EngineConfig(
        dtype="float32", device="cpu", served_model_name=(MODEL,), num_gpu_blocks_override=800,
        attention_backend="torch", tool_call_parser="hermes",
        structured_outputs_config=limits,  # type: ignore[arg-type]
    )  # fmt: skip
    with running(config) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            for route, fields, param in _chain_requests(12):
                await _assert_chain_refused(client, route, fields, param)
            assert (await whole(client, response_format=FORMAT, seed=1, max_tokens=8))["content"]


DEAD_END = 'start: "abcdefghijkl" (K | "m" K)\nK: /s/ & ~/(s)/'
"""After the m there is nothing, which the backend finds there only."""
DEAD_SCHEMA = {
    "type": "object",
    "properties": {"a": {"const": 1}, "A": {"const": 2}},
    "required": ["a", "A"],
    "minProperties": 3,
    "patternProperties": {"^(?i:a)$": {"type": "integer"}},
    "additionalProperties": False,
}
"""A third property is needed, and cannot be, which only the backend knows of such a pattern."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_end_inside_an_output_is_the_requests_fault(
    server: Server, stream: bool
) -> None:
    schema = {"type": "json_schema", "name": "dead", "schema": DEAD_SCHEMA}
    tool = {"type": "function", "function": {"name": "f", "parameters": DEAD_SCHEMA}}
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": "a", "guided_grammar": DEAD_END}, "guided_grammar"),
        ("chat/completions", {"messages": MESSAGES, "guided_grammar": DEAD_END}, "guided_grammar"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {
            "type": "json_schema", "json_schema": {"name": "dead", "schema": DEAD_SCHEMA}}},
         "response_format"),
        ("chat/completions", {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"},
         "tools"),
        ("responses", {"input": "a", "text": {"format": schema}}, "text.format"),
    ]  # fmt: skip
    async with aiohttp.ClientSession() as session:
        for route, fields, param in requests:
            body = {"model": MODEL, "stream": stream, "max_tokens": 300, "seed": 1, **fields}
            if route == "responses":
                body["max_output_tokens"] = body.pop("max_tokens")
                del body["seed"]
            async with session.post(f"{server.url}/v1/{route}", json=body) as response:
                text = await response.text()
            if not stream:
                error = json.loads(text)["error"]
                assert response.status == 400, text
                assert error["type"] == "invalid_request_error" and error["param"] == param
            elif route == "responses":
                assert '"code":"invalid_prompt"' in text, text
            else:
                assert '"type":"invalid_request_error"' in text, text


async def token_ids(session: aiohttp.ClientSession, server: Server, text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    async with session.post(f"{server.url}/tokenize", json=body) as response:
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


@pytest.mark.parametrize("temperature", [0, 1])
async def test_lists_of_tokens_and_a_grammar_that_leave_nothing_are_the_requests_fault(
    server: Server, temperature: float
) -> None:
    """Its status is 400, its fields are named, and a request beside it has what it has alone."""
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    form = {"response_format": {"type": "json_object"}}
    tools = {"tools": [WEATHER], "tool_choice": "required"}
    async with aiohttp.ClientSession() as session:
        [x] = await token_ids(session, server, "x")
        lists = {"allowed_token_ids": [x], "temperature": temperature}

        async def status(route: str, **fields: Any) -> tuple[int, str]:
            own = {"prompt": "a"} if route == "completions" else {"messages": MESSAGES}
            body = {"model": MODEL, "max_tokens": 30, **own, **fields}
            async with session.post(f"{server.url}/v1/{route}", json=body) as response:
                return response.status, await response.text()

        good = {**choice, "temperature": 0}
        alone = await status("completions", **good)
        beside, *refused = await asyncio.gather(
            status("completions", **good),
            status("completions", **choice, **lists),
            status("completions", **choice, **lists, stream=True),
            status("completions", **choice, **lists, n=2, logprobs=2),
            status("chat/completions", **form, **lists),
            status("chat/completions", **tools, **lists),
        )
        names = ["structured_outputs.choice"] * 3 + ["response_format", "tools"]
        for (code, text), name in zip(refused, names, strict=True):
            error = json.loads(text)["error"]
            assert code == 400 and error["param"] == "allowed_token_ids"
            assert f"with {name}, no token is left" in error["message"]
        texts = [json.loads(text)["choices"][0]["text"] for _, text in (alone, beside)]
        assert alone[0] == 200 and texts[0] == texts[1] in ("yes", "no")


@pytest.mark.parametrize("temperature", [0, 1])
async def test_an_output_ends_where_the_lists_leave_the_grammar_nothing_else(
    server: Server, temperature: float
) -> None:
    """Though no end token is among the allowed ones."""
    async with aiohttp.ClientSession() as session:
        allowed = await token_ids(session, server, "yesno") + [
            token for letter in "yesno" for token in await token_ids(session, server, letter)
        ]
        for params, texts in (
            ({"choice": ["yes", "no"]}, ("yes", "no")),
            ({"regex": "y{2}[a-d]?"}, ("yy",)),
        ):
            body = {
                "model": MODEL, "prompt": "a", "max_tokens": 20, "temperature": temperature,
                "structured_outputs": params, "allowed_token_ids": allowed,
            }  # fmt: skip
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                [choice] = (await response.json())["choices"]
            assert choice["text"] in texts and choice["finish_reason"] == "stop"


SINGLE = {"type": "integer", "minimum": 0, "maximum": 9}
NAMED_BY_PATTERN = {
    "type": "object",
    "properties": {"s": SINGLE},
    "required": ["s"],
    "additionalProperties": False,
    "patternProperties": {"^s$": {"type": "integer"}},
}


async def test_patterns_of_declared_names_alone_are_held(asynchronous: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": NAMED_BY_PATTERN}}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": NAMED_BY_PATTERN}}
    for seed in range(4):
        response = await whole(asynchronous, response_format=format, seed=seed)
        called = await whole(asynchronous, tools=[tool], tool_choice="required", seed=seed,
                             parallel_tool_calls=False)  # fmt: skip
        for text in (response["content"], called["calls"][0][1]):
            assert json.loads(text).keys() == {"s"} and 0 <= json.loads(text)["s"] <= 9


LOOKING = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^(?!admin$)[a-z]{1,4}$"},
        "b": {"anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 9},
            {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0{0,2}[0-9]{1,3}$"},
        ]},
        "c": {"type": "string", "pattern": r"^(x|y)\b-\1$"},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}  # fmt: skip


async def test_patterns_that_look_around_hold_but_for_that(
    asynchronous: Any, client: openai.OpenAI
) -> None:
    def tool(**more: Any) -> Any:
        return {"type": "function", "function": {"name": "f", "parameters": LOOKING, **more}}

    def format(**more: Any) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "f", "schema": LOOKING, **more}}

    response = await whole(asynchronous, response_format=format(), seed=0)
    called = await whole(asynchronous, tools=[tool()], tool_choice="required", seed=0,
                         parallel_tool_calls=False)  # fmt: skip
    for text in (response["content"], called["calls"][0][1]):
        value = json.loads(text)
        assert re.fullmatch("[a-z]{1,4}", value["a"])
        assert re.fullmatch("[+-]?[0-9]{1,5}", str(value["b"]))
        assert re.fullmatch("[xy]-[xy]?", value["c"])
    for fields, param in (
        ({"response_format": format(strict=True)}, "response_format"),
        ({"tools": [tool(strict=True)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(strict=True)]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
        error: Any = caught.value.body
        assert error["param"] == param
        assert "properties.a.pattern" in error["message"]
        assert "(?!admin$)" in error["message"]
