"""Recordings in prompts over every route: the same prompt, the same counts, and errors that name
the part."""

from __future__ import annotations

import base64
import io
import re
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hearing_models import RATE, save, sound
from serving import Server, running

from jackfield import AsyncEngine, EngineConfig

LIMIT = 3
ASKED = "What is said?"
SAID = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hearing")
    save("Qwen2AudioForConditionalGeneration", folder)
    with running(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=200,
            max_num_seqs=4, served_model_name=("hearing",), limit_mm_per_prompt={"audio": LIMIT},
        )
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


SOUND = encoded(wav(sound(1)))


def given(data: str = SOUND) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def by_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def chat(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"messages": messages, **SAID, **fields})


def text_part() -> dict[str, Any]:
    return {"type": "text", "text": ASKED}


def test_every_route_computes_the_same_prompt(client: httpx.Client) -> None:
    answer = chat(client, [given(), text_part()]).json()
    text, count = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 20  # 80 frames by 2 by 2
    assert count > 20 + len(ASKED)
    again = chat(client, [by_url(f"data:audio/x-wav;base64,{SOUND}"), text_part()]).json()
    assert again["choices"][0]["message"]["content"] == text
    messages = [{"role": "user", "content": [given(), text_part()]}]
    counted = client.post("/tokenize", json={"messages": messages}).json()
    assert counted["count"] == count and counted["tokens"].count(300) == 20

    parts = [given(), {"type": "input_text", "text": ASKED}]
    response = client.post("/v1/responses", json={
        "input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6,
    }).json()  # fmt: skip
    assert response["usage"]["input_tokens"] == count
    assert response["usage"]["input_tokens_details"]["audio_tokens"] == 20
    assert response["output"][-1]["content"][0]["text"] == text
    after = client.post("/v1/responses", json={
        "input": "And now?", "previous_response_id": response["id"], "temperature": 0,
        "max_output_tokens": 6,
    }).json()  # fmt: skip
    assert after["usage"]["input_tokens_details"]["audio_tokens"] == 20


def test_the_last_chunk_of_a_stream_counts_a_recording(client: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = chat(client, [given(), text_part()], **options)
    assert '"audio_tokens":20' in answer.text.replace(" ", "")


def test_another_recording_is_another_prompt_and_another_rate_is_not(client: httpx.Client) -> None:
    def said(data: bytes) -> str:
        answer = chat(client, [given(encoded(data)), text_part()]).json()
        return str(answer["choices"][0]["message"]["content"])

    first = said(wav(sound(1)))
    assert said(wav(sound(2))) != first
    longer = np.repeat(sound(1), 2)  # Of twice the rate.
    answer = chat(client, [given(encoded(wav(longer, 2 * RATE))), text_part()]).json()
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 20


WRONG = {
    "!!!": ("is not base64", given),
    "AAAA": ("cannot be read", given),
    encoded(wav(sound(1, 2.0))): ("more than 1 s", given),
    encoded(wav(sound(1, 0.0))): ("no samples", given),
    "": ("is missing", given),
    "data:audio/wav,abc": ("must be data:audio/", by_url),
    "https://example.com/a.wav": ("--allowed-media-domains", by_url),
    "file:///etc/passwd": ("--allowed-local-media-path", by_url),
}


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_a_broken_recording_costs_its_request_with_the_name_of_its_part(
    value: str, client: httpx.Client
) -> None:
    reason, part = WRONG[value]
    answer = chat(client, [text_part(), part(value)])
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    last = "input_audio.data" if part is given else "audio_url.url"
    assert error["param"] == f"messages[0].content[1].{last}"
    assert re.search(reason, error["message"]), error["message"]
    assert chat(client, "Still there?").status_code == 200


def test_errors_of_responses_name_their_own_fields(client: httpx.Client) -> None:
    for part, field in (
        (given("AAAA"), "input[0].content[0].input_audio.data"),
        ({"type": "input_audio", "input_audio": 3}, "input[0].content[0].input_audio"),
        ({"type": "input_audio", "input_audio": {}}, "input[0].content[0].input_audio.data"),
    ):
        body = {"input": [{"role": "user", "content": [part]}]}
        answer = client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


def test_what_is_not_taken_is_refused_by_name(client: httpx.Client) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = chat(client, [picture])
    assert answer.status_code == 400
    assert "takes text and audio" in answer.json()["error"]["message"]
    answer = chat(client, [given()] * (LIMIT + 1))
    assert answer.status_code == 400 and "limit_mm_per_prompt" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == f"messages[0].content[{LIMIT}].input_audio.data"


async def test_options_of_recordings_and_samples_that_are_none(tmp_path: Any) -> None:
    from jackfield.core.errors import ConfigError, InvalidRequest

    save("Qwen2AudioForConditionalGeneration", tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=50
    )
    async with AsyncEngine(config) as engine:
        for value, reason in (
            ("cat.wav", "must be a URL"), (np.zeros((2, 3), np.float32), "one channel"),
            ((np.full(99, np.nan), RATE), "finite"), ((sound(1), 0), "sampling rate"),
            ((np.zeros(99_999_999, np.float32), RATE), "more than 1 s"),
            (np.zeros(3, np.float32), "too short"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest, match=reason) as raised:
                prompt: Any = {"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": value}}
                await anext(engine.generate(prompt))
            assert raised.value.param == "multi_modal_data.audio"
    with pytest.raises(ConfigError, match="mm_processor_kwargs"):
        async with AsyncEngine(
            EngineConfig(
                model=str(tmp_path),
                device="cpu",
                dtype="float32",
                num_gpu_blocks_override=50,
                mm_processor_kwargs={"max_pixels": 3},
            )
        ):
            pass
