"""The parts of /v1/responses that need no server: items, log-probabilities' places, the store."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from serving import save_tokenizer

from jackfield.core.output_parsing.completion_parser import TokenText
from jackfield.core.outputs import CompletionOutput, Logprob
from jackfield.core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.entrypoints.openai.responses.events import OutputItems
from jackfield.entrypoints.openai.responses.input_items import read_items, to_messages, turns
from jackfield.entrypoints.openai.responses.logprobs import MessageLogprobs
from jackfield.entrypoints.openai.responses.store import ResponseStore

TEXT = st.text("ab \n", min_size=1, max_size=6)
PART = st.one_of(
    st.tuples(st.just("thought"), TEXT, st.booleans()),
    st.tuples(st.just("text"), TEXT, st.booleans()),
    st.tuples(st.just("call"), TEXT, st.booleans()),
)


def parsed(parts: list[tuple[str, str, bool]], pieces: list[int]) -> list[ParserEvent]:
    """Events of the parts, each text cut into pieces of the given lengths in turn."""
    lengths = itertools.cycle(pieces)
    events: list[ParserEvent] = []
    calls = 0
    for kind, text, ended in parts:
        if kind == "call":
            events.append(ToolCallStart(calls, "f"))
        start = 0
        while start < len(text):
            piece = text[start : start + next(lengths)]
            start += len(piece)
            if kind == "call":
                events.append(ToolCallArguments(calls, piece))
            else:
                events.append(Reasoning(piece) if kind == "thought" else Content(piece))
        if kind == "call":
            events += [ToolCallEnd(calls)] if ended else []
            calls += 1
    return events


def made(events: list[ParserEvent], sizes: list[int], status: str) -> tuple[Any, list[Any]]:
    """→ (items without ids, what was told), the events fed in batches of these sizes in turn."""
    items = OutputItems()
    all_events: list[Any] = []
    lengths = itertools.cycle(sizes)
    while events:
        size = next(lengths)
        all_events += items.add(events[:size])
        events = events[size:]
    all_events += items.close(status)
    bare = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in items.snapshot()]
    return bare, all_events


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(PART, max_size=6),
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    status=st.sampled_from(["completed", "incomplete"]),
)
def test_any_cutting_builds_the_same_items(
    parts: Any, pieces: list[int], sizes: list[int], status: str
) -> None:
    whole, _ = made(parsed(parts, [99]), [99], status)
    cut, events = made(parsed(parts, pieces), sizes, status)
    assert cut == whole
    opened = [event for event in events if event["type"] == "response.output_item.added"]
    complete = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in opened] == list(range(len(whole)))
    assert [event["item"]["id"] for event in opened] == [item["id"] for item in complete]
    for index, item in enumerate(complete):
        deltas = "".join(
            e["delta"] for e in events if e.get("delta") and e.get("output_index") == index
        )
        shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas == shown
        assert item["type"] != "message" or not shown.isspace() or len(complete) - 1 == index
    if status == "completed":
        assert any(item["type"] != "reasoning" for item in complete)


def test_space_between_items_is_no_message() -> None:
    events: list[ParserEvent] = [
              Reasoning("hm"), Content("\n\n"), ToolCallStart(0, "f"), ToolCallArguments(0, "{}"),
              ToolCallEnd(0), Content("\n"), Content(" so"), Content("\n")]  # fmt: skip
    items, _ = made(events, [1], "completed")
    assert [item["type"] for item in items] == ["reasoning", "function_call", "message"]
    assert items[2]["content"][0]["text"] == "\n so\n"


def test_what_the_model_gave_in_a_row_is_one_message() -> None:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"text": text}]}

    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}
    items = [
        message("developer", "Rules"), message("user", "Hi"),
        {"type": "reasoning", "content": [{"text": "hm"}]}, message("assistant", "Wait."),
        call, {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"text": "2"}]},
        message("assistant", "Done."), message("assistant", "Really."), message("user", "Ok"),
    ]  # fmt: skip
    system, user, response, first, second, *rest = to_messages(items, "Be brief.")
    assert system == {"role": "system", "content": "Be brief.\n\nRules"}
    assert user == {"role": "user", "content": "Hi"}
    assert (response["reasoning_content"], response["content"]) == ("hm", "Wait.")
    assert [item["id"] for item in response["tool_calls"]] == ["a", "b"]
    assert (first["role"], first["tool_call_id"], first["name"], first["content"]) == (
        "tool", "a", "f", "1",
    )  # fmt: skip
    assert second["content"] == "2"
    assert [item["content"] for item in rest] == ["Done.", "Really.", "Ok"]
    assert turns(items) == (1, [1, 10])


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans()), max_size=30)
)
def test_the_store_keeps_within_its_limits_and_its_books(steps: Any) -> None:
    store = ResponseStore(4, 1500)
    order: list[str] = []
    for number, size, remove in steps:
        id = f"resp_{number}"
        if remove:
            assert store.delete(id, "") == (id in order)
            order = [one for one in order if one != id]
            continue
        item = {"id": f"msg_{number}", "type": "message", "content": "x" * size}
        store.put({"id": id, "output": [item], "background": False}, [], [])
        order = [one for one in order if one != id] + [id]
        assert len(store) <= 4 and store.num_bytes <= 1500
        retained = [one for one in order if store.get(one, "")]
        assert order[len(order) - len(retained) :] == retained or store.get(id, "") is None
        order = retained
        entries = [store.get(one, "") for one in retained]
        assert store.num_bytes == sum(entry.num_bytes for entry in entries if entry is not None)
        for other in range(10):
            match = store.finder("")(f"msg_{other}")
            assert (match is not None) == (f"resp_{other}" in retained)
    for one in list(order):
        store.delete(one, "")
    assert store.num_bytes == 0 and len(store) == 0


@pytest.mark.parametrize("id", ["", None, 5])
def test_an_item_without_an_id_gets_one(id: Any) -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": "x"}
    first, second, named = read_items(
        [{**item, "id": id}, item, {**item, "id": "mine"}], lambda id: None
    )
    assert first["id"] and isinstance(first["id"], str) and first["id"] != second["id"]
    assert named["id"] == "mine"


@pytest.mark.parametrize("limits", [(0, 100), (100, 0)])
def test_a_store_without_room_keeps_nothing(limits: tuple[int, int]) -> None:
    store = ResponseStore(*limits)
    assert not store.enabled
    store.put({"id": "resp_1", "output": []}, [], [])
    assert len(store) == 0 and store.get("resp_1", "") is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The second of two equal marks is held while the first is shown.
        ([("<", ""), ("<", "<"), ("b", "<b")], [[], [0], [1, 2]]),
        # A token counts once, with the text in which it begins.
        ([("a<", "a"), ("b", "<b")], [[0], [1]]),
        # A token that ends a mark belongs to the text that it begins.
        ([("<t", ""), (">a", "a"), ("b", "b")], [[], [1], [2]]),
        # Marks before a text have no place in it.
        ([("<t>", ""), ("a", "a")], [[], [1]]),
    ],
)
def test_a_token_s_log_probability_comes_with_its_text(
    tmp_path: Path, steps: list[tuple[str, str]], expected: list[list[int]]
) -> None:
    """steps: text of a token, and what a parser shows after it."""
    save_tokenizer(tmp_path)
    logprobs = MessageLogprobs(Tokenizer.load(str(tmp_path)), 0)
    sent = []
    for number, (text, shown) in enumerate(steps):
        output = CompletionOutput(index=0, logprobs=[{number: Logprob(-float(number))}])
        events: list[ParserEvent] = [Content(shown)] if shown else []
        logprobs.add(output, [(TokenText(text, number, True), events)])
        sent.append(
            [-json.loads(bytes(entry))["logprob"] for entry in logprobs.entries(0, only_new=True)]
        )
    assert sent == expected
    assert len(logprobs.entries(0, only_new=False)) == sum(map(len, expected))
