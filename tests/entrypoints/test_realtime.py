"""Speech over a WebSocket: the text is that of the route for files, errors are events, and what a
client may make the server hold is bounded."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import soundfile
from serving import Server, engine_config, running, save_random
from test_speech import RATE, config, save_whisper

from jackfield.entrypoints.openai.audio import realtime, transcriber

WORDS = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("whisper")
    save_whisper(folder)
    with running(config(folder)) as server:
        yield server


def pcm(seconds: float, tone: int = 300) -> bytes:
    times = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * (tone + 200 * times) * times) * 32767).astype("<i2").tobytes()


class Client:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **fields}))

    async def append(self, data: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def next(self) -> dict[str, Any]:
        message = await self.socket.receive(timeout=60)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        event: dict[str, Any] = json.loads(message.data)
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            assert events[-1]["type"] != "error", events[-1]
            events.append(await self.next())
        return events

    async def set_up(self, **words: Any) -> dict[str, Any]:
        form = {"type": "audio/pcm", "rate": RATE}
        read = {"format": form, "transcription": words, "turn_detection": None}
        given = {"type": "transcription", "audio": {"input": read}}
        await self.send("session.update", session=given)
        event = await self.next()
        assert event["type"] == "session.updated", event
        session: dict[str, Any] = event["session"]
        return session


@asynccontextmanager
async def connected(
    server: Server, path: str = "/v1/realtime", **options: Any
) -> AsyncIterator[Client]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(server.url + path, **options) as socket,
    ):
        client = Client(socket)
        assert (await client.next())["type"] == "session.created"
        yield client


def of_a_file(server: Server, data: bytes, **fields: str) -> str:
    file = io.BytesIO()
    samples = np.frombuffer(data, dtype="<i2")
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    files = {"file": ("a.wav", file.getvalue()), **{k: (None, v) for k, v in fields.items()}}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files=files, timeout=60)
    text: str = answer.json()["text"]
    return text


async def test_each_commit_is_written_down(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the route for files does, in order, and while the next one is sent."""
    # Whatever it says, once: others are sampled.
    monkeypatch.setattr(transcriber, "MAX_COMPRESSION", np.inf)
    monkeypatch.setattr(transcriber, "MIN_LOGPROB", -np.inf)
    first, second = pcm(0.9), pcm(1.7, 700)
    async with connected(server) as client:
        session = await client.set_up(language="de", prompt="w3 w4")
        assert session["audio"]["input"]["transcription"]["language"] == "de"
        for piece in (first[:1000], first[1000:1001], first[1001:]):  # Also half a sample.
            await client.append(piece)
        await client.send("input_audio_buffer.commit")
        await client.append(second)
        await client.send("input_audio_buffer.commit", final=True)
        events = await client.until(f"{WORDS}.completed")
        events += await client.until(f"{WORDS}.completed")
        assert (await client.socket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE
    committed = [event for event in events if event["type"] == "input_audio_buffer.committed"]
    assert [event["previous_item_id"] for event in committed] == [None, committed[0]["item_id"]]
    for event, data in zip(committed, (first, second), strict=True):
        own = [each for each in events if each.get("item_id") == event["item_id"]]
        assert own[-1]["type"] == f"{WORDS}.completed"
        expected = of_a_file(server, data, language="de", prompt="w3 w4")
        assert own[-1]["transcript"] == expected
        assert "".join(each.get("delta", "") for each in own).strip() == expected
        assert own[-1]["usage"] == {"type": "duration", "seconds": 1 + (data is second)}


async def test_clients_of_vllm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name a model, say that an utterance begins, and read its text after the final commit."""
    monkeypatch.setattr(transcriber, "MAX_COMPRESSION", np.inf)
    monkeypatch.setattr(transcriber, "MIN_LOGPROB", -np.inf)
    utterances = pcm(0.9), b"", pcm(1.7, 700)
    async with connected(server) as client:
        await client.send("session.update", model="served")
        for data in utterances:
            await client.send("input_audio_buffer.commit")
            if data:
                await client.append(data)
            await client.send("input_audio_buffer.commit", final=True)
            events = await client.until("transcription.done")
            assert {event["type"] for event in events[:-1]} <= {"transcription.delta"}
            expected = of_a_file(server, data) if data else ""
            assert events[-1]["text"] == expected
            assert "".join(event["delta"] for event in events[:-1]).strip() == expected
        await client.send("session.update", model="other")
        error = await client.next()
        assert error["type"] == "error" and "other" in error["error"], "a text"


async def test_what_is_wrong_is_an_event_and_the_session_goes_on(server: Server) -> None:
    async with connected(server, "/v1/realtime?model=served&intent=transcription") as client:
        for event, param in (
            ({"type": "conversation.item.create"}, "type"), ({}, "type"), ([], "type"),
            ({"type": "session.update", "session": 3}, "session"),
            ({"type": "session.update", "model": "other"}, "model"),
            ({"type": "session.update", "session": {"turn_detection": {}}}, "turn_detection"),
            ({"type": "session.update", "session": {"input_audio_format": "g711_ulaw"}}, "format"),
            (
                {"type": "session.update", "session": {"audio": {"input": {
                    "format": {"type": "audio/pcm", "rate": 1}}}}},
                "rate",
            ),
            (
                {"type": "session.update", "session": {
                    "input_audio_transcription": {"language": "xx"}}},
                "language",
            ),
            ({"type": "session.update", "model": "\ud800"}, "model"),
            ({"type": "session.update", "model": ["served"]}, "model"),
            (
                {"type": "session.update", "session": {
                    "input_audio_transcription": {"language": []}}},
                "language",
            ),
            (
                {"type": "session.update", "session": {
                    "input_audio_transcription": {"prompt": "half a \ud83d"}}},
                "prompt",
            ),
            ({"type": "input_audio_buffer.append", "audio": "\ud800"}, "audio"),
            ({"type": "input_audio_buffer.append", "audio": "!"}, "audio"),
            ({"type": "input_audio_buffer.append"}, "audio"),
            ({"type": "input_audio_buffer.commit"}, "input_audio_buffer"),
        ):  # fmt: skip
            if isinstance(event, dict):
                event = {**event, "event_id": "mine"}
            await client.socket.send_str(json.dumps(event))
            error = await client.next()
            assert error["type"] == "error" and error["error"]["param"] == param, (event, error)
            if isinstance(event, dict):
                assert error["error"]["event_id"] == "mine"
        await client.socket.send_str("{")
        assert (await client.next())["type"] == "error"
        await client.socket.send_bytes(b"abc")
        assert (await client.next())["type"] == "error"
        await client.append(b"\0\0")
        await client.send("input_audio_buffer.clear")
        assert (await client.next())["type"] == "input_audio_buffer.cleared"
        await client.send("transcription_session.update", session={})
        assert (await client.next())["type"] == "transcription_session.updated"


async def test_what_a_session_holds_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "MAX_SECONDS", 1)
    async with connected(server) as client:
        await client.set_up(language="de")
        await client.append(pcm(0.9))
        await client.append(pcm(0.9))
        error = await client.next()
        assert error["type"] == "error" and "more than 1 seconds" in error["error"]["message"]
        await client.send("input_audio_buffer.commit")
        await client.until(f"{WORDS}.completed")
        await client.append(pcm(0.9))
        await client.send("input_audio_buffer.commit")
        await client.until(f"{WORDS}.completed")
    monkeypatch.setattr(realtime, "MAX_SESSIONS", 1)
    async with connected(server):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connected(server):
                pass
        assert refused.value.status == 503


async def test_a_client_that_goes_away_leaves_nothing(server: Server) -> None:
    before = num_finished(server)
    for _ in range(3):
        async with connected(server) as client:
            await client.set_up(language="de")
            await client.append(pcm(50))
            await client.send("input_audio_buffer.commit")
            await client.until(f"{WORDS}.delta")  # Some forty windows are left.
            await client.socket.close()

    async with connected(server) as client:  # The engine serves the next.
        await client.set_up(language="de")
        await client.append(pcm(0.5))
        await client.send("input_audio_buffer.commit")
        await client.until(f"{WORDS}.completed")
    # Of three times fifty windows, each of several requests, few were begun.
    assert num_finished(server) - before < 60
    assert server.becomes(lambda engine: not engine.stats().num_requests_running)


def num_finished(server: Server) -> int:
    return sum(server.engine.stats().requests_finished.values())


async def test_who_may_not_connect(server: Server, tmp_path: Any) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with connected(server, headers={"Origin": "https://example.com"}):
            pass
    assert refused.value.status == 403
    async with connected(server, headers={"Origin": server.url}):
        pass
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with connected(server, "/v1/realtime?model=other"):
            pass
    assert refused.value.status == 404
    plain = await asyncio.to_thread(httpx.get, f"{server.url}/v1/realtime")
    assert plain.status_code == 400 and "WebSocket" in plain.text


def test_text_models_have_no_sessions(tmp_path: Any) -> None:
    with running(engine_config(save_random(tmp_path))) as server:
        answer = httpx.get(f"{server.url}/v1/realtime")
        assert answer.status_code == 404 and "Whisper" in answer.text
