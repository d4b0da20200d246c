"""What tests of /v1/responses share: a configuration, tools and forms, and streams put together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from serving import MODEL

from jackfield import EngineConfig

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
CONFIG = EngineConfig(
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
"""The embedded model, with parsers."""


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
            for field in ("action", "operation", "arguments"):  # Told once, at the end.
                if isinstance(item.get(field), dict):
                    item[field] = event["item"][field]
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
            case "response.custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "response.custom_tool_call_input.done":
                assert event["input"] == item["input"]
            case "response.function_call_arguments.done":
                assert event["arguments"] == item["arguments"] and event["name"] == item["name"]
            case "response.content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case other:
                raise AssertionError(other)


async def folded(stream: Any) -> Folded:
    result = Folded()
    async for event in stream:
        result.take(event.to_dict())
    assert result.final is not None
    assert result.final["output"] == result.items
    return result


async def both(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """Ask twice, whole and streamed: the same, but for ids and times."""
    options = {"model": MODEL, "max_output_tokens": 300, **options}
    first = await client.responses.create(**options)
    other = await folded(await client.responses.create(stream=True, **options))
    assert plain(first.output) == plain(other.items)
    left, right = first.to_dict(), dict(other.final)
    for name in ("id", "created_at", "completed_at", "output"):
        left.pop(name, None), right.pop(name, None)
    cached: Any = [
        first["usage"]["input_tokens_details"].pop("cached_tokens") for first in (left, right)
    ]
    assert len(cached) == 2 and left == right
    return first


async def polled(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(300):
        while (response := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response
