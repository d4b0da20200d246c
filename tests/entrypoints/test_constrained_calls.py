"""Calls held by a grammar in each family's own form, over HTTP, with the real `openai` client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from serving import MODEL, Server, engine_config, running, save_scripted

import jackfield
from jackfield import EngineConfig
from jackfield.core.text.tokenizer import Tokenizer

EMBEDDED = Path(jackfield.__file__).parent / "plugins/models/embedded"
OPENING = {
    "hermes": "<tool_call>",
    "llama3_json": "{",
    "mistral": "[",
    "pythonic": "[",
    "qwen3_coder": "<tool_call>",
    "deepseek_v3": "<",
}
"""A parser → a text of one token that begins its calls."""
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("hermes", "qwen3_coder")))
    for name in OPENING
]
"""By day JSON in tags, and arguments in tags of their own; `tests/plugins/parsers` has forced calls
of every parser."""
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "seats": {"type": "integer", "minimum": 1, "maximum": 40},
        "class": {"enum": ["éco", "first"]},
        "legs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"day": {"enum": ["mon", "fri"]}, "direct": {"type": "boolean"}},
                "required": ["day", "direct"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["seats", "class", "legs"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MESSAGES: Any = [{"role": "user", "content": "Book a trip for 3 on friday."}]
PAIR = {
    "type": "object",
    "properties": {"left": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["left"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR}}


def tools(*, strict: bool) -> list[Any]:
    return [
        {"type": "function", "function": {"name": n, "parameters": p, "strict": strict}}
        for n, p in (("book", TRIP), ("stop", STOP))
    ]


def config(parser: str | None, **options: Any) -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        device="cpu",
        served_model_name=(MODEL,),
        max_num_seqs=16,
        num_gpu_blocks_override=800,
        attention_backend="torch",
        tool_call_parser=parser,
        structured_outputs_config={"disable_any_whitespace": True, **options},  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with running(config(request.param)) as running_server:
        yield request.param, running_server


@pytest.fixture
async def client(family: tuple[str, Server]) -> Any:
    url = f"{family[1].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api_client:
        yield api_client


@pytest.fixture
def most_tokens(family: tuple[str, Server]) -> int:
    """Of an answer. The marks of DeepSeek's calls alone are a hundred of this model's tokens."""
    return 300 if family[0] == "deepseek_v3" else 160


@pytest.mark.parametrize("strict, choice", [(False, "required"), (True, "auto")])
async def test_arguments_that_are_no_object_are_refused_where_they_are_constrained(
    client: openai.AsyncOpenAI, strict: bool, choice: Any
) -> None:
    function = {"name": "say", "parameters": {"type": "string"}, "strict": strict}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=8,
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            tool_choice=choice,
        )
    assert caught.value.param == "tools" and "'say' must have the type object" in str(caught.value)


async def both(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    """The answer, streamed and not; they must be the same."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 160, **options}
    first, stream = await asyncio.gather(
        client.chat.completions.create(**body),
        client.chat.completions.create(**body, stream=True),
    )
    content, finish, calls = "", None, {}
    async for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            name += call.function.name or ""
            calls[call.index] = (name, arguments + (call.function.arguments or ""))
        finish = choice.finish_reason or finish
    (choice,) = first.choices
    full_calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert list(calls.values()) == full_calls and choice.finish_reason == finish
    assert content == (choice.message.content or "")
    return {"content": content, "calls": full_calls, "finish": finish}


def check(name: str, arguments: str) -> None:
    parsed_arguments = json.loads(arguments)
    if name == "stop":
        assert parsed_arguments == {}
        return
    assert name == "book" and list(parsed_arguments) == ["seats", "class", "legs"]
    assert type(parsed_arguments["seats"]) is int and 1 <= parsed_arguments["seats"] <= 40
    assert parsed_arguments["class"] in ("éco", "first") and 1 <= len(parsed_arguments["legs"]) <= 2
    for leg in parsed_arguments["legs"]:
        assert leg["day"] in ("mon", "fri") and isinstance(leg["direct"], bool)


async def test_required_calls_follow_their_schemas(client: Any, most_tokens: int) -> None:
    results = await asyncio.gather(
        *(
            both(client, tools=tools(strict=False), tool_choice="required", seed=seed,
                 temperature=1.5, parallel_tool_calls=seed % 2 == 0, max_tokens=most_tokens)
            for seed in range(4)
        )
    )  # fmt: skip
    for seed, response in enumerate(results):
        assert seed % 2 == 0 or len(response["calls"]) <= 1
        if response["finish"] != "length":
            assert response["finish"] == "tool_calls" and not response["content"]
            for call in response["calls"]:
                check(*call)
    assert sum(response["finish"] == "tool_calls" for response in results) >= 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
async def test_a_forced_call_cut_off_anywhere_leaves_no_markup(client: Any, choice: Any) -> None:
    """Its name begins a dozen tokens after its marks: each limit before cuts it off elsewhere."""
    results = await asyncio.gather(
        *(
            both(client, tools=tools(strict=False), tool_choice=choice, max_tokens=limit, seed=1)
            for limit in range(1, 14)
        )
    )
    assert [response["content"] for response in results] == [""] * 13
    assert not results[0]["calls"] and results[0]["finish"] == "length"


async def test_a_named_tool_is_called_once(client: Any, most_tokens: int) -> None:
    choice = {"type": "function", "function": {"name": "book"}}
    response = await both(
        client, tools=tools(strict=False), tool_choice=choice, seed=1, max_tokens=most_tokens
    )
    assert response["finish"] == "stop" and not response["content"]
    ((name, arguments),) = response["calls"]
    assert name == "book"
    check(name, arguments)


async def test_strict_tools_are_constrained_when_the_model_calls_them(
    client: Any, family: tuple[str, Server]
) -> None:
    opening = Tokenizer.load(str(EMBEDDED)).encode(OPENING[family[0]], add_special_tokens=False)
    assert len(opening) == 1
    request = {"tools": tools(strict=True), "temperature": 1.5, "parallel_tool_calls": False}
    bias = {str(opening[0]): 100.0}
    constrained = await asyncio.gather(
        *(both(client, seed=s, logit_bias=bias, **request) for s in range(3))
    )
    called = [call for response in constrained for call in response["calls"]]
    if family[0] not in ("mistral", "deepseek_v3"):  # Whose mark is several tokens of this model.
        assert len(called) == 3 and all(
            response["finish"] == "tool_calls" for response in constrained
        )
    for call in called:
        check(*call)
    free = await both(client, **{**request, "max_tokens": 30}, seed=1)
    assert free["content"] and not free["calls"], "a strict tool need not be called"


async def test_an_answer_follows_a_schema_or_calls_a_tool(
    client: Any, family: tuple[str, Server]
) -> None:
    opening = Tokenizer.load(str(EMBEDDED)).encode(OPENING[family[0]], add_special_tokens=False)
    request = {"tools": tools(strict=True), "response_format": FORMAT, "parallel_tool_calls": False}
    if OPENING[family[0]] != "{":
        call = await both(client, **request, seed=2, logit_bias={str(opening[0]): 100.0})
        assert call["finish"] == "tool_calls" and not call["content"]
        for item in call["calls"]:
            check(*item)
    brace = Tokenizer.load(str(EMBEDDED)).encode("{", add_special_tokens=False)
    responses = await asyncio.gather(
        *(both(client, **request, seed=s, logit_bias={str(brace[0]): 100.0}) for s in range(3))
    )
    for response in responses:
        if response["calls"]:
            assert OPENING[family[0]] == "{"
        else:
            assert response["finish"] == "stop"
            assert 0 <= json.loads(response["content"])["left"] <= 99


async def test_a_call_that_ends_the_reasoning_is_constrained_too() -> None:
    """The model calls at once, where its reasoning parser waits for the end of a thought."""
    thinking = msgspec.structs.replace(config("hermes"), reasoning_parser="qwen3")
    with running(thinking) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            for choice in ("required", "auto"):
                response = await both(
                    client, tools=[WEATHER], tool_choice=choice, temperature=0.3, seed=3,
                    messages=[{"role": "user", "content": "What is the weather in Lisbon?"}],
                )  # fmt: skip
                assert response["finish"] == "tool_calls" and not response["content"]
                ((name, arguments),) = response["calls"]
                assert name == "get_weather" and list(json.loads(arguments)) == ["city"]


async def test_responses_hold_calls_the_same_way(client: Any, family: tuple[str, Server]) -> None:
    flat_tools = [{"type": "function", **tool["function"]} for tool in tools(strict=True)]
    response = await client.responses.create(
        model=MODEL, input="Book a trip.", tools=flat_tools, tool_choice="required",
        max_output_tokens=300, temperature=0.7, parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = response.output
    if response.status == "completed":
        assert item.type == "function_call"
        check(item.name, item.arguments)


# ---------------------------------------------------------------- marks that are special tokens


SPECIAL = ("[TOOL_CALLS]", "[ARGS]")
SCRIPT = ("Let me look.", "[TOOL_CALLS]", "book", "[ARGS]", '{"city"', ': "Lis', 'bon"}')


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_scripted(tmp_path_factory.mktemp("held"), SCRIPT, SPECIAL)
    options = {"disable_any_whitespace": True}
    with running(
        engine_config(
            checkpoint,
            tool_call_parser="mistral",
            structured_outputs_config=options,
            max_model_len=1024,
        )
    ) as item:
        yield item


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_special_tokens_open_constrained_calls(special: Server, choice: str) -> None:
    """The model would write other arguments."""
    async with openai.AsyncOpenAI(base_url=f"{special.url}/v1", api_key="none") as client:
        free = await both(client, tools=tools(strict=False), temperature=0)
        assert free["calls"] == [("book", '{"city": "Lisbon"}')]
        for seed in range(2):
            response = await both(
                client, tools=tools(strict=True), tool_choice=choice, seed=seed, max_tokens=250,
                parallel_tool_calls=False, temperature=0.2,
            )  # fmt: skip
            assert response["content"] == ("Let me look." if choice == "auto" else "")
            ((name, arguments),) = response["calls"]
            check(name, arguments)


# ---------------------------------------------------------------- what cannot be expressed


async def ask(parser: str | None, tool: dict[str, Any], choice: Any, **options: Any) -> Any:
    with running(config(parser, **options)) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, tools=[tool], tool_choice=choice, seed=3,
                max_tokens=100,
            )  # fmt: skip


def hosted(*, strict: bool) -> Any:
    """A tool with an argument that plain text cannot express."""
    host = {"type": "string", "format": "hostname"}
    schema = {"type": "object", "properties": {"host": host}, "required": ["host"]}
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


@pytest.mark.parametrize(
    ("parser", "reason"),
    [("openai", "call_form"), ("qwen3_coder", "host: format of a string")],
)
async def test_strict_is_refused_where_nothing_can_hold_it(parser: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        await ask(parser, hosted(strict=True), "auto")
    assert caught.value.body["param"] == "tools"  # type: ignore[index]


@pytest.mark.parametrize(
    ("parser", "options"), [(None, {}), ("qwen3_coder", {}), ("hermes", {"backend": "xgrammar"})]
)
async def test_required_calls_are_json_if_the_form_cannot_express_them(
    parser: str | None, options: dict[str, Any]
) -> None:
    result = await ask(parser, hosted(strict=False), "required", **options)
    (call, *_) = result.choices[0].message.tool_calls
    result = json.loads(call.function.arguments)
    assert call.function.name == "f" and re.fullmatch(r"[A-Za-z0-9.-]+", result["host"])
