"""/v1/responses with tools and items of every type that OpenAI's clients send."""

from __future__ import annotations

import itertools
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import openai.types.responses.response_input_item as input_items
import openai.types.responses.tool as tool_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responding import ADD, CONFIG, both
from serving import MODEL, Server, engine_config, running, save_scripted

from jackfield.core.errors import InvalidRequest
from jackfield.core.grammars.tool_calls.lark_pattern import lark_pattern
from jackfield.entrypoints.openai.responses.custom_tools import InputReader
from jackfield.entrypoints.openai.responses.input_items import read_items, to_messages
from jackfield.entrypoints.openai.responses.item_kinds import KINDS, REFUSED
from jackfield.entrypoints.openai.responses.tools import chosen, read_tools

PATCH = 'start: begin line+ end\nbegin: "*** Begin\\n"\nline: ("+"|"-") /[a-c]{1,3}/ LF\n' \
    'end: "*** End" LF?\n%import common.LF\n'  # fmt: skip
USER = {"role": "user", "content": "x"}
NAMESPACE = {"type": "namespace", "name": "calendar", "description": "d", "tools": [ADD]}


def custom(**format: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "apply", "description": "Edits.", **format}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return custom(format={"type": "grammar", "syntax": syntax, "definition": definition})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(CONFIG) as running_server:
        yield running_server


@pytest.fixture
async def client(server: Server) -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as api_client:
        yield api_client


def post(server: Server, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 2, **body}
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=300)


# ---------------------------------------------------------------- tools of every type


def kinds(union: Any) -> set[str]:
    """The types of a union of pydantic models, as the client library lists them."""
    members = typing.get_args(typing.get_args(union)[0])
    return {
        v
        for m in members
        for v in typing.get_args(m.model_fields["type"].annotation)
        if v and isinstance(v, str)
    }


@pytest.mark.parametrize("kind", sorted(kinds(tool_types.Tool) | {"of_tomorrow"}))
def test_a_tool_of_any_type_is_offered_or_left_out(server: Server, kind: str) -> None:
    tool = {"type": kind, "name": "f", "execution": "client", "tools": [ADD]}
    response = post(server, tools=[tool])
    assert response.status_code == 200, response.text
    assert response.json()["tools"][0]["type"] == kind


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kind = "of_the_day_after"
    for _ in range(2):
        assert read_tools([("tools", [{"type": kind}])]).left_out == (kind,)
    assert caplog.text.count(f"'{kind}'") == 1


def test_what_runs_on_openais_servers_is_not_offered() -> None:
    tools = read_tools(
        [
            ("tools", [{"type": "web_search"}, {"type": "mcp", "server_label": "m"}, ADD]),
            (
                "input",
                [{"type": "tool_search"}, {"type": "shell", "environment": {"type": "auto"}}],
            ),
        ]
    )
    assert list(tools.offered) == ["add"]
    assert tools.left_out == ("web_search", "mcp", "tool_search", "shell")
    assert chosen(tools, "required")[1] == "required"
    for choice in ("required", {"type": "web_search"}, {"type": "mcp", "server_label": "m"}):
        with pytest.raises(InvalidRequest):
            chosen(read_tools([("tools", [{"type": "web_search"}])]), choice)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert chosen(tools, allowed) == (type(tools)({}, tools.left_out), None)
    both = {
        **allowed,
        "mode": "required",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "add"}],
    }
    assert list(chosen(tools, both)[0].offered) == ["add"]


async def test_a_namespaces_tool_is_called_by_its_own_name(client: Any) -> None:
    name = {"type": "function", "name": "add", "namespace": "calendar"}
    for choice in ("required", name, {"type": "function", "name": "calendar__add"}):
        response = await both(client, input="Add 1", tools=[NAMESPACE], tool_choice=choice)
        call = response.output[-1]
        assert (call.type, call.name, call.namespace) == ("function_call", "add", "calendar")
        assert set(json.loads(call.arguments)) == {"a", "b"}
    back = [
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    after = await client.responses.create(
        model=MODEL, input=back, previous_response_id=None, max_output_tokens=2
    )
    assert after.status in ("completed", "incomplete")
    chained = await client.responses.create(
        model=MODEL, previous_response_id=response.id, input=back[1:], max_output_tokens=2
    )
    assert chained.usage.input_tokens > after.usage.input_tokens
    _, asks, result = to_messages(read_items([USER, *back], lambda _: None), None)
    assert asks["tool_calls"][0]["function"]["name"] == result["name"] == "calendar__add"


@pytest.mark.parametrize(
    ("format", "pattern"),
    [
        ({"type": "grammar", "syntax": "regex", "definition": '[a-c"\\\\]{3,9}'},
         '[a-c"\\\\]{3,9}'),
        ({"type": "grammar", "syntax": "lark", "definition": PATCH},
         r"\*\*\* Begin\n([+-][a-c]{1,3}\n)+\*\*\* End\n?"),
        pytest.param(
            {"type": "grammar", "syntax": "lark", "definition": 'start: /[x-z]{2,}\\n?/s "!"i?'},
            r"[x-z]{2,}\n?!?", marks=pytest.mark.slow,
        ),
        ({"type": "text"}, r"(?s:.*)"),
    ],
    ids=["regex", "lark", "flags", "text"],
)  # fmt: skip
async def test_a_custom_tools_input_follows_its_format(
    client: Any, format: dict[str, Any], pattern: str
) -> None:
    for choice in ("required", {"type": "custom", "name": "apply"}):
        response = await both(
            client, input="Edit", tools=[custom(format=format)], tool_choice=choice,
            temperature=0.8, extra_body={"seed": 4}, max_output_tokens=80,
        )  # fmt: skip
        call = response.output[-1]
        assert (call.type, call.name) == ("custom_tool_call", "apply")
        if call.status == "completed":
            assert re.fullmatch(pattern, call.input), call.input
        else:  # Cut off: the text so far, not its JSON.
            assert not call.input.startswith("{")
        assert format["type"] == "text" or call.status == "completed" or len(call.input) > 20


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts servers whose model calls a tool in the words that are given."""

    def start(name: str, arguments: str) -> Any:
        text = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
        script = ("<tool_call>", *(text[i : i + 7] for i in range(0, len(text), 7)), "</tool_call>")
        folder = tmp_path_factory.mktemp("calling")
        # A chain of tokens: each has to be another.
        assert len(set(script)) == len(script), script
        return running(
            engine_config(
                save_scripted(folder, script),
                tool_call_parser="hermes",
                max_model_len=1024,
                max_num_batched_tokens=1024,
            )
        )

    yield start


@pytest.mark.parametrize(
    ("tool", "arguments", "item"),
    [
        ({"type": "custom", "name": "run"}, {"input": "a\n\"é🙂\" \\"},
         {"type": "custom_tool_call", "name": "run", "input": "a\n\"é🙂\" \\"}),
        ({"type": "custom", "name": "run"}, {"other": "text"},
         {"type": "custom_tool_call", "name": "run", "input": "text"}),
        ({"type": "namespace", "name": "n", "description": "d",
          "tools": [{"type": "custom", "name": "run"}]}, {"input": "x"},
         {"type": "custom_tool_call", "name": "run", "namespace": "n", "input": "x"}),
        ({"type": "local_shell"}, {"command": ["ls", "-l"]},
         {"type": "local_shell_call",
          "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}}),
        ({"type": "shell"}, {"commands": ["ls"]},
         {"type": "shell_call",
          "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}}),
        ({"type": "apply_patch"}, {"type": "delete_file", "path": "a"},
         {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
        ({"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
         {"query": "q"},
         {"type": "tool_search_call", "arguments": {"query": "q"}, "execution": "client"}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_calls_become_items_of_the_tools_type_and_come_back(
    calling: Any, tool: dict[str, Any], arguments: Any, item: dict[str, Any]
) -> None:
    kind = tool["type"]
    name = {"custom": "run", "namespace": "n__run"}.get(kind, kind)
    with calling(name, json.dumps(arguments)) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            response = await both(client, input="Hi", tools=[tool], temperature=0)
            (call,) = (entry.to_dict() for entry in response.output)
            assert item.items() <= call.items() and call["status"] == "completed"
            output: Any = {
                "local_shell_call": {"type": "local_shell_call_output", "output": "done"},
                "shell_call": {"type": "shell_call_output", "output": [{"stdout": "done"}]},
                "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed"},
                "tool_search_call": {"type": "tool_search_output", "tools": [NAMESPACE]},
            }.get(call["type"], {"type": "custom_tool_call_output", "output": "done"})
            output = {**output, "call_id": call["call_id"]}
            again = await client.responses.create(
                model=MODEL, input=[output], previous_response_id=response.id, tools=[tool],
            )  # fmt: skip
            assert again.usage.input_tokens > response.usage.input_tokens
    read = read_items([USER, call, output], lambda _: None)
    _, asks, result = to_messages(read, None)
    (told,) = asks["tool_calls"]
    said = json.loads(told["function"]["arguments"])
    assert said == ({"input": item["input"]} if "input" in item else arguments)
    assert told["function"]["name"] == result["name"] == name
    assert result["role"] == "tool" and result["content"]


# ---------------------------------------------------------------- items of every type

SAMPLE: dict[str, dict[str, Any]] = {
    "function_call": {"name": "f", "arguments": "{}", "call_id": "c"},
    "custom_tool_call": {"name": "f", "input": "p", "call_id": "c"},
    "local_shell_call": {"action": {"type": "exec", "command": ["ls"], "env": {}}, "call_id": "c"},
    "shell_call": {"action": {"commands": ["ls"]}, "call_id": "c"},
    "apply_patch_call": {"operation": {"type": "delete_file", "path": "a"}, "call_id": "c"},
    "tool_search_call": {"arguments": {"query": "q"}, "call_id": "c", "execution": "client"},
    "program": {"code": "1", "call_id": "c", "fingerprint": "x"},
    "shell_call_output": {"output": [{"stdout": "o", "outcome": {"type": "exit", "exit_code": 0}}]},
    "apply_patch_call_output": {"status": "failed", "output": "no such file"},
    "tool_search_output": {"tools": [NAMESPACE]},
    "program_output": {"result": "1", "status": "completed"},
    "code_interpreter_call": {"code": "1 + 1", "outputs": [{"type": "logs", "logs": "2"}]},
    "file_search_call": {"queries": ["q"], "results": [{"text": "found"}]},
    "mcp_call": {"name": "f", "server_label": "m", "arguments": "{}", "output": "3"},
    "additional_tools": {"role": "developer", "tools": [ADD]},
    "agent_message": {"author": "/root", "content": [{"type": "input_text", "text": "go"}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(kinds(input_items.ResponseInputItem) | set(KINDS)))
def test_an_item_of_any_type_is_read(server: Server, kind: str) -> None:
    """Every type that the client library may send: read, or refused as one that says why."""
    fields = {"output": "o", "call_id": "c", "id": "i", **SAMPLE.get(kind, {})}
    if kind == "message":
        fields |= USER
    items = [USER, {"type": kind, **fields}]
    if kind in ("item_reference", *REFUSED):
        response = post(server, input=items)
        assert response.status_code == 400
        where = "input[1].id" if kind == "item_reference" else "input[1].type"
        assert response.json()["error"]["param"] == where
        return
    if kind.endswith("_output"):
        items.insert(1, {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"})
    response = post(server, input=[*items, USER])
    assert response.status_code == 200, response.text
    id = response.json()["id"]
    listed = httpx.get(f"{server.url}/v1/responses/{id}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed][-2:] == [kind, "message"]
    again = post(server, previous_response_id=id)
    assert again.status_code == 200, again.text


def test_what_items_say_to_the_model() -> None:
    def told(kind: str) -> list[Any]:
        item = {"type": kind, "id": "i", **SAMPLE.get(kind, {})}
        return to_messages(read_items([USER, item], lambda _: None), None)[1:]

    for kind, name, arguments, result in (
        ("code_interpreter_call", "code_interpreter", {"code": "1 + 1"}, "2"),
        ("file_search_call", "file_search", {"queries": ["q"]}, "found"),
        ("mcp_call", "m__f", {}, "3"),
    ):
        asks, answer = told(kind)
        (call,) = asks["tool_calls"]
        assert call["function"]["name"] == answer["name"] == name
        assert json.loads(call["function"]["arguments"]) == arguments
        assert (answer["tool_call_id"], answer["content"]) == ("i", result)
    assert told("agent_message") == [{"role": "user", "content": "/root: go"}]
    for kind in ("web_search_call", "compaction", "image_generation_call", "additional_tools"):
        assert told(kind) == []


def test_tools_that_a_search_found_can_be_called(server: Server) -> None:
    found = {"type": "tool_search_output", "call_id": "c", "tools": [NAMESPACE]}
    items = [USER, {"type": "tool_search_call", **SAMPLE["tool_search_call"]}, found]
    choice = {"type": "function", "name": "add", "namespace": "calendar"}
    response = post(server, input=items, tool_choice=choice, max_output_tokens=300)
    assert response.json()["output"][-1]["namespace"] == "calendar", response.text
    added = [{"type": "additional_tools", "role": "developer", "tools": [ADD]}, USER]
    response = post(server, input=added, tool_choice="required", max_output_tokens=300)
    assert response.json()["output"][-1]["name"] == "add", response.text


# ---------------------------------------------------------------- a custom tool's text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(),
    ascii=st.booleans(),
    space=st.sampled_from(["", " ", "\n  "]),
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_the_input_is_read_out_of_any_cutting(
    text: str, ascii: bool, space: str, pieces: list[int]
) -> None:
    arguments = (
        f'{space}{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=ascii)}{space}}}'
    )
    reader, parts, place = InputReader(), [], 0
    sizes = itertools.cycle(pieces)
    while place < len(arguments):
        size = next(sizes)
        parts.append(reader.feed(arguments[place : place + size]))
        place += size
    parts.append(reader.finish(complete=True))
    assert "".join(parts) == text


@pytest.mark.parametrize(
    ("arguments", "complete", "text"),
    [
        ('{"input": "ab\\u00e', False, "ab"),
        ('{"inp', False, ""),
        ('{"patch": "x"}', True, "x"),
        ('{"a": "x", "input": "y"}', True, "y"),
        ('{"a": "x", "b": "y"}', True, '{"a": "x", "b": "y"}'),
        ('{"input": 3}', True, '{"input": 3}'),
        ("plain words", True, "plain words"),
        ('{"input": "\\ud83d"}', True, "�"),
        ('{"input": "\\q"}', True, "\\q"),
    ],
)
def test_arguments_of_other_forms_are_read_too(arguments: str, complete: bool, text: str) -> None:
    for size in (1, 3, 99):
        reader = InputReader()
        parts = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        assert "".join(parts) + reader.finish(complete=complete) == text


def test_a_lark_grammar_is_one_expression() -> None:
    pattern = lark_pattern(
        "start: expr\n// a sum\nexpr: term (SP ADD SP term)* -> add\n    | term\n"
        'term: "(" INT ")" | INT ~ 1..2\nSP: " "\nADD.2: "+"\n%import common (INT)\n'
    )
    for text, right in (
        ("1 + (2)", True),
        ("1", True),
        ("1 +2", False),
        ("(1", False),
        ("", False),
    ):
        assert bool(re.fullmatch(pattern, text)) is right, text
    long = "start: a a a a a\na: b b b b b\nb: c c c c\nc: " + '"yyyyyyyyyyyy" ' * 99
    wrong = [
        'start: "(" start ")" | "x"', 'a: "x"', "start: b", 'start: "x"\n%ignore " "', "start: (",
        'start: "x" )', "start: a{b}", 'start: "x"\nstart: "y"', long,
    ]  # fmt: skip
    for definition in wrong:
        with pytest.raises(ValueError):
            lark_pattern(definition)


def test_a_recursive_grammar_is_described_and_not_enforced(server: Server) -> None:
    tools = [grammar("lark", 'start: "(" start ")" | "x"')]
    response = post(server, tools=tools, tool_choice="required", max_output_tokens=40)
    assert response.status_code == 200, response.text
    ((_, tool),) = read_tools([("tools", tools)]).offered.items()
    assert tool.schema is None
    assert "start: " in tool.function["parameters"]["properties"]["input"]["description"]
