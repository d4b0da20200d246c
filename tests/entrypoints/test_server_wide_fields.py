"""What a server sets for all requests: usage, names of tokens, comments in streams; and the routes
that stand for others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import AsyncEngine, OutputKind, SamplingParams
from jackfield.core.errors import InvalidRequest
from jackfield.entrypoints.http.context import OPTIONS
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.http.streaming import KEEP_ALIVE, frame, stream

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 3}
OPTIONS_OF_ALL = ServerOptions(
    force_include_usage=True,
    tokens_as_token_ids=True,
    sse_keep_alive_interval=0.01,
    tokenizer_info=True,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """With one slot, so that a second request waits."""
    config = engine_config(checkpoint, device="cpu", max_num_seqs=1, max_model_len=1024)
    with running(config, OPTIONS_OF_ALL) as running_server:
        yield running_server


# ---------------------------------------------------------------- fewer events


def test_a_stream_has_events_of_as_many_tokens_as_asked(client: openai.OpenAI) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    more = {"ignore_eos": True, "stream_interval": 7}
    body = {"model": MODEL, **CHAT, "max_tokens": 24, "stream": True, "stream_options": usage}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(**body, extra_body=more)
        if chunk.choices and chunk.usage and chunk.choices[0].delta.content != ""
    ]
    counts = sorted({count for count in counts if count})
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert counts[-1] == 24 and len(counts) > 1
    assert all(step >= 7 for step in steps[:-1]), "but for the last"
    with pytest.raises(openai.BadRequestError, match="stream_interval must be at least 1"):
        client.completions.create(model=MODEL, **TEXT, extra_body={"stream_interval": 0})


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 60}, '"text":'),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 60}, '"response.output_text.delta"'),
        ("/v1/messages", {**CHAT, "max_tokens": 60}, '"text_delta"'),
        ("/api/chat", {**CHAT, "options": {"num_predict": 60}}, '"content":'),
    ],
)
def test_every_protocol_streams_in_larger_pieces(
    server: Server, path: str, body: dict[str, Any], event: str
) -> None:
    def events(**more: Any) -> int:
        asked = {"model": MODEL, "stream": True, "ignore_eos": True, "seed": 1, **body, **more}
        response = httpx.post(server.url + path, json=asked, timeout=60)
        assert response.status_code == 200, response.text
        return sum(event in line for line in response.text.splitlines())

    assert 0 < events(stream_interval=100) <= 4


async def test_an_engine_has_its_own_interval_of_streams(checkpoint: Path) -> None:
    config = engine_config(checkpoint, device="cpu", stream_interval=9)
    async with AsyncEngine(config) as engine:

        async def counts(**more: Any) -> list[int]:
            params = SamplingParams(
                max_tokens=30, ignore_eos=True, output_kind=OutputKind.DELTA, **more
            )
            return [len(one.outputs[0].token_ids) async for one in engine.generate("hi", params)]

        *most, last = await counts()
        assert sum(most) + last == 30 and all(count >= 9 for count in most[1:])
        for _ in range(20):  # A reader that is late gets more tokens at once.
            if max((await counts(stream_interval=1))[1:-1], default=9) < 9:
                return
        pytest.fail("requests have their own interval")


# ---------------------------------------------------------------- usage and names of tokens


@pytest.mark.parametrize("asked", [{}, {"stream_options": {"include_usage": False}}])
def test_every_stream_ends_with_its_usage(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    create: Any
    for create, body in (
        (client.chat.completions.create, CHAT),
        (client.completions.create, TEXT),
        (client.completions.create, {**TEXT, "prompt": ["hi", "you"]}),
    ):
        extra = {"ignore_eos": True, **asked}
        chunks = list(create(model=MODEL, stream=True, extra_body=extra, **body))
        assert [chunk.usage is not None for chunk in chunks[-2:]] == [False, True]
        assert chunks[-1].choices == []
        num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        assert chunks[-1].usage.completion_tokens == 3 * num_prompts


@pytest.mark.parametrize(
    ("asked", "as_ids"), [({}, True), ({"return_tokens_as_token_ids": False}, False)]
)
def test_tokens_are_named_by_their_ids_unless_a_request_says_so(
    client: openai.OpenAI, asked: dict[str, bool], as_ids: bool
) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True, **asked}
    chat: Any = client.chat.completions.create(
        model=MODEL, logprobs=True, top_logprobs=1, extra_body=extra, **CHAT
    )
    named = [entry.token for entry in chat.choices[0].logprobs.content]
    completion: Any = client.completions.create(model=MODEL, logprobs=1, extra_body=extra, **TEXT)
    for choice, tokens in (
        (chat.choices[0], named),
        (completion.choices[0], completion.choices[0].logprobs.tokens),
    ):
        assert (tokens == [f"token_id:{id}" for id in choice.token_ids]) == as_ids


# ---------------------------------------------------------------- comments


@contextlib.contextmanager
def occupied(server: Server) -> Iterator[None]:
    """The one slot is taken."""
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        yield


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", CHAT, "data: [DONE]"),
        ("/v1/completions", TEXT, "data: [DONE]"),
        ("/v1/completions", {**TEXT, "prompt": ["a", "b"]}, "data: [DONE]"),
        ("/v1/messages", CHAT, '"type":"message_stop"}'),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, '"incomplete_details"'),
    ],
)
def test_a_stream_that_waits_gets_comments(
    server: Server, path: str, body: dict[str, Any], last: str
) -> None:
    body = {**body, "model": MODEL, "stream": True, "ignore_eos": True}
    taken = contextlib.ExitStack()
    taken.enter_context(occupied(server))
    with taken, httpx.stream("POST", f"{server.url}{path}", json=body) as response:
        lines = response.iter_lines()
        found = next(line for line in lines if line.startswith(":"))
        taken.close()  # The slot becomes free, and the stream goes on.
        assert found == KEEP_ALIVE.decode().strip()
        assert response.status_code == 200
        rest = [line for line in lines if line and not line.startswith(":")]
    assert last in rest[-1]
    assert all(line.startswith(("data: ", "event: ")) for line in rest)


def test_lines_of_json_have_no_comments(server: Server) -> None:
    """Ollama's clients parse every line."""
    body = {**CHAT, "model": MODEL, "options": {"num_predict": 3}, "ignore_eos": True}
    taken = contextlib.ExitStack()
    taken.enter_context(occupied(server))

    def waits(engine: Any) -> bool:
        return len(engine.core.requests.states) == 2

    with taken, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.url}/api/chat", json=body, timeout=60)
        assert server.becomes(waits)
        server.call(lambda engine: asyncio.sleep(5 * OPTIONS_OF_ALL.sse_keep_alive_interval))
        taken.close()
        lines = answer.result().text.splitlines()
    assert [json.loads(line)["done"] for line in lines][-1]


def test_a_client_leaves_comments_out(server: Server, client: openai.OpenAI) -> None:
    with occupied(server):
        stream = client.completions.create(
            model=MODEL, stream=True, extra_body={"ignore_eos": True}, **TEXT
        )
    assert list(stream)[-1].usage is not None


async def _streamed(interval: float, frames: AsyncIterator[bytes]) -> tuple[int, bytes]:
    """Status and body of a stream of these frames."""
    app = web.Application()
    app[OPTIONS] = ServerOptions(sse_keep_alive_interval=interval)

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await stream(request, frames)
        except InvalidRequest as error:
            return web.Response(status=error.status, text=error.message)

    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/")
        return response.status, await response.read()


async def test_a_refusal_after_a_comment_is_an_event() -> None:
    async def refused(turns: int) -> AsyncIterator[bytes]:
        for _ in range(turns):
            await asyncio.sleep(0.01)
        raise InvalidRequest("x: is wrong", param="x")
        yield b""

    assert await _streamed(0, refused(1)) == (400, b"x: is wrong")
    assert await _streamed(60, refused(1)) == (400, b"x: is wrong")
    status, body = await _streamed(0.001, refused(5))
    assert status == 200
    *comments, error, done, empty = body.split(b"\n\n")
    assert set(comments) == {KEEP_ALIVE.strip()} and (done, empty) == (b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["param"] == "x"


async def test_events_put_comments_off() -> None:
    async def frequent() -> AsyncIterator[bytes]:
        for number in range(20):
            await asyncio.sleep(0)
            yield frame(number)

    status, body = await _streamed(60, frequent())
    assert status == 200 and b":" not in body.replace(b"data: ", b"")


# ---------------------------------------------------------------- other names of routes


def test_the_tokenizer_is_described(server: Server, checkpoint: Path) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] == theirs.chat_template
    assert (info["eos_token"], info["pad_token"]) == (theirs.eos_token, theirs.pad_token)
    assert info["vocab_size"] == len(theirs)
    added = theirs.added_tokens_decoder
    assert {int(id) for id in info["added_tokens_decoder"]} == set(added)
    for id, token in info["added_tokens_decoder"].items():
        assert token["content"] == added[int(id)].content
        assert token["special"] == added[int(id)].special


def test_the_tokenizer_is_described_only_where_enabled(checkpoint: Path) -> None:
    with running(engine_config(checkpoint, device="cpu")) as plain:
        assert httpx.get(f"{plain.url}/tokenizer_info").status_code == 404


def test_invocations_go_to_the_route_of_their_fields(server: Server) -> None:
    def sent(path: str, body: dict[str, Any]) -> Any:
        body = {"temperature": 0, "seed": 1, "ignore_eos": True, **body}
        answer = httpx.post(f"{server.url}{path}", json=body).json()
        return answer["object"], answer["choices"], answer["usage"]

    assert sent("/invocations", CHAT) == sent("/v1/chat/completions", CHAT)
    assert sent("/invocations", TEXT) == sent("/v1/completions", TEXT)
    for body, words in (
        ({"input": "x"}, "send messages or prompt"),
        ([1], "not a JSON object"),
        ({"query": "x", "documents": ["y"]}, "/invocations: this model does not serve it"),
        ({"messages": [], "prompt": None}, "messages: must be a non-empty list"),
    ):
        response = httpx.post(f"{server.url}/invocations", json=body)
        assert response.status_code == 400 and words in response.json()["error"]["message"]
    body = {**TEXT, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/invocations", json=body) as response:
        assert list(response.iter_lines())[-2] == "data: [DONE]"


# ---------------------------------------------------------------- tools that are not called


@pytest.mark.parametrize("kept", [False, True])
def test_tools_that_may_not_be_called_are_left_out_or_kept(checkpoint: Path, kept: bool) -> None:
    """At every route of chats: as many tokens of prompt as without tools, or as with auto."""
    options = {"exclude_tools_when_tool_choice_none": not kept, "tool_call_parser": "hermes"}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    chat = {"tools": [{"type": "function", "function": function}]}
    item = {"tools": [{"type": "function", **function}]}
    block = {"tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]}
    with running(engine_config(checkpoint, device="cpu", **options)) as one:

        def counted(path: str, body: dict[str, Any], count: str) -> int:
            answer = httpx.post(f"{one.url}{path}", json={**CHAT, "input": "hi", **body}).json()
            return int((answer.get("usage") or answer)[count])

        for path, tools, count, none in (
            ("/v1/chat/completions", chat, "prompt_tokens", "none"),
            ("/v1/responses/input_tokens", item, "input_tokens", "none"),
            ("/v1/messages/count_tokens", block, "input_tokens", {"type": "none"}),
        ):
            without, auto = counted(path, {}, count), counted(path, tools, count)
            assert without < auto
            found = counted(path, {**tools, "tool_choice": none}, count)
            assert found == (auto if kept else without), path


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_every_name_of_a_text_part_is_a_text(server: Server, kind: str) -> None:
    def tokens(content: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}]}
        return httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]

    assert tokens([{"type": kind, "text": "Hello"}]) == tokens("Hello")
    wrong = {"messages": [{"role": "user", "content": [{"type": kind, "text": 5}]}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        response = httpx.post(f"{server.url}{path}", json=wrong)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[0].text"
