"""What client libraries send, as they sent it (tests/entrypoints/recorded), is answered.

Each file has one library's requests at one version: instructor in each of its modes, openai-agents,
the AI SDK, guidance, litellm, langchain, pydantic-ai, on the routes that each of them uses. They
were recorded by running the library against a server that wrote down what came. Those of the coding
agents came from test_coding_agents.py; their long texts and some tools are cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import MODEL, Server, engine_config, running, save_turns

from jackfield import EngineConfig
from jackfield.core.config import StructuredOutputsConfig

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
AGENTS = ("claude-code", "codex")


def requests() -> Iterator[Any]:
    """By day all of agents, and of each library's to a route the first, plain and streamed."""
    seen: set[tuple[Any, ...]] = set()
    for path in FILES:
        for request in json.loads(path.read_text())["requests"]:
            kind = (path.stem, request["route"], bool(request["body"].get("stream")))
            by_day = path.stem in AGENTS or kind not in seen
            seen.add(kind)
            marks = [pytest.mark.slow] * (not by_day)
            yield pytest.param(
                path.stem, request, id=f"{path.stem}: {request['name']}", marks=marks
            )


RECORDED = list(requests())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Answers are short, whatever a request allows, and masks may take their time."""
    config = EngineConfig(
        device="cpu",
        served_model_name=(MODEL,),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
        max_num_seqs=8,
        override_generation_config={"max_new_tokens": 16},
        structured_outputs_config=StructuredOutputsConfig(mask_timeout=60, compile_timeout=60),
    )
    with running(config) as item:
        yield item


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose context holds the tools of a coding agent."""
    checkpoint = save_turns(tmp_path_factory.mktemp("roomy"), ["Hello."], 32768)
    config = engine_config(
        checkpoint,
        tool_call_parser="hermes",
        max_model_len=32768,
        num_gpu_blocks_override=2100,
        max_num_batched_tokens=8192,
    )
    with running(config) as item:
        yield item


def test_every_library_has_its_requests() -> None:
    names = {path.stem for path in FILES}
    assert names == {
        "ai-sdk", *AGENTS, "guidance", "instructor", "langchain", "langchain-anthropic", "litellm",
        "openai-agents", "pydantic-ai",
    }  # fmt: skip
    routes = {param.values[1]["route"] for param in RECORDED}  # type: ignore[index, call-overload]
    assert routes == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(("library", "recorded"), RECORDED)
def test_a_recorded_request_is_answered(
    request: pytest.FixtureRequest, library: str, recorded: dict[str, Any]
) -> None:
    server: Server = request.getfixturevalue("roomy" if library in AGENTS else "server")
    body = recorded["body"]
    response = httpx.post(server.url + recorded["route"], json=body, timeout=120)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        response_body = response.json()
        assert response_body.get("error") is None and response_body.get("status") != "failed"
        if body.get("tool_choice") == "required" and "choices" in response_body:
            choice = response_body["choices"][0]
            # A random model may not end its arguments before the context is full.
            assert choice["message"].get("tool_calls") or choice["finish_reason"] == "length"
        return
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    kinds = {event.get("type") for event in events}
    assert events and not any(event.get("error") for event in events)
    assert not kinds & {"error", "response.failed"}
