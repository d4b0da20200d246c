"""Wishes that /v1/responses cannot fulfil are refused by name, and none of them is a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from responding import ADD, CONFIG, FORMAT
from serving import MODEL, Server, running

from jackfield.entrypoints.openai.responses.protocol import ResponsesRequest

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(CONFIG) as running_server:
        yield running_server


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
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0].file_data"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [USER, {**CALL, "name": ""}]}, "input[1].name"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
         "input"),
        ({"input": [USER, CALL, {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": "x"}]}]}, "input[2].output[0].image_url"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["file_search_call.everything"]}, "include[0]"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
        ({"input": [USER, {"type": "custom_tool_call", "call_id": "c", "name": "x"}]},
         "input[1].input"),
        ({"input": [USER, {"type": "custom_tool_call_output", "call_id": "c", "output": "1"}]},
         "input"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]},
         "input[0].tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [ADD, {"type": "custom"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "json"}}]},
         "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar",
          "syntax": "ebnf", "definition": "x"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
         "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [ADD]},
                    {**ADD, "name": "n__add"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
         "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "allowed_tools",
          "mode": "required", "tools": [{"type": "web_search"}]}}, "tool_choice.tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "?"}}}}, "text.format"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
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
def test_wrong_values_are_refused_by_name(
    server: Server, options: dict[str, Any], param: str
) -> None:
    for way in ({}, {"stream": True}, {"background": True}):
        body = {"model": MODEL, "input": "x", "max_output_tokens": 3, **way, **options}
        response = httpx.post(f"{server.url}/v1/responses", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text
    listed = httpx.get(f"{server.url}/v1/responses/resp_none?stream=true")
    assert listed.status_code == 404


def test_fields_of_other_clients_are_taken(server: Server) -> None:
    body = {
        "model": MODEL, "input": "x", "max_output_tokens": 2, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "unheard_of": 1,
        "stream_options": {"include_obfuscation": False}, "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"},
    }  # fmt: skip
    response = httpx.post(f"{server.url}/v1/responses", json=body).json()
    assert response["prompt_cache_key"] == "k" and response["safety_identifier"] == "s"
    assert response["service_tier"] == "default" and response["max_tool_calls"] == 3


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


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_odd_values_in_any_field_are_refused_or_answered(server: Server, share: int) -> None:
    """By day each value in every fourth field."""
    answered = refused = 0
    fields = [*ResponsesRequest.__struct_fields__, "zebra"]
    with httpx.Client(base_url=server.url, timeout=300) as client:
        for number, field in enumerate(fields):
            for value in ODD[number % share :: share]:
                body = {"model": MODEL, "input": "x", "max_output_tokens": 1, field: value}
                if field == "max_output_tokens" and value not in (0, -1, 1):
                    body["stop"] = ["e", "a", " "]
                response = client.post(
                    "/v1/responses",
                    content=json.dumps(body),
                    headers={"Content-Type": "application/json"},
                )
                assert response.status_code in (200, 400, 404), (body, response.text[:300])
                answered += response.status_code == 200
                refused += response.status_code == 400
    assert answered > 200 // share and refused > 800 // share
    assert server.becomes(lambda engine: engine.stats().kv_blocks_used == 0)
