"""Recordings written down by models of chats: the prompt is the one that each family was trained
with, the text that of `transformers`, and what a model cannot do is refused."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hearing_models
import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from hearing_models import FAMILIES, RATE, sound
from serving import Server, engine_config, running

from jackfield.core.audio.files import Samples
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.openai.audio import chat_transcriber
from jackfield.entrypoints.openai.audio.chat_transcriber import (
    ChatTask,
    ChatTranscriber,
    quiet_place,
)
from jackfield.plugins.media.family import Family

TOKENS = 20


class Case(NamedTuple):
    fields: dict[str, str]
    prompt: str
    """By hand, as the family's publishers write it."""
    route: str = "transcriptions"


CASES = {
    "Voxtral": [
        Case({}, "[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"),
        Case({"language": "de"}, "[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE]"),
    ],
    "Qwen3ASR": [
        Case({}, "user: <|audio_pad|>assistant: "),
        Case(
            {"language": "fr", "prompt": "of cats"},
            "system: of catsuser: <|audio_pad|>assistant: language French<asr_text>",
        ),
    ],
    "GraniteSpeech": [
        Case(
            {"language": "es"},
            "user: <|audio|>can you transcribe the speech into a written format?assistant: ",
        ),
        Case({}, "user: <|audio|>translate the speech to Englishassistant: ", "translations"),
    ],
}


class Served(NamedTuple):
    name: str
    model: Any
    folder: Path
    server: Server
    client: openai.OpenAI


@pytest.fixture(scope="module", params=CASES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    architecture = f"{request.param}ForConditionalGeneration"
    model = hearing_models.save(architecture, folder)
    config = engine_config(folder, max_model_len=None, served_model_name=("served",))
    with pytest.MonkeyPatch.context() as patch, running(config) as server:
        patch.setattr(chat_transcriber, "MAX_TOKENS", TOKENS)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield Served(request.param, model, folder, server, client)


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def post(served: Served, samples: np.ndarray, route: str, **fields: str) -> httpx.Response:
    files: Any = {"file": ("a.wav", wav(samples))}
    files |= {name: (None, value) for name, value in fields.items()}
    return httpx.post(f"{served.server.url}/v1/audio/{route}", files=files, timeout=300)


@torch.no_grad()
def expected(served: Served, samples: np.ndarray, prompt: str) -> str:
    """→ the greedy text of `transformers` after a prompt."""
    process = FAMILIES[f"{served.name}ForConditionalGeneration"].reference(served.folder)
    inputs = process([samples], prompt, return_tensors="pt")
    ids = served.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(served.folder)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def test_texts_are_those_of_transformers(served: Served) -> None:
    texts = set()
    for case in CASES[served.name]:
        response = post(served, sound(3), case.route, **case.fields)
        assert response.status_code == 200, response.text
        made = response.json()
        assert made["text"] == expected(served, sound(3), case.prompt), case
        assert made["usage"] == {"type": "duration", "seconds": 1}
        texts.add(made["text"])
    assert len(texts) == len(CASES[served.name])
    streamed = served.client.audio.transcriptions.create(
        file=("a.wav", wav(sound(3))), model="served", stream=True, language="fr"
    )
    events = list(streamed)
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    fields = {"response_format": "text", "language": "fr"}
    whole = post(served, sound(3), "transcriptions", **fields).text
    assert getattr(events[-1], "text", "") == whole[:-1]
    assert "".join(getattr(event, "delta", "") for event in events).strip() == whole[:-1]
    assert len(events) > 3, "one event for several tokens"


def test_what_a_model_does_not_do_is_refused(served: Served) -> None:
    cases = [
        ("response_format", {"response_format": "srt"}),
        ("response_format", {"response_format": "vtt"}),
        ("response_format", {"response_format": "verbose_json"}),
        (
            "response_format",
            {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        ),
        ("language", {"language": "klingon"}),
    ]
    if served.name != "Qwen3ASR":
        cases.append(("prompt", {"prompt": "of cats"}))
    for name, fields in cases:
        response = post(served, sound(3), "transcriptions", **fields)
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"] == name
    if served.name != "GraniteSpeech":
        response = post(served, sound(3), "translations")
        assert response.status_code == 400 and "translate" in response.text


def test_a_prompt_of_gemma_3n() -> None:
    """As vLLM writes it."""
    family: Any = load_plugins()["media_model"].load("Gemma3nForConditionalGeneration")
    chat = family.speech_chat
    begin, end = "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"
    told = chat.language.replace("{}", chat.languages["de"])
    written = chat.prompt.replace("{}", told)
    assert written == f"{begin}Transcribe this audio into German: <audio_soft_token>{end}"
    assert chat.translation == f"{begin}Translate this audio into English: <audio_soft_token>{end}"


def test_instructions_are_those_of_transformers() -> None:
    """Of families whose processors have one."""
    plugins = load_plugins()
    for name in ("AudioFlamingo3", "GlmAsr"):
        kind = getattr(transformers, f"{name}Processor")
        family: type[Family] = plugins["media_model"].load(f"{name}ForConditionalGeneration")
        assert family.speech_chat is not None
        parameters = inspect.signature(kind.__init__).parameters
        if "default_transcription_prompt" not in parameters:
            pytest.skip("this version of transformers has none")
        assert family.speech_chat.instruction == parameters["default_transcription_prompt"].default
    family = plugins["media_model"].load("Qwen3ASRForConditionalGeneration")
    names: Any = importlib.import_module("transformers.models.qwen3_asr.processing_qwen3_asr")
    assert family.speech_chat is not None
    assert family.speech_chat.languages == names.LANGUAGE_CODE_TO_NAME


class Scripted(ChatTranscriber):
    """Responses that a test gives, one for each window."""

    def __init__(self, samples: np.ndarray, responses: list[list[str]], task: ChatTask) -> None:
        super().__init__(Samples(samples, RATE), None, None, task)  # type: ignore[arg-type]
        self.responses = iter(responses)
        self.windows: list[np.ndarray] = []

    async def _response(self, samples: np.ndarray) -> AsyncGenerator[str]:
        self.windows.append(samples)
        for piece in next(self.responses):
            yield piece


async def test_long_recordings_are_divided_where_they_are_quiet() -> None:
    """And what a family writes before its text is left out, spaces joined."""
    family: Any = load_plugins()["media_model"].load("Qwen3ASRForConditionalGeneration")
    chat = dataclasses.replace(family.speech_chat, max_seconds=4.0)
    samples = np.concatenate([sound(1, 3.0), np.zeros(RATE // 5), sound(2, 3.0), sound(3, 1.5)])
    samples = samples.astype(np.float32)
    responses = [
        ["langu", "age English<asr", "_text> One", " two ", ""],
        [" ", "three."],
        ["language Chinese<asr_text>", "四"],
    ]
    made = Scripted(samples, responses, ChatTask(chat))
    assert "".join([delta async for delta in made.deltas()]) == "One two three.四"
    assert np.array_equal(np.concatenate(made.windows), samples)
    assert abs(len(made.windows[0]) / RATE - 3.1) < 0.06
    assert all(len(window) <= 4 * RATE for window in made.windows)
    told = Scripted(sound(1), [["<asr_text>", "hallo"]], ChatTask(chat, language="de"))
    assert "".join([delta async for delta in told.deltas()]) == "<asr_text>hallo"
    assert quiet_place(np.zeros(3, dtype=np.float32), RATE) == 3
