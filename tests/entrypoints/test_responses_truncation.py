"""`truncation: auto` over inputs of any number of turns: few renderings, none on the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Server, engine_config, running, save_random

from jackfield.core.engine.text_processor import TextProcessor
from jackfield.entrypoints.openai.responses.input_items import (
    MAX_ITEMS,
    read_items,
    to_messages,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(engine_config(save_random(tmp_path_factory.mktemp("random")))) as running_server:
        yield running_server


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Messages of each prompt that is rendered, and the thread that does it."""
    seen: list[tuple[int, str]] = []
    render = TextProcessor.render_chat

    def noted(self: TextProcessor, messages: Any, *args: Any, **options: Any) -> Any:
        seen.append((len(messages), threading.current_thread().name))
        return render(self, messages, *args, **options)

    monkeypatch.setattr(TextProcessor, "render_chat", noted)
    return seen


def said(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"turn {i}"} for i in range(count - 1)] + [
        {"role": "user", "content": "So?"}
    ]


def ask(server: Server, **body: Any) -> httpx.Response:
    body = {"max_output_tokens": 4, **body}
    return httpx.post(server.url + "/v1/responses", json=body, timeout=120)


@pytest.mark.parametrize("count", [101, 3001, MAX_ITEMS - 1])
def test_the_number_of_renderings_and_of_messages_in_them_does_not_grow_with_the_turns(
    server: Server, renderings: list[tuple[int, str]], count: int
) -> None:
    loop_thread = server.call(lambda engine: threading.current_thread().name)
    context = server.engine.model_config.max_model_len
    response = ask(server, input=said(count), truncation="auto", instructions="Be brief.")
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens"] <= context - 4
    assert len(renderings) <= 2 + context.bit_length()
    assert sum(messages for messages, _ in renderings) <= 4 * context
    assert loop_thread not in {thread for _, thread in renderings}
    # One turn more does not fit.
    num_messages, _ = renderings[-1]
    whole = ask(server, input=said(count)[-(num_messages - 1) :], instructions="Be brief.")
    assert whole.json()["usage"]["input_tokens"] == response.json()["usage"]["input_tokens"]
    more = ask(server, input=said(count)[-(num_messages + 1) :], instructions="Be brief.")
    tokens = more.json().get("usage", {}).get("input_tokens", context)
    assert more.status_code == 400 or tokens > context - 4


def test_the_input_has_a_bounded_number_of_items(server: Server) -> None:
    response = ask(server, input=said(MAX_ITEMS + 1), truncation="auto")
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"
    first = ask(server, input="Hi").json()["id"]
    response = ask(server, input=said(MAX_ITEMS - 1), truncation="auto", previous_response_id=first)
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"


def test_instructions_are_kept_and_a_last_turn_that_is_too_long_is_refused(server: Server) -> None:
    system = {"role": "system", "content": "Be brief."}
    response = ask(server, input=[system, *said(301)], truncation="auto")
    assert response.status_code == 200
    prompt = {"role": "user", "content": "word " * 2000}
    response = ask(server, input=[system, *said(301), prompt], truncation="auto")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


class Counting(str):
    """A text that counts how many characters are copied when something is added to it."""

    copied = 0

    def __add__(self, other: str) -> Counting:
        Counting.copied += len(self) + len(other)
        return Counting(str(self) + other)


def test_texts_in_a_row_are_joined_once() -> None:
    Counting.copied = 0
    items = read_items([{"role": "system", "content": "rule"}] * 1000, lambda _: None)
    for item in items:
        item["content"][0]["text"] = Counting(item["content"][0]["text"])
    (message,) = to_messages(items, Counting("first"))
    assert message == {"role": "system", "content": "\n\n".join(["first"] + ["rule"] * 1000)}
    assert Counting.copied < 50_000
