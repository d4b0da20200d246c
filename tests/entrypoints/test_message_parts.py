"""Anthropic's requests as a chat's, and content blocks from parser events, without a server."""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import jiter
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.core.errors import ContextLengthExceeded, InvalidRequest
from jackfield.core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jackfield.entrypoints.anthropic.blocks import ContentBlocks, as_object, fold_events
from jackfield.entrypoints.anthropic.conversation import BILLING, to_messages
from jackfield.entrypoints.anthropic.protocol import MessagesRequest, in_own_terms
from jackfield.entrypoints.anthropic.tools import chat_tools
from jackfield.entrypoints.openai.common.decoding import decode
from jackfield.plugins.conformance.clock import growth

TOOL: Any = {"name": "add", "description": "A sum", "input_schema": {"type": "object"}}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


# ---------------------------------------------------------------- conversations

CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS: list[tuple[Any, Any, Any]] = [
    ("Be.", [{"role": "user", "content": "Hi"}],
     [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]),
    ([text("Be."), text("Now.", cache_control={"type": "ephemeral"})], [user(text("Hi"))],
     [{"role": "system", "content": [text("Be."), text("Now.")]},
      {"role": "user", "content": "Hi"}]),
    ([text(f"{BILLING} cc_version=1; cch=aa;"), text("Be.")], [user(text("Hi"))],
     [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]),
    ([text(f"{BILLING} cch=bb;")], [user(text("Hi"))], [{"role": "user", "content": "Hi"}]),
    (None, [user(text("a"), text("b")), user(text("c"))],
     [{"role": "user", "content": "a\nb\n\nc"}]),
    ("Be.", [{"role": "system", "content": "So."}, user(text("Hi"))],
     [{"role": "system", "content": "Be.\n\nSo."}, {"role": "user", "content": "Hi"}]),
    (None, [user(text("Hi")), assistant(text("Yes")), assistant(text("No")), user(text("So?"))],
     [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes\nNo"},
      {"role": "user", "content": "So?"}]),
    (None,
     [user(text("Hi")),
      assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "???"}, text("Look."), USE),
      user(result([text("4"), text("2")]), text("So?"))],
     [{"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.",
       "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "toolu_1", "name": "add",
       "content": [text("4"), text("2")]},
      {"role": "user", "content": "So?"}]),
    (None, [user(text("Hi")), assistant(USE), user(result("no", is_error=True))],
     [{"role": "user", "content": "Hi"},
      {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "Error: no"}]),
    (None, [user(text("Hi")), {"role": "assistant", "content": ""}],
     [{"role": "user", "content": "Hi"}]),
    (None, [user(text("Hi")), assistant(text(""))], [{"role": "user", "content": "Hi"}]),
    (None, [user(text("Hi")), assistant(USE), user(result())],
     [{"role": "user", "content": "Hi"},
      {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": ""}]),
]  # fmt: skip


@pytest.mark.parametrize("input", ["x", '{"a": ', [1], 5, None])
def test_a_call_with_broken_input_is_taken_as_it_is(input: Any) -> None:
    chat = to_messages(None, [user(text("Hi")), assistant({**USE, "input": input}), user(result())])
    assert chat[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": input}


@pytest.mark.parametrize(("system", "messages", "chat"), CONVERSATIONS)
def test_a_conversation_is_a_chats(system: Any, messages: Any, chat: Any) -> None:
    assert to_messages(system, messages) == chat


SEARCH: Any = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
PAGE = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "???"}
FOUND: Any = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [PAGE]}
BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "tool_reference", "tool_name": "add"}, "Tool that can be called now: add"),
    ({"type": "search_result", "title": "T", "source": "u", "content": [text("a"), text("b")]},
     "T\nu\na\nb"),
    ({"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}, "T\nd"),
    ({"type": "document", "source": {"type": "content", "content": [text("d")]}}, "d"),
    ({"type": "compaction", "content": "So far."}, "So far."),
]  # fmt: skip


@pytest.mark.parametrize(("block", "words"), BLOCKS, ids=lambda value: str(value)[:30])
def test_blocks_of_text_are_read_wherever_they_stand(block: dict[str, Any], words: str) -> None:
    for messages, index in (
        ([user(text("Hi"), block)], 0),
        ([user(text("Hi")), assistant(USE), user(result([block]))], 2),
        ([user(text("Hi")), assistant(block), user(text("So?"))], 1),
        ([user(text("Hi")), {"role": "system", "content": [block]}], 1),
    ):
        content = to_messages(None, messages)[index]["content"]
        assert content == words or content == [text("Hi"), text(words)]
    assert to_messages([block], [user(text("Hi"))])[0]["content"] == words


def test_calls_that_a_server_ran_are_calls_with_results() -> None:
    mcp = {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "x", "input": {}}
    messages = [
        user(text("Hi")),
        assistant({"type": "thinking", "thinking": "Hm."}, text("Look."), SEARCH, FOUND, mcp,
                  {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("3")]},
                  {"type": "fallback", "to": {}}, text("Done."), USE),
        user(result("4")),
    ]  # fmt: skip
    _, first, found, second, three, third, four = to_messages(None, messages)
    assert (first["reasoning_content"], first["content"]) == ("Hm.", "Look.")
    assert first["tool_calls"][0]["function"] == {"name": "web_search", "arguments": {"query": "q"}}
    assert (found["role"], found["tool_call_id"], found["name"]) == ("tool", "s", "web_search")
    assert json.loads(found["content"]) == [{"title": "T", "url": "u"}]
    assert second["tool_calls"][0]["function"]["name"] == "f" and three["content"] == "3"
    assert (third["content"], third["tool_calls"]) == ("Done.", [CALL])
    assert four["content"] == "4"
    assert len(to_messages(None, [user(text("Hi")), assistant(SEARCH, FOUND)])) == 3


def types_of(union: Any) -> set[str]:
    """The types that a union of the client library's has."""
    found: set[str] = set()
    for member in typing.get_args(union):
        if isinstance(member, type):
            found.update(re.findall("'([a-z0-9_]+)'", str(typing.get_type_hints(member)["type"])))
    return found


def test_every_type_of_block_is_read_or_refused_by_its_path() -> None:
    from anthropic.types.beta import beta_content_block_param

    fields = {
        **FOUND, **USE, "tool_use_id": "s", "tool_name": "f", "title": "T", "text": "t",
        "thinking": "t", "source": {"type": "text", "data": "d"}, "content": [text("d")],
    }  # fmt: skip
    refused = set()
    kinds = types_of(beta_content_block_param.BetaContentBlockParam)
    assert len(kinds) > 18
    for kind in kinds:
        block = {**fields, "type": kind}
        if kind in ("search_result", "compaction"):
            block["source"] = "u"
        if kind == "compaction":
            block["content"] = "c"
        try:
            to_messages(None, [user(text("Hi")), assistant(SEARCH, block), user(text("So?"))])
        except InvalidRequest as error:
            assert error.param == "messages[1].content[1]"
            refused.add(kind)
    assert refused == {"image", "container_upload", "tool_result"}


def test_tools_of_every_type_are_offered_or_left_out() -> None:
    from anthropic.types.beta import beta_tool_union_param

    offered = set()
    for kind in types_of(beta_tool_union_param.BetaToolUnionParam) | {"of_tomorrow"}:
        tools = [{"type": kind, "name": "f"}]
        if kind == "custom":
            tools[0]["input_schema"] = {"type": "object"}  # type: ignore[assignment]
        for function in chat_tools(tools) or ():
            assert function["function"]["name"] == "f"
            assert function["function"]["parameters"]["type"] == "object"
            offered.add(kind.rpartition("_")[0] or kind)
    assert offered == {"custom", "bash", "text_editor", "memory"}


def test_turns_of_one_role_cost_time_linear_in_them() -> None:
    """Against a yardstick in the same run: writing and reading the same conversation as JSON."""
    messages = [user(text("x" * 4096)) for _ in range(3000)]
    messages += [assistant(text("y" * 4096)) for _ in range(3000)] + [user(text("z"))]
    ratio = growth(
        lambda: [json.loads(json.dumps(messages)) for _ in range(3)],
        lambda: to_messages(None, messages),
        bar=3,
    )
    assert ratio < 3
    chat = to_messages(None, messages)
    assert [len(message["content"]) for message in chat] == [4098 * 3000 - 2, 4097 * 3000 - 1, 1]


IMAGE: Any = {"type": "image", "source": {"type": "file", "file_id": "x"}}
HELLO: Any = [{"role": "user", "content": "Hello"}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [user("x")]}, "messages[0].content[0]"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content[0]"),
    ({"messages": [user(text("x"), IMAGE)]}, "messages[0].content[1].source"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0]"),
    ({"messages": [user({"type": "text", "text": 3})]}, "messages[0].content[0].text"),
    ({"messages": [user(result("x"))]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user(text("x")), assistant(USE), user(result([IMAGE]))]},
     "messages[2].content[0].content[0].source"),
    ({"messages": [user(text("x")), assistant(IMAGE)]}, "messages[1].content[0]"),
    ({"messages": [user(text("x")), assistant({**USE, "id": ""})]}, "messages[1].content[0].id"),
    ({"messages": [user(text("x")), assistant(USE)]}, "messages[1]"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}],
      "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": 3}]}, "tools[0].type"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
     "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {}}, "thinking.type"),
    ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
    ({"thinking": {"type": "adaptive"}, "messages": [*HELLO, assistant(text("A"))]}, "thinking"),
    ({"output_config": {"effort": "vast"}}, "output_config.effort"),
    ({"output_config": {"effort": {}}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_format": {"type": "xml"}}, "output_format"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"top_k": 1.5}, "top_k"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_wrong_request_is_refused_with_the_fields_path(
    fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO, "max_tokens": 8, **fields}
    with pytest.raises(InvalidRequest) as refused:
        expected = decode(json.dumps(body).encode(), MessagesRequest)
        expected.check()
        expected.chat("enable_thinking")
    assert refused.value.param == param
    assert refused.value.message.startswith(param.partition("[")[0].partition(".")[0])


def test_max_tokens_is_required() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(json.dumps({"messages": HELLO}).encode(), MessagesRequest)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "switch", "arguments"),
    [
        ({}, "think", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "think", {"think": True}),
        ({"thinking": {"type": "adaptive"}}, "think", {"think": True}),
        ({"thinking": {"type": "disabled"}}, "think", {"think": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, None, None),
        ({"messages": [*HELLO, assistant(text("A"))]}, "think", {"think": False}),
        ({"messages": [*HELLO, assistant()], "thinking": {"type": "adaptive"}}, "think",
         {"think": True}),
        ({"output_config": {"effort": "max"}}, "think", {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"think": True}}, "think",
         {"think": True}),
    ],
)  # fmt: skip
def test_thinking_turns_the_templates_switch(
    fields: dict[str, Any], switch: str | None, arguments: Any
) -> None:
    body = {"messages": HELLO, "max_tokens": 8, **fields}
    expected = decode(json.dumps(body).encode(), MessagesRequest)
    expected.check()
    assert expected.chat(switch).chat_template_kwargs == arguments


def test_a_chats_errors_name_a_messages_fields() -> None:
    error = in_own_terms(InvalidRequest("stop: too many", param="stop"))
    assert (error.message, error.param) == ("stop_sequences: too many", "stop_sequences")
    error = in_own_terms(InvalidRequest("x", param="response_format.json_schema.a"))
    assert error.param == "output_config.format.schema.a"
    long = in_own_terms(ContextLengthExceeded.of(100, 120, "so", param="prompt"))
    assert long.message == "prompt is too long: 120 tokens > 100 maximum"
    assert in_own_terms(ContextLengthExceeded("much too long")).message.startswith(
        "prompt is too long: "
    )


# ---------------------------------------------------------------- blocks


def built(*parsed: ParserEvent, **options: Any) -> list[dict[str, Any]]:
    """Blocks of these parser events, by way of a stream's events; indexes run from 0."""
    blocks = ContentBlocks(lambda: "toolu_new", **options)
    events = blocks.add(list(parsed)) + blocks.close()
    starts = [e["index"] for e in events if e["type"] == "content_block_start"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(starts)))
    message = fold_events([{"type": "message_start", "message": {}}, *events])
    content = msgspec.json.decode(msgspec.json.encode(message["content"]))
    for block in content:
        assert (block.pop("signature", "") != "") == (block["type"] == "thinking")
    return content


ARGUMENTS = ToolCallArguments(0, '{"a": 1}')
THOUGHT = {"type": "thinking", "thinking": "Hm."}
CALLED = {"type": "tool_use", "id": "toolu_new", "name": "f", "input": {"a": 1}}


@pytest.mark.parametrize(
    ("parsed", "content"),
    [
        ([], []),
        ([Content("Hel"), Content("lo")], [text("Hello")]),
        ([Reasoning("H"), Reasoning("m."), Content("\n\n"), Content("So.")],
         [THOUGHT, text("\n\nSo.")]),
        ([Reasoning("Hm."), Content("\n"), ToolCallStart(0, "f"), ARGUMENTS, ToolCallEnd(0),
          Content("\n")], [THOUGHT, CALLED]),
        ([Content("A "), ToolCallStart(0, "f", "own"), ARGUMENTS, ToolCallEnd(0), Content("B")],
         [text("A "), {**CALLED, "id": "own"}, text("B")]),
        ([ToolCallStart(0, "f"), ToolCallEnd(0)], [{**CALLED, "input": {}}]),
        ([ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": 1, "b')], [CALLED]),
        ([Content(" \n")], [text(" \n")]),
        ([Reasoning("Hm."), Content("\n")], [THOUGHT, text("\n")]),
        ([Reasoning("Hm.")], [THOUGHT]),
    ],
)  # fmt: skip
def test_blocks_of_parser_events(parsed: list[ParserEvent], content: Any) -> None:
    assert built(*parsed) == content


def test_omitted_reasoning_is_signed_and_empty() -> None:
    assert built(Reasoning("Hm."), Content("So."), show_thinking=False) == [
        {"type": "thinking", "thinking": ""},
        text("So."),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.booleans(), st.data())
def test_arguments_that_break_off_are_what_the_client_makes_of_them(
    value: dict[str, Any], spaced: bool, data: st.DataObject
) -> None:
    whole = json.dumps(value, indent=1 if spaced else None, ensure_ascii=data.draw(st.booleans()))
    cut = whole[: data.draw(st.integers(1, len(whole)))]
    theirs = jiter.from_json(cut.encode("utf-8", "surrogatepass"), partial_mode=True)
    assert json.loads(bytes(as_object(cut))) == theirs


@pytest.mark.parametrize(
    "arguments", ["", "{", "[1]", "nul", '{"a": NaN', '{"a" 1', "}", '{"a": ]', '{"a":}', "x" * 9]
)
def test_arguments_that_are_no_object_make_a_valid_response(arguments: str) -> None:
    assert json.loads(bytes(as_object(arguments))) == {}


def test_deep_arguments_are_no_trouble() -> None:
    deep = '{"a": ' + "[" * 100_000
    assert isinstance(json.loads(bytes(as_object(deep))), dict)
    msgspec.json.decode(bytes(as_object('{"a": "' + "x" * 100_000)))
