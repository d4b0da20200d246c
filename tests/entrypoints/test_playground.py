"""The page for people, in headless Chromium, against real servers."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path

import hearing_models
import numpy as np
import pytest
import soundfile
from browser import CHROMIUM, Browser, Page
from serving import MODEL, Server, engine_config, running, save_random, save_scripted
from test_speech import save_whisper

from jackfield import EngineConfig
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
    assert texts(page, ".error") == []
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
    bar = ["history", "fresh", "terminal", "theme", "settings"]
    assert reached == ["send", "model", *bar, "log", "prompt"]
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


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
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


# ---------------------------------------------------------------- Markdown

WRITTEN = """# A title

Some **bold**, *slanted* and `code`, snake_case_name, 2 * 3 * 4.
A second line.

- one
- two
  1. inner
  2. more

3. third
4. fourth

| a | b |
|---|:-:|
| 1 | **2** |

> quoted

```python
print("<b>&amp;</b>")

# no title
```

[a page](https://example.com/x) [run](javascript:alert(1)) ![pixel](https://example.com/pixel.png)
<img src=x onerror="alert(1)"><script>alert(2)</script> https://example.com/bare."""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model writes Markdown, some of it hostile."""
    checkpoint = save_scripted(tmp_path_factory.mktemp("writer"), [WRITTEN])
    with running(engine_config(checkpoint)) as item:
        yield item


@pytest.fixture
def written(browser: Browser, writer: Server) -> Iterator[Page]:
    """The page with such an answer."""
    ready = f"document.getElementById('model').value === '{MODEL}'"
    for page in opened(browser, writer, ready):
        say(page, "Write")
        page.until(f"document.querySelector('.markdown') && {DONE}")
        yield page
        page.value("document.getElementById('fresh').click()")


def test_markdown_is_drawn(written: Page) -> None:
    page = written
    assert texts(page, ".markdown > h3") == ["A title"]
    assert texts(page, ".markdown strong") == ["bold", "2"]
    assert texts(page, ".markdown em") == ["slanted"]
    assert "snake_case_name, 2 * 3 * 4.\nA second line." in text(page, ".markdown > p")
    assert texts(page, ".markdown ul > li > ol > li") == ["inner", "more"]
    assert page.value("document.querySelector('.markdown > ol').start") == 3
    assert texts(page, ".markdown th") == ["a", "b"] and texts(page, ".markdown td") == ["1", "2"]
    assert texts(page, ".markdown blockquote") == ["quoted"]
    assert texts(page, ".codeblock header span") == ["python"]
    assert text(page, ".codeblock code") == 'print("<b>&amp;</b>")\n\n# no title'


def test_a_hostile_answer_is_text(written: Page) -> None:
    """`opened` sees to it that nothing is fetched from elsewhere, and that nothing complains."""
    page = written
    last = texts(page, ".markdown > p")[-1]
    assert '<img src=x onerror="alert(1)"><script>alert(2)</script>' in last
    assert page.value("document.querySelectorAll('.turn :is(img, script, b)').length") == 0
    links = "Array.from(document.querySelectorAll('.turn a'), (a) => [a.innerText, a.href, a.rel])"
    safe = "noopener noreferrer nofollow"
    assert page.value(links) == [
        ["a page", "https://example.com/x", safe],
        ["pixel", "https://example.com/pixel.png", safe],
        ["https://example.com/bare", "https://example.com/bare", safe],
    ]


def test_code_is_copied(written: Page) -> None:
    page = written
    page.value("document.querySelector('.copy').click()")
    page.until("document.querySelector('.copy').innerText === 'Copied'")
    page.value("document.getElementById('prompt').focus()")
    page.send("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    pasted = page.value("document.getElementById('prompt').value")
    assert pasted == 'print("<b>&amp;</b>")\n\n# no title'


def test_markdown_that_grows_is_drawn_like_the_whole(page: Page) -> None:
    draw = """(async () => {
        const { Markdown } = await import("/playground/markdown.js");
        const drawn = (pieces) => {
            const root = document.createElement("div");
            const view = new Markdown(root);
            for (const piece of pieces) { view.append(piece); view.draw(true); }
            return root.innerHTML;
        };
        return TEXTS.map((text) => [drawn([text]), drawn(text), drawn(text.match(/[^]{1,7}/g))]);
    })()"""
    others = ["* a\n\n  still a\n* b\nlazy\n\nafter", "```\nopen\n\nend", "**un closed\n\n`x"]
    found = page.value(draw.replace("TEXTS", json.dumps([WRITTEN, *others])))
    for whole, by_letter, by_seven in found:
        assert whole == by_letter == by_seven


# ---------------------------------------------------------------- a reload


def test_a_reload_keeps_the_conversation_and_the_settings(page: Page, server: Server) -> None:
    fill(page, "#system", "Be kind.")
    fill(page, "[data-field=temperature]", "0")
    fill(page, "#key", "sk-secret")
    page.value("document.getElementById('example').click()")
    say(page, "The weather?")
    page.until("document.querySelector('.answers')")
    shown = texts(page, ".turn")
    until_kept(page, 2)
    page.open(server.url)
    page.until("document.querySelector('.answers')")
    assert texts(page, ".turn")[0] == shown[0]
    for part in (".thought summary", ".markdown", ".call pre", ".facts"):
        assert text(page, f".turn.model {part}") in shown[1]
    assert page.value("document.getElementById('system').value") == "Be kind."
    assert page.value("document.querySelector('[data-field=temperature]').value") == "0"
    assert "sk-secret" not in page.value("JSON.stringify(localStorage)")
    page.value("document.querySelector('.answer textarea').focus()")
    page.type("sunny")
    page.value("document.querySelector('.answers').click()")
    page.until(f"document.querySelectorAll('.turn.model').length === 2 && {DONE}")
    until_kept(page, 4)
    page.open(server.url)
    page.until("document.querySelectorAll('.turn.model').length === 2")
    assert text(page, ".answer pre") == "sunny"
    [one] = page.value(f"(async () => {{ {STORE} return store.conversations(); }})()")
    kept = page.value(f"(async () => {{ {STORE} return store.conversation('{one['id']}'); }})()")
    roles = [entry["message"]["role"] for entry in kept["entries"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    page.value("document.getElementById('fresh').click()")
    page.open(server.url)
    assert page.value("document.querySelector('.turn')") is None


STORE = "const store = await import('/playground/conversations.js');"


def until_kept(page: Page, count: int) -> None:
    """Until the only conversation is on disk with so many messages: a moment after it is shown."""
    page.value(f"""(async () => {{
        {STORE}
        for (let kept = 0; kept !== {count};) {{
            const [one] = await store.conversations();
            kept = one ? (await store.conversation(one.id)).entries.length : 0;
        }}
    }})()""")


def keep(page: Page, entries: object, id: str = "one") -> None:
    """Put a conversation into the browser's store, for the next load of the page in this tab."""
    kept = json.dumps({"id": id, "title": id, "at": 1, "entries": entries})
    page.value(f"(async () => {{ {STORE} await store.keepConversation({kept}); }})()")
    page.value(f"sessionStorage.setItem('jackfield.conversation', '{id}')")


def test_a_question_that_a_reload_cut_off_can_be_asked_again(page: Page, server: Server) -> None:
    keep(page, [{"message": {"role": "user", "content": "Hello"}}])
    page.open(server.url)
    page.until("document.querySelector('.facts .link')")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    assert texts(page, ".turn > h2") == ["You", "Model"]
    page.value("document.querySelector('.facts .link').click()")
    page.until(f"document.querySelector('.turn.model .markdown') && {DONE}")
    assert texts(page, ".turn > h2") == ["You", MODEL]


def test_what_is_no_conversation_is_forgotten(page: Page, server: Server) -> None:
    for nonsense in (5, [{"message": 3}], [{"message": {"role": "tool"}}]):
        keep(page, nonsense)
        page.open(server.url)
        page.until("sessionStorage.getItem('jackfield.conversation') === null")
        assert page.value("document.querySelector('.turn')") is None
        assert page.value(f"(async () => {{ {STORE} return store.conversations(); }})()") == []


def test_earlier_conversations_are_opened_and_deleted(page: Page, server: Server) -> None:
    say(page, "The first")
    page.until(f"document.querySelector('.turn.model .markdown') && {DONE}")
    page.value("document.getElementById('fresh').click()")
    say(page, "The second")
    page.until(f"document.querySelector('.turn.model .markdown') && {DONE}")
    page.value("document.getElementById('history').click()")
    page.until("document.querySelectorAll('#chats .one').length === 2")
    assert texts(page, "#chats .one span") == ["The second", "The first"]
    assert text(page, "#chats .one[aria-current] span") == "The second"
    page.value("document.querySelectorAll('#chats .one')[1].click()")
    page.until("document.querySelector('.turn.you .text')?.innerText === 'The first'")
    assert page.value("document.getElementById('kept').matches(':popover-open')") is False
    say(page, "More")
    page.until(f"document.querySelectorAll('.turn.model').length === 2 && {DONE}")
    page.value("document.getElementById('history').click()")
    page.until("document.querySelector('#chats [aria-current]')?.innerText.startsWith('The first')")
    page.value("document.querySelector('#chats .link').click()")
    page.until("document.querySelectorAll('#chats .one').length === 1")
    assert texts(page, "#chats .one span") == ["The second"]
    assert page.value("document.querySelector('.turn')") is None, "the open one was deleted"
    page.press("Escape")
    page.until("!document.getElementById('kept').matches(':popover-open')")


def test_an_answer_that_is_left_is_kept_as_far_as_it_came(locked: Page, guarded: Server) -> None:
    page = locked
    fill(page, "#key", KEY)
    page.press("Tab")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    fill(page, "#extra", json.dumps({"ignore_eos": True, "max_tokens": LONG}))
    say(page, "Go on")
    page.until("document.querySelector('.turn.model .text')")
    page.value("document.getElementById('fresh').click()")
    assert guarded.becomes(lambda engine: engine.stats().num_requests_running == 0)
    page.value("document.getElementById('history').click()")
    page.until("document.querySelector('#chats .one')")
    page.value("document.querySelector('#chats .one').click()")
    page.until("document.querySelector('.turn.model .text')")
    assert texts(page, ".facts span")[-1] == "stopped"


def test_no_more_conversations_are_kept_than_there_is_room_for(page: Page) -> None:
    ids = page.value(f"""(async () => {{
        {STORE}
        for (let at = 1; at <= 102; at += 1) {{
            await store.keepConversation({{ id: `${{at}}`, title: "", at, entries: [] }});
        }}
        return (await store.conversations()).map((one) => one.id);
    }})()""")
    assert ids == [str(at) for at in range(102, 2, -1)]


# ---------------------------------------------------------------- pictures and speech

PICTURES = """const picture = async (kind, colour) => {
    const canvas = new OffscreenCanvas(64, 64);
    const context = canvas.getContext("2d");
    context.fillStyle = "#ececec";
    context.fillRect(0, 0, 64, 64);
    context.fillStyle = colour;
    context.arc(32, 32, 13, 0, 7);
    context.fill();
    return new File([await canvas.convertToBlob({ type: kind })], "drawn", { type: kind });
};
const given = new DataTransfer();
const drop = () => document.body.dispatchEvent(
    new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));"""
SENT = """globalThis.sent = []; const plain = fetch;
    globalThis.fetch = (url, options) => {
        if (options?.body) sent.push(options.body);
        return plain(url, options);
    };"""


@pytest.fixture(scope="module")
def seeing() -> Iterator[Server]:
    config = EngineConfig(
        model="tiny-vision", device="cpu", num_gpu_blocks_override=200, max_num_seqs=2,
        served_model_name=(MODEL,),
    )  # fmt: skip
    with running(config) as item:
        yield item


def test_pictures_are_dropped_and_pasted(browser: Browser, seeing: Server) -> None:
    ready = f"document.getElementById('model').value === '{MODEL}'"
    for page in opened(browser, seeing, ready):
        assert page.value("document.getElementById('attach').hidden") is False
        assert page.value("document.getElementById('speak').hidden") is True
        assert page.value("document.getElementById('file').accept") == "image/*"
        page.value(SENT)
        page.value(f"""(async () => {{ {PICTURES}
            given.items.add(await picture("image/png", "red"));
            if (drop()) throw new Error("the browser would open it");
        }})()""")
        page.until("document.querySelectorAll('#attached img').length === 1")
        page.value(f"""(async () => {{ {PICTURES}
            given.items.add(await picture("image/jpeg", "blue"));
            document.getElementById("prompt").dispatchEvent(new ClipboardEvent(
                "paste", {{ clipboardData: given, bubbles: true, cancelable: true }}));
        }})()""")
        page.until("document.querySelectorAll('#attached img').length === 2")
        page.value("document.querySelector('#attached .link').click()")
        page.until("document.querySelectorAll('#attached img').length === 1")
        fill(page, "[data-field=temperature]", "0")
        say(page, "What is this?")
        page.until(f"document.querySelector('.turn.model .markdown') && {DONE}")
        assert page.value("document.querySelector('#attached img')") is None
        [part, words] = json.loads(page.value("sent[0]"))["messages"][0]["content"]
        assert part["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert words == {"type": "text", "text": "What is this?"}
        assert "blue circle in the middle" in text(page, ".turn.model .markdown")
        until_kept(page, 2)
        page.open(seeing.url)
        page.until("document.querySelector('.turn.you img')?.naturalWidth === 64")
        assert "blue circle" in text(page, ".turn.model .markdown")


def test_large_pictures_are_made_smaller(browser: Browser, seeing: Server) -> None:
    for page in opened(browser, seeing, "true"):
        sizes = page.value("""(async () => {
            const { Attachments } = await import("/playground/attachments.js");
            const made = new Attachments(document.createElement("div"), () => {});
            made.takes = ["text", "image"];
            const canvas = new OffscreenCanvas(3000, 1500);
            canvas.getContext("2d");
            const blob = await canvas.convertToBlob({ type: "image/png" });
            await made.add([new File([blob], "screen", { type: "image/bmp" })]);
            const shown = new Image();
            shown.src = made.parts[0].image_url.url;
            await shown.decode();
            return [shown.src.slice(0, 16), shown.naturalWidth, shown.naturalHeight];
        })()""")
        assert sizes == ["data:image/jpeg;", 2048, 1024]


def test_a_model_of_text_takes_no_files(page: Page) -> None:
    assert page.value("document.getElementById('attach').hidden") is True
    page.value(f"""(async () => {{ {PICTURES}
        given.items.add(await picture("image/png", "red"));
        given.items.add(new File(["x"], "notes.txt", {{ type: "text/plain" }}));
        drop();
    }})()""")
    page.until("document.getElementById('status').innerText.includes('notes.txt')")
    assert page.value("document.querySelector('#attached img')") is None


def test_what_is_no_picture_is_not_attached(browser: Browser, seeing: Server) -> None:
    for page in opened(browser, seeing, f"document.getElementById('model').value === '{MODEL}'"):
        page.value(f"""(async () => {{ {PICTURES}
            given.items.add(new File(["no picture"], "broken.gif", {{ type: "image/gif" }}));
            drop();
        }})()""")
        page.until("document.getElementById('status').innerText === 'broken.gif cannot be read.'")


def speak(page: Page) -> None:
    """Into the browser's microphone, which beeps, until half a second has surely come."""
    page.value("document.getElementById('speak').click()")
    page.until("document.getElementById('speak').ariaPressed === 'true'")
    page.value("new Promise((done) => setTimeout(done, 1200))")
    page.value("document.getElementById('speak').click()")
    page.until("document.querySelector('#attached audio')?.duration > 0.5")
    assert page.value("document.getElementById('speak').ariaPressed") == "false"


def test_a_recording_is_part_of_a_chat(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file of two channels at another rate, which becomes what models take."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros((22_050, 2)), 44_100, format="FLAC")
    data = base64.b64encode(file.getvalue()).decode()
    folder = tmp_path_factory.mktemp("hearing")
    hearing_models.save("Qwen2AudioForConditionalGeneration", folder)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=200,
        max_num_seqs=2, served_model_name=(MODEL,),
    )  # fmt: skip
    with running(config) as server:
        for page in opened(browser, server, "!document.getElementById('speak').hidden"):
            page.value(SENT)
            fill(page, "[data-field=max_tokens]", "4")
            page.value(f"""(() => {{ {PICTURES}
                const bytes = Uint8Array.from(atob("{data}"), (letter) => letter.charCodeAt(0));
                given.items.add(new File([bytes], "said.flac", {{ type: "audio/flac" }}));
                drop();
            }})()""")
            page.until("document.querySelector('#attached audio')?.duration === 0.5")
            say(page, "What is said?")
            page.until(f"document.querySelector('.turn.model .facts') && {DONE}")
            assert texts(page, ".error") == []
            [part, words] = json.loads(page.value("sent[0]"))["messages"][0]["content"]
            assert part["type"] == "input_audio" and part["input_audio"]["format"] == "wav"
            sent = base64.b64decode(part["input_audio"]["data"])
            with wave.open(io.BytesIO(sent)) as wav:
                assert wav.getparams()[:4] == (1, 2, 16_000, 8000)
            assert words["text"] == "What is said?"
            assert text(page, ".facts").startswith("4 tokens")


def test_speech_into_the_microphone_is_written_down(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model is random, so its words mean nothing."""
    folder = tmp_path_factory.mktemp("whisper")
    save_whisper(folder)
    config = engine_config(folder, max_model_len=None, served_model_name=(MODEL,))
    with running(config) as server:
        ready = f"document.getElementById('model').value === '{MODEL}'"
        for page in opened(browser, server, ready):
            assert page.value("document.getElementById('speak').hidden") is False
            page.value(SENT)
            speak(page)
            page.value("document.getElementById('send').click()")
            page.until(f"document.querySelector('.turn.model') && {DONE}")
            assert texts(page, ".error") == []
            assert page.value("sent[0].get('file').type") == "audio/wav"
            assert page.value("document.querySelector('.turn.you audio')") is not None


# ---------------------------------------------------------------- the engine's numbers


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_steps_and_cache_are_watched_as_in_a_terminal(page: Page, width: int) -> None:
    page.shape(width, 844)
    page.value("document.getElementById('terminal').click()")
    say(page, "Hello")
    page.until(DONE)
    names = text(page, "#steps-head").split()
    at = names.index("steps")
    lines = "document.getElementById('steps').innerText.split('\\n')"
    page.until(f"{lines}.some(line => Number(line.trim().split(/ +/)[{at}]) > 0)", 30)
    shown = text(page, "#steps").splitlines()
    line = next(x for x in shown if x.split()[at:] and x.split()[at] not in ("0", "idle"))
    values = dict(zip(names, line.split(), strict=True))
    assert re.fullmatch(r"\d\d:\d\d:\d\d", values["time"]) and int(values["steps"]) > 0
    assert ("tok/step" in values) is (width > 620)
    assert text(page, "#cache-line").startswith("KV cache [")
    assert page.value("document.documentElement.scrollWidth") == width
    assert page.value("document.getElementById('steps').scrollWidth") <= width
    page.open(page.value("location.href"))
    assert page.value("document.getElementById('watch').hidden") is False, "it stays open"


@pytest.mark.parametrize(
    "prefix", [pytest.param("jackfield", marks=pytest.mark.slow), "vllm", "both"]
)
def test_numbers_of_several_engines_under_either_prefix(page: Page, prefix: str) -> None:
    names = {"both": ["jackfield", "vllm"]}.get(prefix, [prefix])
    metrics = "".join(
        f'# HELP x\n{name}:num_requests_running{{engine="{engine}"}} 2.0\n'
        f'{name}:num_requests_waiting{{engine="{engine}"}} 1.0\n'
        f'{name}:kv_cache_usage_perc{{engine="{engine}"}} 0.{engine}\n'
        for name in names
        for engine in (2, 4)
    )
    page.value(
        "globalThis.fetch = async (url) => new Response("
        f"url.endsWith('metrics') ? {json.dumps(metrics)} : '')"
    )
    page.until("document.getElementById('running').innerText === '4'")
    assert text(page, "#waiting") == "2" and text(page, "#cache") == "30 %"


def test_comments_between_events_are_no_events(page: Page) -> None:
    """As `--sse-keep-alive-interval` sends them."""
    found = page.value("""(async () => {
        const { events } = await import("/playground/server.js");
        const frames = [":", 'event: a\\ndata: {"b": 1}', ":", "data: [DONE]"];
        const text = frames.map((frame) => frame + "\\n\\n");
        const found = [];
        for await (const event of events(new Response(text.join("")))) found.push(event);
        return found;
    })()""")
    assert found == [{"b": 1}]


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
    assert guarded.becomes(lambda engine: engine.stats().num_requests_running == 0)
    page.until("document.getElementById('running').textContent === '0'")


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
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
        assert get(item.url + "/") == (200, "Jackfield is running"), "Ollama's clients look there"
        assert get(item.url + "/playground/playground.js")[0] == 404
        assert get(item.url + "/v1/models")[0] == 200


# ---------------------------------------------------------------- a route, tried


def test_a_route_is_tried_from_its_documentation(browser: Browser, server: Server) -> None:
    for page in opened(browser, server, "true"):
        page.open(server.url + "/docs")
        button = 'button[value="post /v1/chat/completions"]'
        target = page.value(
            f"((one) => `${{one.form.action}}?${{new URLSearchParams([[one.name, one.value]])}}`)"
            f"(document.querySelector('{button}'))"
        )
        page.open(target)  # As a click does, which a test could not wait for.
        page.until("document.getElementById('operation')?.value === 'post /v1/chat/completions'")
        body = json.loads(page.value("document.getElementById('body').value"))
        assert body["messages"][0]["role"] == "user" and body["model"] == MODEL
        page.value("document.getElementById('send').click()")
        page.until("document.getElementById('status').innerText.startsWith('HTTP 200, ')")
        answer = json.loads(text(page, "#response"))
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert text(page, "#curl").startswith(f"curl -X POST '{server.url}/v1/chat/completions'")
        fill(page, "#body", '{"messages": 5}')
        page.value("document.getElementById('send').click()")
        page.until("document.getElementById('status').innerText.startsWith('HTTP 400, ')")
        assert "messages" in text(page, "#response")


def test_a_route_with_a_key_and_parameters_is_tried(browser: Browser, guarded: Server) -> None:
    for page in opened(browser, guarded, "true"):
        page.open(guarded.url + "/docs/try?operation=get+/v1/models/{name}")
        page.until("document.querySelector('#parameters input')")
        fill(page, "#parameters input", MODEL)
        page.value("document.getElementById('send').click()")
        page.until("document.getElementById('status').innerText.startsWith('HTTP 401, ')")
        fill(page, "#key", KEY)
        page.value("document.getElementById('send').click()")
        page.until("document.getElementById('status').innerText.startsWith('HTTP 200, ')")
        assert json.loads(text(page, "#response"))["id"] == MODEL
        assert KEY not in text(page, "#curl")


def test_the_files_of_the_page_need_no_key_and_go_with_the_docs(
    guarded: Server, tmp_path: Path
) -> None:
    paths = ("/docs/try", "/docs/try/try.js", "/docs/try/try.css")
    assert [get(guarded.url + path)[0] for path in paths] == [200] * 3
    with running(engine_config(save_random(tmp_path)), ServerOptions(docs=False)) as item:
        assert [get(item.url + path)[0] for path in paths] == [404] * 3
