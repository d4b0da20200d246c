"""Streams as they are delivered: templates, slow readers, failures in the middle.

Over the scripted executor of `examples/benchmarks/frontend`: the real server and parsers.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import msgspec
import pytest

from jackfield.core.errors import RequestFailed
from jackfield.entrypoints.http.context import new_id
from jackfield.entrypoints.http.streaming import Template, frame
from jackfield.entrypoints.openai.chat.job import ChatJob, new_job
from jackfield.entrypoints.openai.chat.request import ChatCompletion
from jackfield.entrypoints.openai.chat.stream import ChatStream
from jackfield.entrypoints.openai.common.decoding import decode
from jackfield.entrypoints.openai.common.protocol import ChatRequest, CompletionRequest
from jackfield.entrypoints.openai.completions import routes as completions
from jackfield.examples.benchmarks.frontend.command import CASES, Case, serving

TEXTS = ["", "a", '"', "\\", "\n\t\x00\x1f\x7f", "é€🙂", "\u2028", '"content":""', "</script>"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_template_makes_the_bytes_that_encoding_makes(text: str) -> None:
    def make(text: str) -> bytes:
        return frame({"model": '"content":""', "delta": {"content": text, "again": text}, "n": 1})

    assert Template(make).frame(text) == make(text)


def job_of(engine: Any, body: bytes) -> ChatJob:
    return new_job(engine, decode(body, ChatRequest), new_id("chatcmpl"))


def pieces_of(case: Case, engine: Any, tokens: int) -> tuple[Any, Any, Any]:
    """(outputs, pieces as the server makes them, pieces that encode every frame whole)"""
    body = msgspec.json.encode(case.body(tokens))
    if case.path.endswith("/chat/completions"):
        job = job_of(engine, body)
        streams = [ChatStream(ChatCompletion(job)) for _ in range(2)]
        for item in streams:
            item._choices[0].new_call_id = lambda: "call-1"
        outputs = job.outputs()
    else:
        request = decode(body, CompletionRequest)
        job = completions.TextCompletion(engine, request, "m")
        job.token_ids = [engine.tokenizer.encode(prompt) for prompt in request.prompts()]
        streams = [completions.CompletionStream(job) for _ in range(2)]
        (outputs,) = job.streams()
    streams[1]._plain = False
    return outputs, *streams


@pytest.mark.parametrize("name", CASES)
async def test_pieces_from_templates_are_the_encoded_ones(name: str) -> None:
    async with serving(CASES[name], 1, 300) as (_, _, engine):
        outputs, fast, slow = pieces_of(CASES[name], engine, 300)
        count = 0
        async for output in outputs:
            count += 1
            # Completions count where the next token stands; both must see it alike.
            assert fast.encode(output) == b"".join(
                slow.frames(output) if name != "completions" else slow.frames(output, 0)
            )
        assert count > 250
        assert fast.final_chunk() == slow.final_chunk()


async def test_a_client_that_does_not_read_gets_fewer_larger_pieces() -> None:
    tokens, case = 1500, CASES["chat"]
    name = "m" * 6000  # Stands in each frame, so that no socket's buffer holds them all.
    async with serving(case, 1, tokens, served_model_name=(name,)) as (executor, url, engine):
        host, _, port = url.removeprefix("http://").rpartition(":")
        bare = socket.socket()
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(bare, (host, int(port)))
        body = msgspec.json.encode(case.body(tokens))
        head = f"POST {case.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(bare, head.encode() + body)
        while not engine.stats().requests_finished:
            await asyncio.sleep(0.01)
        response = b""
        while data := await loop.sock_recv(bare, 1 << 20):
            response += data
        bare.close()
    frames = [json.loads(line[6:]) for line in response.split(b"\n") if line.startswith(b"data: {")]
    assert len(frames) < tokens // 2, "what waits for a client must not grow with the stream"
    text = "".join(choice["delta"].get("content", "") for f in frames for choice in f["choices"])
    assert text == engine.tokenizer.decode(executor.script)
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    assert response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_reader_that_wakes_between_outputs_loses_nothing() -> None:
    """Many streams at once, each with its own length."""
    case = CASES["stops"]
    async with serving(case, 8, 64) as (executor, url, engine):
        async with aiohttp.ClientSession() as session:

            async def run_one(tokens: int) -> str:
                said = []
                async with session.post(url + case.path, json=case.body(tokens)) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            said += json.loads(line[6:])["choices"]
                return "".join(choice["delta"].get("content", "") for choice in said)

            texts = await asyncio.gather(*(run_one(tokens) for tokens in range(40, 48)))
        for tokens, text in zip(range(40, 48), texts, strict=True):
            assert text == engine.tokenizer.decode(executor.script[:tokens])


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error() -> None:
    case = CASES["chat"]
    async with serving(case, 1, 100) as (executor, url, _):
        submit = executor.submit

        def fail(plan: Any, *in_process: Any) -> Any:
            if plan.step < 20:
                return submit(plan, *in_process)
            future = asyncio.get_running_loop().create_future()
            future.set_exception(RuntimeError("no device"))
            return future

        executor.submit = fail
        async with aiohttp.ClientSession() as session:
            async with session.post(url + case.path, json=case.body(100)) as response:
                assert response.status == 200
                *_, error, done = (await response.text()).strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["type"] == RequestFailed.error_type
        assert "no device" in error


async def test_a_listener_that_fails_harms_no_other() -> None:
    case = CASES["chat"]
    async with serving(case, 2, 100) as (_, _, engine):
        body = msgspec.json.encode(case.body(100))
        streams = [job_of(engine, body).outputs() for _ in range(2)]
        tokens = [len((await anext(stream)).outputs[0].token_ids) for stream in streams]
        ended = asyncio.Event()
        calls = 0

        def broken() -> None:
            raise ValueError("on purpose")

        def whole() -> None:
            nonlocal calls
            calls += 1
            while output := streams[1].take_output():
                tokens[1] += len(output.outputs[0].token_ids)
                if output.finished:
                    ended.set()

        streams[0].listen(broken)
        streams[1].listen(whole)
        whole()
        await asyncio.wait_for(ended.wait(), 300)
        assert tokens[1] == 100
        assert calls > 80, "told at each step"
        assert streams[1].take_output() is None
        for stream in streams:
            await stream.aclose()


async def test_a_first_token_goes_out_before_the_next_ones_of_its_step() -> None:
    case = CASES["chat"]
    async with serving(case, 2, 100) as (_, _, engine):
        body = msgspec.json.encode(case.body(100))
        decoding, starting = (job_of(engine, body).outputs() for _ in range(2))
        await anext(decoding)
        told: list[str] = []
        steps = engine.core.steps
        publish = steps.publish

        def noted(updates: list[Any]) -> None:
            told.append(f"step of {len(updates)}")
            publish(updates)

        def next_token() -> None:
            told.append("next token")
            decoding.take_output()

        async def first_token() -> None:
            await anext(starting)
            told.append("first token")

        steps.publish = noted
        decoding.listen(next_token)
        decoding.take_output()
        await asyncio.wait_for(first_token(), 300)
        before = told[: told.index("first token")]
        assert "next token" in before, "of steps before"
        assert "step of 2" in before, "both have a token in it"
        # Of each step `decoding` is told at most once; two may be published one behind the other.
        assert before.count("next token") < len(before) - before.count("next token")
        for stream in (decoding, starting):
            await stream.aclose()


async def test_a_client_of_http_1_0_gets_the_body_as_it_is() -> None:
    """Without chunks, which came with HTTP/1.1."""
    case = CASES["chat"]
    async with serving(case, 1, 60) as (executor, url, engine):
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = msgspec.json.encode(case.body(60))
        head = f"POST {case.path} HTTP/1.0\r\nHost: {host}:{port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        response = await asyncio.wait_for(reader.read(), 300)
        writer.close()
    _, _, payload = response.partition(b"\r\n\r\n")
    *frames, done = payload.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    assert all(item.startswith("data: {") for item in frames), "nothing between the frames"
    choices = [choice for item in frames for choice in json.loads(item[6:])["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == engine.tokenizer.decode(executor.script)
