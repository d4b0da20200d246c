"""Every field of a chat request does what it says or is refused by its name; a stream, folded, is
the whole answer; and loops that send answers back work. With the real `openai` client, on the
embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import MODEL, Server, engine_config, running, save_random, save_scripted

from jackfield import EngineConfig
from jackfield.core.engine.text_processor import TextProcessor
from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.openai.common.decoding import UNSUPPORTED

ROUTE = "/v1/chat/completions"
WEATHER: Any = {
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
SHORT: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
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
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "weather",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Lisbon"]},
                "celsius": {"type": "integer", "minimum": -40, "maximum": 50},
            },
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}
DIRECT: Any = {"chat_template_kwargs": {"enable_thinking": False}}
SUM = "Tom has 5 apples and buys 3 more. Then he gives away 2. How many apples are left?"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        max_num_seqs=32,
    )
    with running(config, ServerOptions(trust_request_chat_template=True)) as item:
        yield item


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random model, no parsers, no trust in templates."""
    with running(engine_config(save_random(tmp_path_factory.mktemp("random")))) as item:
        yield item


@pytest.fixture
def asynchronous(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Server, body: dict[str, Any], status: int = 200, route: str = ROUTE) -> Any:
    response = httpx.post(server.url + route, json=body, timeout=300)
    assert response.status_code == status, response.text
    return response.json()


def prompt_of(server: Server, **body: Any) -> str:
    """What the model reads for a chat."""
    response = post(server, {"messages": user("Hello"), "max_tokens": 1, **body, **RETURN_IDS})
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.decode(response["prompt_token_ids"], skip_special_tokens=False)


RETURN_IDS = {"return_token_ids": True}

# ---------------------------------------------------------------- a stream is the whole answer


def folded(chunks: list[Any]) -> dict[str, Any]:
    """The chunks of a stream as one answer, in the whole answer's shape."""
    fold_state: dict[str, Any] = {"choices": {}}
    for chunk in (chunk.model_dump(exclude_unset=True) for chunk in chunks):
        for name in ("prompt_logprobs", "prompt_token_ids", "usage"):
            if chunk.get(name) is not None:
                fold_state[name] = chunk[name]
        for piece in chunk["choices"]:
            choice = fold_state["choices"].setdefault(piece["index"], new_choice(piece["index"]))
            message, delta = choice["message"], piece["delta"]
            message["role"] = delta.get("role", message["role"])
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function", "told once, at the start"
                    message["tool_calls"].append({"name": call["function"]["name"], "json": ""})
                else:
                    assert call.keys() <= {"index", "function"}
                    assert "name" not in call["function"]
                message["tool_calls"][call["index"]]["json"] += call["function"]["arguments"]
            choice["logprobs"] += (piece.get("logprobs") or {}).get("content", [])
            choice["token_ids"] += piece.get("token_ids") or []
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    assert choice[name] is None
                    choice[name] = piece[name]
    fold_state["choices"] = [choice for _, choice in sorted(fold_state["choices"].items())]
    return fold_state


def new_choice(index: int) -> dict[str, Any]:
    message = {"role": "", "content": "", "reasoning": "", "reasoning_content": ""}
    return {
        "index": index,
        "message": {**message, "tool_calls": []},
        "logprobs": [],
        "token_ids": [],
        "finish_reason": None,
        "stop_reason": None,
    }


def whole(response: Any) -> dict[str, Any]:
    """A whole answer in the shape of `folded`."""
    fields = response.model_dump(exclude_unset=True)
    full: dict[str, Any] = {
        name: fields[name]
        for name in ("prompt_logprobs", "prompt_token_ids", "usage")
        if fields.get(name) is not None
    }
    full["choices"] = []
    for theirs in fields["choices"]:
        choice = new_choice(theirs["index"])
        message = theirs["message"]
        for name in ("role", "content", "reasoning", "reasoning_content"):
            choice["message"][name] = message.get(name) or ""
        choice["message"]["tool_calls"] = [
            {"name": call["function"]["name"], "json": call["function"]["arguments"]}
            for call in message.get("tool_calls") or ()
        ]
        choice["logprobs"] = (theirs.get("logprobs") or {}).get("content", [])
        choice["token_ids"] = theirs.get("token_ids") or []
        choice |= {name: theirs.get(name) for name in ("finish_reason", "stop_reason")}
        full["choices"].append(choice)
    return full


CASES: dict[str, dict[str, Any]] = {
    "answer": {"messages": user("Tell me a joke."), "extra_body": DIRECT},
    "thought": {"messages": user(SUM)},
    "tools": {"messages": user("What is the weather in Paris?"), "tools": [WEATHER, ADD]},
    "required": {
        "messages": user("What is 3 + 4?"), "tools": [SHORT, ADD], "tool_choice": "required",
        "extra_body": DIRECT,
    },
    "named": {
        "messages": user("What is 3 + 4?"), "tools": [WEATHER, ADD], "extra_body": DIRECT,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "schema": {"messages": user("What is the weather in Paris?"), "response_format": FORMAT},
    "logprobs": {"messages": user("Hello"), "logprobs": True, "top_logprobs": 3},
    "several": {"messages": user("Hello"), "n": 3, "stop": ["e", "?"], "extra_body": DIRECT},
    "everything": {
        "messages": user("What is the weather in Oslo?"), "tools": [WEATHER], "n": 2,
        "logprobs": True, "top_logprobs": 1,
        "extra_body": {**RETURN_IDS, "prompt_logprobs": 1, "min_tokens": 3, "top_k": 40},
    },
}  # fmt: skip
SEEDS = range(2)


def assert_alike(one: Any, other: Any) -> None:
    """Compare exactly, but for the last digits of log-probabilities: with `n`, the answers may
    begin in one step or in two, and products of one row end in other digits than those of two."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-3)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_alike(value, other[name])
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other)
        for value, theirs in zip(one, other, strict=True):
            assert_alike(value, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("name", CASES)
async def test_a_folded_stream_is_the_whole_answer(asynchronous: Any, name: str) -> None:
    """For every seed, hot enough that answers differ and go wrong in many ways."""
    options = {"model": MODEL, "max_tokens": 32, "temperature": 3.0, **CASES[name]}
    create = asynchronous.chat.completions.create
    await create(**{**options, "max_tokens": 3})  # So that all find the same prefix cached.
    seen = set()
    # One after the other: what else is in a batch shows in the last digits of a logprob.
    for seed in SEEDS:
        response = whole(await create(**options, seed=seed))
        pieces = await create(
            **options, seed=seed, stream=True, stream_options={"include_usage": True}
        )
        stream = folded([piece async for piece in pieces])
        assert_alike(stream, response)
        assert len(stream["choices"]) == options.get("n", 1)
        seen.add(json.dumps(stream["choices"]))
    await asynchronous.close()
    assert len(seen) > 1, "the seeds make a difference"


@pytest.mark.parametrize("name", ["thought", "tools", "several"])
def test_the_synchronous_client_folds_the_same(client: openai.OpenAI, name: str) -> None:
    options: Any = {"model": MODEL, "max_tokens": 48, "temperature": 0, **CASES[name]}
    response = client.chat.completions.create(**options)
    pieces = list(client.chat.completions.create(**options, stream=True))
    stream, answered = folded(pieces), whole(response)
    assert stream["choices"] == answered["choices"]
    assert "usage" not in stream, "nobody asked for it"


def test_usage_grows_in_a_stream_that_tells_it(client: openai.OpenAI) -> None:
    pieces = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user(SUM),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        )
    )
    counts = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(counts) == len(pieces) and counts == sorted(counts) and counts[-1] > 20
    details = pieces[-1].usage.completion_tokens_details  # type: ignore[union-attr]
    assert 0 < details.reasoning_tokens < counts[-1]  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("name", ["schema", "required", "named"])
async def test_strict_schemas_hold_for_every_seed(asynchronous: Any, name: str) -> None:
    options = {"model": MODEL, "max_tokens": 160, "temperature": 1.2, **CASES[name]}
    if name == "required":
        options["parallel_tool_calls"] = False  # A hot model would never end its list of calls.
    responses = await asyncio.gather(
        *(asynchronous.chat.completions.create(**options, seed=seed) for seed in range(6))
    )
    await asynchronous.close()
    for response in responses:
        (choice,) = response.choices
        if choice.finish_reason == "length":
            continue
        if name == "schema":
            value = json.loads(choice.message.content)
            assert value.keys() == {"city", "celsius"} and -40 <= value["celsius"] <= 50
            continue
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            value = json.loads(call.function.arguments)
            assert value.keys() == {"add": {"a", "b"}, "get_weather": {"city"}}[call.function.name]
    assert sum(response.choices[0].finish_reason != "length" for response in responses) > 3


# ---------------------------------------------------------------- loops that send answers back


def weather_of(city: str) -> str:
    return json.dumps({"city": city, "temperature": 7, "condition": "rainy"})


async def said(server: Server, how: str, **options: Any) -> tuple[dict[str, Any], str]:
    """→ the assistant's message, as a program would send it back, and the finish reason."""
    options = {"model": MODEL, "temperature": 0, "extra_body": DIRECT, **options}
    if how == "sync":
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            response = await asyncio.to_thread(client.chat.completions.create, **options)
        (choice,) = response.choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        if how == "async":
            response = await client.chat.completions.create(**options)
            (choice,) = response.choices
            return choice.message.model_dump(exclude_unset=True), choice.finish_reason
        pieces = await client.chat.completions.create(**options, stream=True)
        chunks = [piece async for piece in pieces]
    (choice,) = folded(chunks)["choices"]
    ids = [
        call.id
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.id is not None
    ]
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": call["name"], "arguments": call["json"]},
        }
        for id, call in zip(ids, choice["message"]["tool_calls"], strict=True)
    ]
    message = {"role": "assistant", "content": choice["message"]["content"] or None}
    return message | ({"tool_calls": calls} if calls else {}), choice["finish_reason"]


@pytest.mark.parametrize("how", ["sync", "async", "streamed"])
async def test_a_tool_loop_of_several_turns(server: Server, how: str) -> None:
    """The model calls, reads the result, answers; then the next question, in one conversation."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    messages: list[Any] = []
    for city, choice in (("Paris", "auto"), ("Oslo", named), ("Lisbon", "required")):
        messages += user(f"What is the weather in {city}?")
        options = {"messages": messages, "tools": [SHORT if choice != "auto" else WEATHER]}
        message, reason = await said(
            server, how, **options, tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
        assert reason == ("stop" if choice is named else "tool_calls")
        messages.append(message)
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "get_weather" and call["id"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city"}
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": weather_of(city)})
        response, reason = await said(server, how, **options, tool_choice="none", max_tokens=60)
        assert reason in ("stop", "length") and "tool_calls" not in response
        if city == "Paris":
            assert "7 degrees" in response["content"]
        messages.append(response)
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ] * 3


CALL = {"id": "call_1", "type": "function"}
ARGUMENTS = {"city": "Paris"}
SENT_BACK: list[dict[str, Any]] = [
    {"content": None, "function": {"arguments": json.dumps(ARGUMENTS)}},
    {"content": "", "function": {"arguments": json.dumps(ARGUMENTS, indent=2)}},
    {"content": [], "function": {"arguments": ARGUMENTS}},
    {"content": None, "refusal": None, "name": None, "function": {"arguments": '{"city":"Paris"}'}},
]
"""As the client, LangChain, and others write the same turn."""


def test_calls_and_results_that_are_sent_back_read_the_same(server: Server) -> None:
    rendered = set()
    for form in SENT_BACK:
        function = {"name": "get_weather", **form["function"]}
        flat = {name: value for name, value in form.items() if name != "function"}
        for result in ("sunny", [{"type": "text", "text": "sunny"}]):
            messages = [
                *user("What is the weather in Paris?"),
                {"role": "assistant", **flat, "tool_calls": [{**CALL, "function": function}]},
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "name": "get_weather",
                    "content": result,
                },
            ]
            rendered.add(prompt_of(server, messages=messages, tools=[WEATHER]))
    (text,) = rendered
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_reasoning_that_is_sent_back_has_both_its_names(server: Server) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.reasoning }}]{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "4", name: "two and two"}]
        text = prompt_of(server, messages=messages, chat_template=template)
        assert text == "[two and two|two and two]"


# ---------------------------------------------------------------- fields


def test_developers_speak_as_the_system_where_the_template_knows_none(plain: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user("Hi")]
    developed = [{"role": "developer", "content": "Be brief."}, *user("Hi")]
    assert prompt_of(plain, messages=developed) == prompt_of(plain, messages=messages)


def test_an_effort_turns_reasoning_on_and_off(server: Server) -> None:
    def answer(**options: Any) -> Any:
        body = {"messages": user(SUM), "temperature": 0, "max_tokens": 200, **options}
        return post(server, body)["choices"][0]["message"]

    assert "reasoning_content" not in answer(reasoning_effort="none")
    assert answer(reasoning_effort="high")["reasoning_content"]
    response = answer(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert response["reasoning_content"], "what is said expressly wins"
    template = "{{ reasoning_effort }} {{ verbosity }}: {{ messages[0].content }}"
    template_options = {"reasoning_effort": "low", "verbosity": "high", "chat_template": template}
    assert prompt_of(server, **template_options) == "low high: Hello"


def test_every_route_has_the_configured_arguments_of_the_template(server: Server) -> None:
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        reasoning_parser="think_tags",
        default_chat_template_kwargs={"enable_thinking": False},
    )
    asked = {"chat_template_kwargs": {"enable_thinking": True}}
    chat = {"messages": user(SUM), "temperature": 0, "max_tokens": 200}
    with running(config) as quiet:
        assert prompt_of(quiet) == prompt_of(server, **DIRECT) != prompt_of(server)
        assert prompt_of(quiet, **asked) == prompt_of(server, **asked)
        for route in ("/tokenize", "/v1/messages/count_tokens"):
            body = {"model": MODEL, "messages": user("Hi")}
            expected = post(server, {**body, **DIRECT}, route=route)
            assert post(quiet, body, route=route) == expected
        assert "reasoning_content" not in post(quiet, chat)["choices"][0]["message"]
        for thinking in (asked, {"reasoning_effort": "high"}):
            assert post(quiet, {**chat, **thinking})["choices"][0]["message"]["reasoning_content"]
        body = {"model": MODEL, "input": SUM, "temperature": 0, "max_output_tokens": 200}
        kinds = [item["type"] for item in post(quiet, body, route="/v1/responses")["output"]]
        assert kinds == ["message"]


def test_a_configured_argument_that_is_reserved_is_refused() -> None:
    config = EngineConfig(device="cpu", default_chat_template_kwargs={"messages": []})
    with pytest.raises(ConfigError, match="default_chat_template_kwargs: messages: is reserved"):
        TextProcessor().load_alone(config, load_plugins())


def test_a_template_of_the_request_is_used_where_it_is_trusted(
    server: Server, plain: Server
) -> None:
    template = "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ mood }}"
    body = {
        "chat_template": template,
        "documents": [{"title": "one", "text": "first <|im_end|>"}],
        "chat_template_kwargs": {"mood": "merry"},
    }
    assert prompt_of(server, **body) == "one: first <|im_end|>\nmerry"
    ids = post(server, {"messages": user("x"), "max_tokens": 1, **body, **RETURN_IDS})
    assert server.engine.tokenizer is not None
    (end,) = server.engine.tokenizer.encode("<|im_end|>")
    assert end not in ids["prompt_token_ids"], "typed in a document, it stays text"
    error = post(plain, {"messages": user("x"), "chat_template": "x"}, 400)["error"]
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    bad = post(server, {"messages": user("x"), "chat_template": "{% if %}"}, 400)["error"]
    assert bad["param"] == "chat_template"


def test_arguments_that_the_template_does_not_read_are_refused(server: Server) -> None:
    body = {"messages": user("x"), "chat_template_kwargs": {"enable_thinkin": False}}
    error = post(server, body, 400)["error"]
    assert error["param"] == "chat_template_kwargs.enable_thinkin"
    assert "did you mean enable_thinking?" in error["message"]
    for name in ("thinking", "reasoning_effort"):
        post(server, {**body, "chat_template_kwargs": {name: True}, "max_tokens": 1})


def test_echo_shows_what_the_answer_goes_on_from(client: openai.OpenAI) -> None:
    messages = [*user("What is Jackfield?"), {"role": "assistant", "content": "Jackfield is an"}]
    options: Any = {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "extra_body": {**DIRECT, "continue_final_message": True, "add_generation_prompt": False},
    }
    without = client.chat.completions.create(**options).choices[0].message.content
    options["extra_body"] = {**options["extra_body"], "echo": True}
    echoed = client.chat.completions.create(**options)
    assert echoed.choices[0].message.content == "Jackfield is an" + (without or "")
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert folded(pieces)["choices"] == whole(echoed)["choices"]
    options["messages"] = user("Jackfield is an")
    options["extra_body"] = {**DIRECT, "echo": True}
    other = client.chat.completions.create(**options).choices[0].message.content or ""
    assert not other.startswith("Jackfield is anJackfield") and other


TWO_CALLS = tuple(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": {index}}}}}\n</tool_call>'
    for index, name in enumerate(("first", "second"))
)


def test_calls_after_the_first_are_left_out_on_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkpoint = save_scripted(tmp_path_factory.mktemp("two"), TWO_CALLS)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("first", "second")
    ]
    with running(engine_config(checkpoint, tool_call_parser="hermes")) as item:
        client = openai.OpenAI(base_url=f"{item.url}/v1", api_key="none")
        for parallel, names in ((True, ["first", "second"]), (False, ["first"])):
            options: Any = {
                "model": MODEL, "messages": user("go"), "tools": tools, "temperature": 0,
                "parallel_tool_calls": parallel,
            }  # fmt: skip
            response = client.chat.completions.create(**options)
            calls = response.choices[0].message.tool_calls or []
            assert [call.function.name for call in calls] == names  # type: ignore[union-attr]
            assert response.choices[0].finish_reason == "tool_calls"
            pieces = list(client.chat.completions.create(**options, stream=True))
            assert folded(pieces)["choices"] == whole(response)["choices"]


def test_one_required_call_where_calls_may_not_be_parallel(client: openai.OpenAI) -> None:
    for seed in range(4):
        response = client.chat.completions.create(
            model=MODEL,
            messages=user("Add 3 and 4, and 5 and 6."),
            tools=[ADD],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0.7,
            max_tokens=80,
            seed=seed,
            extra_body=DIRECT,
        )
        assert len(response.choices[0].message.tool_calls or ()) == 1


def test_only_allowed_tools_are_shown_and_called(server: Server, client: openai.OpenAI) -> None:
    def choice(mode: str, name: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    tools = [WEATHER, ADD]
    text = prompt_of(server, tools=tools, tool_choice=choice("auto", "add"))
    assert '"add"' in text and "get_weather" not in text
    response = client.chat.completions.create(
        model=MODEL,
        messages=user("What is the weather in Paris?"),
        tools=tools,
        tool_choice=choice("required", "add"),
        extra_body=DIRECT,
        temperature=0,
        max_tokens=80,
    )
    calls = response.choices[0].message.tool_calls or []
    assert {call.function.name for call in calls} == {"add"}  # type: ignore[union-attr]
    body = {"messages": user("x"), "tools": tools, "tool_choice": choice("auto", "fly")}
    error = post(server, body, 400)["error"]
    assert error["param"] == "tool_choice.allowed_tools.tools" and "fly" in error["message"]


def test_salt_keeps_cached_chats_apart(server: Server) -> None:
    body = {"messages": user("river " * 60), "max_tokens": 1}

    def cached(**options: Any) -> int:
        usage = post(server, {**body, **options})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 32
    assert cached(cache_salt="b") == 0
    assert cached() == 0


def test_what_a_text_model_need_not_do_changes_nothing(client: openai.OpenAI) -> None:
    extra = {**DIRECT, "length_penalty": 1.0}  # Of beam search alone.
    options: Any = {"model": MODEL, "messages": user("Hello"), "seed": 3, "extra_body": extra}
    plain = client.chat.completions.create(**options)
    decorated = client.chat.completions.create(
        **options,
        metadata={"run": "7"},
        store=True,
        user="somebody",
        safety_identifier="s",
        service_tier="auto",
        modalities=["text"],
        verbosity="low",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "Hello! How can I help you?"},
        stop=None,
        logit_bias={},
    )
    assert decorated.choices[0].message.content == plain.choices[0].message.content


def test_a_field_that_is_null_is_left_out(server: Server) -> None:
    names = ("stream", "echo", "n", "seed", "stop", "tools", "tool_choice", "top_logprobs",
             "stream_options", "add_generation_prompt", "return_token_ids", "max_tokens",
             "priority", "include_reasoning", "response_format", "documents")  # fmt: skip
    body = {"messages": user("Hello"), "temperature": 0, **DIRECT}
    nulls = post(server, {**body, **dict.fromkeys(names)})
    assert nulls["choices"][0]["message"] == post(server, body)["choices"][0]["message"]
    assert post(server, {"messages": None}, 400)["error"]["param"] == "messages"


def test_the_least_value_of_each_number_is_taken(server: Server) -> None:
    least = {"max_completion_tokens": 1, "min_tokens": 1, "top_logprobs": 0, "prompt_logprobs": 0}
    response = post(server, {"messages": user("Hello"), "logprobs": True, **least})
    (choice,) = response["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]]
    assert response["usage"]["completion_tokens"] == 1
    assert len(response["prompt_logprobs"]) == response["usage"]["prompt_tokens"]


def test_tokens_of_logprobs_can_be_identified_by_their_ids(server: Server) -> None:
    body = {"messages": user("Hello"), "logprobs": True, "top_logprobs": 2, "max_tokens": 5}
    body |= {**RETURN_IDS, "return_tokens_as_token_ids": True, "seed": 1}
    (choice,) = post(server, body)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for e in entries for top in e["top_logprobs"])


# ---------------------------------------------------------------- room


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_holds_are_refused(
    server: Server, field: str, streaming: bool
) -> None:
    limit = server.engine.model_config.max_model_len
    body = {"messages": user("Hello"), "stream": streaming}
    error = post(server, {**body, field: limit}, 400)["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert str(limit) in error["message"]


def test_completions_refuse_them_too_and_fit_what_is_left_out(server: Server) -> None:
    limit = server.engine.model_config.max_model_len
    prompt = [50] * (limit - 4)
    route = "/v1/completions"
    error = post(server, {"prompt": prompt, "max_tokens": 5}, 400, route)["error"]
    assert error["param"] == "max_tokens" and "at most 4" in error["message"]
    body = {"prompt": prompt, "ignore_eos": True}
    assert post(server, {**body, "max_tokens": 4}, route=route)["usage"]["completion_tokens"] == 4
    assert post(server, body, route=route)["usage"]["completion_tokens"] == 4


def test_a_prompt_is_cut_where_it_is_said(server: Server) -> None:
    limit = server.engine.model_config.max_model_len
    prompt = list(range(100, 110))
    route = "/v1/completions"

    def read(prompt: list[int], **options: Any) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 1, **RETURN_IDS, **options}
        ids: list[int] = post(server, body, route=route)["choices"][0]["prompt_token_ids"]
        return ids

    assert read(prompt, truncate_prompt_tokens=3) == prompt[-3:]
    assert read(prompt, truncate_prompt_tokens=3, truncation_side="right") == prompt[:3]
    long = [50] * (limit + 100)
    assert len(read(long, truncate_prompt_tokens=-1, max_tokens=10)) == limit - 10


# ---------------------------------------------------------------- refusals


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {**NAMED, "type": "tool"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {**NAMED, "type": 5}}, "tool_choice.type"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "guess"}}, "prediction.type"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 3}, "priority"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"prompt_logprobs": 99}, "prompt_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"bad_words": [""]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"n": 1000}, "n"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0].function.name"),
    ({"vllm_xargs": {"nobody": 1}}, "vllm_xargs"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(server: Server, options: dict[str, Any], param: str) -> None:
    for stream in [{}] if "stream_options" in options else [{}, {"stream": True}]:
        body = {"messages": user("Hello"), "max_tokens": 4, **stream, **options}
        error = post(server, body, 400)["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error"
        assert param.partition(".")[0].partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("name", 5), ("description", 5), ("parameters", []), ("strict", "no")]
)
def test_a_wrong_field_of_a_tool_is_named_by_every_route(
    server: Server, name: str, value: Any
) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], name: value}}
    body = {"messages": user("Hello"), "tools": [tool]}
    for route, more in ((ROUTE, {}), (ROUTE, {"tool_choice": "none"}), ("/tokenize", {})):
        error = post(server, {**body, **more}, 400, route)["error"]
        assert error["param"] == f"tools[0].function.{name}"
    tool = {**WEATHER, "type": "custom"}
    assert post(server, {**body, "tools": [tool]}, 400, "/tokenize")["error"]["param"] == (
        "tools[0].type"
    )


CHATS_ALONE = ("modalities", "chat_template", "documents", "mm_processor_kwargs")
"""What other routes refuse, and chats take."""


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - {"use_beam_search"}))
def test_what_is_not_supported_is_refused_by_name(server: Server, name: str) -> None:
    for route, body in (
        (ROUTE, {"messages": user("Hello")}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        if route == ROUTE and name in CHATS_ALONE:
            continue
        error = post(server, {**body, name: "x", "max_tokens": 1}, 400, route)["error"]
        assert error["param"] == name and error["message"].startswith(f"{name}: ")
        for nothing in (None, [], ""):
            post(server, {**body, name: nothing, "max_tokens": 1}, route=route)


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_other_routes_do_not_search(server: Server, route: str) -> None:
    body = {"input": "x", "messages": user("x"), "max_tokens": 1, "use_beam_search": True}
    error = post(server, body, 400, route)["error"]
    assert "use_beam_search: is not supported: POST /v1/completions" in error["message"]


def test_completions_refuse_best_of_and_say_why_there_is_no_suffix(server: Server) -> None:
    route = "/v1/completions"
    error = post(server, {"prompt": "x", "best_of": 4}, 400, route)["error"]
    assert error["param"] == "best_of"
    error = post(server, {"prompt": "x", "suffix": "y"}, 400, route)["error"]
    assert "from the left" in error["message"]
    post(server, {"prompt": "x", "best_of": 2, "n": 2, "max_tokens": 1}, route=route)
