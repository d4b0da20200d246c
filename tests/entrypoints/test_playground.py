"""The page for people, in headless Chromium, against real servers."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Page
from serving import MODEL, Server, engine_config, running, save_random, save_scripted

from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.serve_settings import make_parser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
KEY = "sk-a-key"
LONG = 30_000
"""Tokens: more than a test waits for."""
DONE = "document.getElementById('log').getAttribute('aria-busy') === 'false'"
FOCUS = "document.activeElement.id"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.started() as item:
        yield item


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model thinks, speaks, and calls a tool."""
    config = engine_config(
        save_scripted(tmp_path_factory.mktemp("scripted")),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
    )
    with running(config) as item:
        yield item


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It wants a key; its model can go on for long."""
    checkpoint = save_random(tmp_path_factory.mktemp("random"))
    facts = json.loads((checkpoint / "config.json").read_text())
    facts["max_position_embeddings"] = 2 * LONG
    (checkpoint / "config.json").write_text(json.dumps(facts))
    config = engine_config(checkpoint, max_model_len=LONG + 1000, num_gpu_blocks_override=2000)
    with running(config, ServerOptions(api_keys=(KEY,), shutdown_timeout=1)) as item:
        yield item


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page, with its models listed. It must not have complained, nor asked elsewhere."""
    yield from opened(browser, server, f"document.getElementById('model').value === '{MODEL}'")


@pytest.fixture
def locked(browser: Browser, guarded: Server) -> Iterator[Page]:
    yield from opened(browser, guarded, "document.getElementById('status').textContent !== ''")


def opened(browser: Browser, server: Server, ready: str) -> Iterator[Page]:
    first = browser.page()
    try:
        first.shape(1280, 800)
        first.open(server.url)
        first.until(ready)
        yield first
        elsewhere = [url for url in first.requests if not url.startswith((server.url, "data:"))]
        assert first.requests and elsewhere == []
        assert [error for error in first.errors if not told(error)] == []
    finally:
        first.close()


def told(error: str) -> bool:
    """Whether it is only the browser's own line about a status that the page shows itself."""
    return error.startswith("network: Failed to load resource: the server responded with a status")


def fill(page: Page, field: str, text: str) -> None:
    page.value(f"document.querySelector({field!r}).focus()")
    page.value("document.activeElement.select()")
    page.type(text)


def say(page: Page, text: str) -> None:
    fill(page, "#prompt", text)
    page.press("Enter")


def text(page: Page, selector: str) -> str:
    """What is there to be read."""
    return str(page.value(f"document.querySelector({selector!r}).innerText"))


def texts(page: Page, selector: str) -> list[str]:
    script = f"Array.from(document.querySelectorAll({selector!r}), (one) => one.innerText)"
    return list(page.value(script))


def test_a_response_has_its_reasoning_folded_and_its_speed_shown(page: Page) -> None:
    page.until(f"{FOCUS} === 'prompt'")
    page.type("Hello there")
    page.press("Enter", shift=True)
    page.type("how are you?")
    assert page.value("document.getElementById('prompt').value") == "Hello there\nhow are you?"
    page.press("Enter")
    page.until(DONE)
    assert text(page, ".turn.you .text") == "Hello there\nhow are you?"
    assert text(page, ".turn.model > h2") == MODEL
    assert text(page, ".turn.model .body > .text").startswith("Let me look.")
    assert re.fullmatch(r"Thought( for [\d.]+ m?s)?", text(page, ".thought summary"))
    assert page.value("document.querySelector('.thought').open") is False
    assert page.value("document.querySelector('.thought .text').checkVisibility()") is False
    page.value("document.querySelector('.thought summary').click()")
    assert text(page, ".thought .text") == "two and two"
    counted, *rate, first = texts(page, ".facts span")  # No rate of what came in one piece.
    assert counted == "13 tokens" and len(rate) <= 1
    for item in rate:
        assert item.endswith(" tokens/s") and float(item.split()[0].replace(",", "")) > 0
    assert first.startswith("first token after ")


def test_a_tool_call_is_a_card_whose_result_goes_back(page: Page) -> None:
    page.value("document.getElementById('example').click()")
    say(page, "The weather?")
    page.until("document.querySelector('.answers')")
    assert text(page, ".call h3") == "get_weather"
    assert json.loads(text(page, ".call pre")) == {"city": "Lisbon"}
    page.value("""globalThis.sent = []; const plain = fetch;
        globalThis.fetch = (url, options) => (sent.push(options.body), plain(url, options))""")
    page.value("document.querySelector('.answer textarea').focus()")
    page.type("<b>sunny</b>")
    page.value("document.querySelector('.answers').click()")
    page.until(f"document.querySelectorAll('.turn.model').length === 2 && {DONE}")
    assert text(page, ".answer pre") == "<b>sunny</b>", "shown as text, not as HTML"
    say(page, "No matter")
    page.until(f"document.querySelectorAll('.turn.model').length === 3 && {DONE}")
    assert page.value("document.querySelectorAll('.answer')[1].innerText") == "No result was given"
    body = json.loads(page.value("sent.find(Boolean)"))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool"]
    call, result = body["messages"][1]["tool_calls"][0], body["messages"][2]
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "<b>sunny</b>"}
    assert page.value("document.querySelectorAll('.call').length") == 3


def test_a_refusal_is_shown_plainly_and_can_be_retried(page: Page) -> None:
    fill(page, "[data-field=top_p]", "7")
    say(page, "Hello")
    page.until("document.querySelector('.error')")
    assert "top_p" in text(page, ".error .text")
    assert "HTTP 400" in text(page, ".error")
    assert page.value("document.querySelector('.turn.model .facts').checkVisibility()") is False
    assert page.value("document.querySelector('.error').getAttribute('role')") == "alert"
    fill(page, "[data-field=top_p]", "1")
    page.value("document.querySelector('.error .link').click()")
    page.until(f"document.querySelector('.turn.model .body > .text') && {DONE}")
    assert page.value("document.querySelector('.error')") is None
    assert texts(page, ".turn > h2") == ["You", MODEL]


def test_settings_that_are_no_json_are_reported_beside_the_field(page: Page) -> None:
    fill(page, "#extra", "{not json")
    say(page, "Hello")
    assert page.value(FOCUS) == "extra"
    assert text(page, "#extra-wrong").startswith("Not JSON")
    assert page.value("document.querySelector('.turn')") is None
    assert page.value("document.getElementById('prompt').value") == "Hello"


def test_a_chat_by_keyboard_alone(page: Page) -> None:
    page.shape(390, 844)
    page.until("document.getElementById('settings').getAttribute('aria-expanded') === 'false'")
    assert page.value(FOCUS) == "prompt"
    reached = []
    while len(reached) < 12 and "prompt" not in reached:
        page.press("Tab")
        if page.value("document.activeElement !== document.body"):
            reached.append(page.value(FOCUS))
            assert page.value("document.activeElement.matches(':focus-visible')"), reached
    assert reached == ["send", "model", "fresh", "theme", "settings", "log", "prompt"]
    page.value("document.getElementById('settings').focus()")
    page.press("Enter")
    assert page.value(FOCUS) == "close"
    page.press("Escape")
    assert page.value(FOCUS) == "settings"
    page.value("document.getElementById('prompt').focus()")
    page.type("Hello")
    page.press("Enter")
    page.until(DONE)
    page.value("document.querySelector('.thought summary').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('.thought').open") is True
    page.value("document.getElementById('fresh').focus()")
    page.press(" ")
    assert page.value("document.querySelector('.turn')") is None
    assert page.value(FOCUS) == "prompt"


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.shape(width, 844)
    page.value("document.getElementById('example').click()")
    say(page, "unbreakable" * 15)
    page.until("document.querySelector('.answers')")
    assert page.value("document.documentElement.scrollWidth") == width
    page.value("document.getElementById('settings').click()")
    assert page.value("document.documentElement.scrollWidth") == width


def test_the_theme_follows_the_system_until_it_is_chosen(page: Page) -> None:
    def paper() -> int:
        colour = page.value("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    light = paper()
    page.shape(1280, 800, "dark")
    assert paper() < light / 4
    page.value("document.getElementById('theme').click()")
    assert paper() == light
    page.open(page.value("location.href"))
    assert paper() == light


def test_the_plots_show_what_the_metrics_say(page: Page) -> None:
    page.until("document.getElementById('running').textContent === '0'")
    page.until("document.querySelector('#kv .line').getAttribute('d')?.includes('L')")
    assert text(page, "#waiting") == "0"
    assert text(page, "#cache").endswith(" %")
    assert "0 running" in page.value("document.getElementById('requests').ariaLabel")


def test_a_key_is_requested_and_a_long_response_stopped(locked: Page, guarded: Server) -> None:
    page = locked
    assert text(page, "#status") == "This server needs an API key: put it in under Settings."
    assert page.value("document.getElementById('key').getAttribute('aria-invalid')") == "true"
    fill(page, "#key", KEY)
    page.press("Tab")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    fill(page, "#extra", json.dumps({"ignore_eos": True, "max_tokens": LONG}))
    say(page, "Go on")
    page.until("document.querySelector('.turn.model .text')")
    assert guarded.call(lambda engine: engine.stats().num_requests_running) == 1
    page.until("document.getElementById('running').textContent === '1'")
    before = text(page, ".turn.model .text")
    page.until(f"document.querySelector('.turn.model .text').innerText.length > {len(before)}")
    assert page.value("document.getElementById('send').hidden")
    page.press("Escape")
    page.until(DONE)
    assert texts(page, ".facts span")[-1] == "stopped"
    assert guarded.becomes(lambda engine: engine.stats().num_requests_running == 0, 10)
    page.until("document.getElementById('running').textContent === '0'")


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_needs_no_key_and_other_files_are_not_there(guarded: Server) -> None:
    status, html = get(guarded.url + "/")
    assert status == 200 and html.startswith("<!doctype html>")
    assert get(guarded.url + "/playground/playground.js")[0] == 200
    assert get(guarded.url + "/v1/models")[0] == 401
    assert get(guarded.url + "/playground/page.py")[0] == 404


def test_without_the_playground_there_is_no_page(tmp_path: Path) -> None:
    enabled = make_parser().parse_args(["--no-playground"]).playground
    config = engine_config(save_random(tmp_path))
    with running(config, ServerOptions(playground=enabled)) as item:
        assert get(item.url + "/")[0] == 404
        assert get(item.url + "/playground/playground.js")[0] == 404
        assert get(item.url + "/v1/models")[0] == 200
