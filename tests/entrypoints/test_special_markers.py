"""A family whose marks are special tokens: the parsers see them, the client does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import MODEL, Server, engine_config, running, save_scripted

SPECIAL = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
SCRIPT = (
    "[THINK]", "two and", " two", "\n\n", "[/THINK]", "Let me look.", "[TOOL_CALLS]", "get_weather",
    "[ARGS]", '{"city"', ': "Lis', 'bon"}',
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_scripted(tmp_path_factory.mktemp("special"), SCRIPT, SPECIAL)
    with running(
        engine_config(checkpoint, reasoning_parser="mistral", tool_call_parser="mistral")
    ) as item:
        yield item


def post(server: Server, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**BODY, **body}, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Server, body: dict[str, Any]) -> list[Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {**BODY, **body, "stream": True, "stream_options": options}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=request, timeout=300
    ) as actual:
        lines = [line[6:] for line in actual.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_special_marks_are_separated_and_reasoning_is_counted(server: Server) -> None:
    response = post(server, {"tools": [TOOL]})
    (choice,) = response["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "two and two"
    assert message["content"] == "Let me look."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Lisbon"}'}
    assert len(call["id"]) == 9 and call["id"].isalnum(), "the family's templates want nine letters"
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert response["usage"]["completion_tokens"] == len(SCRIPT) + 1


def test_a_stream_counts_reasoning_as_it_arrives(server: Server) -> None:
    frames = streamed(server, {"tools": [TOOL]})
    counts = [f["usage"]["completion_tokens_details"]["reasoning_tokens"] for f in frames]
    assert counts == sorted(counts) and counts[-1] == 2
    text = "".join(
        choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"]
    )
    assert text == "Let me look."
    starts = [
        call["id"]
        for frame in frames
        for choice in frame["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert len(starts) == 1 and len(starts[0]) == 9


def test_reasoning_cut_off_by_max_tokens_is_counted(server: Server) -> None:
    response = post(server, {"max_tokens": 2})
    assert response["choices"][0]["message"]["reasoning_content"] == "two and"
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
