"""Speech over HTTP, through the real `openai` client, on a tiny random Whisper."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import tokenizers
import torch
import transformers
from serving import Server, engine_config, running, save_random
from tokenizers import decoders, models, pre_tokenizers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from jackfield import EngineConfig
from jackfield.entrypoints.http.options import ServerOptions

from helpers import edit_json

RATE, NUM_WORDS = 16_000, 80
LANGUAGES = ("en", "de", "fr")
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES),
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
)  # fmt: skip
TIMES = tuple(f"<|{number * 0.02:.2f}|>" for number in range(51))
ALIGNMENT = [[0, 1], [1, 0], [1, 3]]
TOKEN = {token: NUM_WORDS + number for number, token in enumerate((*SPECIAL, *TIMES))}


def save_whisper(folder: Path) -> Any:
    """Save a model of windows of one second, sure of its words; return that of `transformers`."""
    vocab = {f"▁w{number}": number for number in range(NUM_WORDS)} | TOKEN
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="▁w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.add_tokens([*TIMES])
    settings = transformers.WhisperConfig(
        vocab_size=len(vocab), d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=40, max_source_positions=50, max_target_positions=60, num_mel_bins=80,
        init_std=0.4, pad_token_id=80, bos_token_id=80, eos_token_id=80,
        decoder_start_token_id=TOKEN["<|startoftranscript|>"], suppress_tokens=[],
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.WhisperForConditionalGeneration(settings).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
    edit_json(
        folder / "generation_config.json",
        lang_to_id={f"<|{name}|>": TOKEN[f"<|{name}|>"] for name in LANGUAGES},
        task_to_id={name: TOKEN[f"<|{name}|>"] for name in ("translate", "transcribe")},
        no_timestamps_token_id=TOKEN["<|notimestamps|>"], is_multilingual=True,
        suppress_tokens=[TOKEN["<|startoflm|>"], TOKEN["<|startofprev|>"]],
        alignment_heads=ALIGNMENT,
    )  # fmt: skip
    return model


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """→ model of `transformers`, its folder"""
    folder = tmp_path_factory.mktemp("whisper")
    return save_whisper(folder), folder


def config(folder: Path) -> EngineConfig:
    return engine_config(folder, max_model_len=None, served_model_name=("served",))


@pytest.fixture(scope="module")
def server(whisper: Any) -> Iterator[Server]:
    with running(config(whisper[1])) as server:
        yield server


def recording(seconds: float, rate: int = RATE, form: str = "WAV", channels: int = 1) -> bytes:
    time = np.arange(int(seconds * rate)) / rate
    sound = 0.4 * np.sin(2 * np.pi * (300 + 200 * time) * time)
    sound = np.repeat(sound[:, None], channels, axis=1)
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=form)
    return file.getvalue()


def post(server: Server, data: bytes | None, task: str = "transcriptions", **fields: Any) -> Any:
    files = {} if data is None else {"file": ("a.wav", data)}
    files |= {name: (None, value) for name, value in fields.items()}
    return httpx.post(f"{server.url}/v1/audio/{task}", files=files, timeout=300)


@torch.no_grad()
def written(model: Any, data: bytes, prompt: list[int], most: int) -> list[int]:
    """→ greedy tokens of the reference after a prompt, with times where it does not bar them."""
    config = transformers.GenerationConfig(
        eos_token_id=80, no_timestamps_token_id=TOKEN["<|notimestamps|>"]
    )
    rules = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=80)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    heard = model.get_encoder()(features)
    tokens: list[int] = []
    barred = [TOKEN["<|startoflm|>"], TOKEN["<|startofprev|>"]]
    while len(tokens) < most and tokens[-1:] != [80]:
        ids = torch.tensor([prompt + tokens])
        logits = model(encoder_outputs=heard, decoder_input_ids=ids).logits[0, -1]
        logits[barred if tokens else [*barred, 80]] = -torch.inf
        if prompt[-1] != TOKEN["<|notimestamps|>"]:
            [logits] = rules(ids, logits[None])
        tokens.append(int(logits.argmax()))
    return tokens


def test_the_words_are_those_of_the_model(whisper: Any, client: openai.OpenAI) -> None:
    """The language is detected, or told; and the text before is read."""
    model, _ = whisper
    data = recording(0.9)
    start, end = TOKEN["<|startoftranscript|>"], TOKEN["<|notimestamps|>"]
    by_language = {}
    for language in LANGUAGES:
        for task in ("transcribe", "translate"):
            begin = [start, TOKEN[f"<|{language}|>"], TOKEN[f"<|{task}|>"], end]
            for before in ([], [TOKEN["<|startofprev|>"], 3, 4]):
                tokens = written(model, data, before + begin, 30)
                words = "".join(f" w{token}" for token in tokens if token < NUM_WORDS)
                by_language[language, task, bool(before)] = words.strip()
    assert len(set(by_language.values())) > 6
    for language in LANGUAGES:
        for before, prompt in ((False, {}), (True, {"prompt": " w3 w4"})):
            made = client.audio.transcriptions.create(
                file=("a.wav", data), model="served", language=language, temperature=1e-9, **prompt
            )
            assert made.text == by_language[language, "transcribe", before]
            assert made.usage.type == "duration" and made.usage.seconds == 1
    [first] = written_language(model, data)
    made = client.audio.transcriptions.create(
        file=("a.wav", data), model="served", temperature=1e-9
    )
    assert made.text == by_language[first, "transcribe", False]
    made = client.audio.translations.create(file=("a.wav", data), model="served", temperature=1e-9)
    assert made.text == by_language[first, "translate", False]


@torch.no_grad()
def written_language(model: Any, data: bytes) -> list[str]:
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=80)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    ids = torch.tensor([[TOKEN["<|startoftranscript|>"]]])
    logits = model(input_features=features, decoder_input_ids=ids).logits[0, -1]
    return [max(LANGUAGES, key=lambda name: float(logits[TOKEN[f"<|{name}|>"]]))]


@torch.no_grad()
def times_of(model: Any, data: bytes, prompt: list[int], tokens: list[int]) -> list[float]:
    """→ when each token begins, by `transformers`"""
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=80)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    ids = torch.tensor([prompt + tokens])
    model.set_attn_implementation("eager")
    out = model(input_features=features, decoder_input_ids=ids, output_attentions=True)
    generated = {"cross_attentions": [out.cross_attentions], "sequences": ids}

    class Generated(dict[str, Any]):
        __getattr__ = dict.__getitem__

    times = model._extract_token_timestamps(
        Generated(generated), ALIGNMENT, num_frames=len(samples) // 160, num_input_ids=len(prompt)
    )
    return [float(time) for time in times[0, len(prompt) :]]


def test_words_have_the_times_of_transformers(
    whisper: Any, server: Server, client: openai.OpenAI
) -> None:
    """Of the first window, whose tokens are known."""
    model, _ = whisper
    data = recording(0.9)
    num_words = 0
    for number in range(6):
        before = f" w{number} w{number + 7}"
        prompt = [
            TOKEN["<|startofprev|>"], number, number + 7,
            *(TOKEN[f"<|{name}|>"] for name in ("startoftranscript", "de", "transcribe")),
        ]  # fmt: skip
        tokens = [token for token in written(model, data, prompt, 30) if token != 80]
        made = client.audio.transcriptions.create(
            file=("a.wav", data), model="served", language="de", temperature=1e-9, prompt=before,
            response_format="verbose_json", timestamp_granularities=["word", "segment"],
        )  # fmt: skip
        assert made.segments is not None
        first = sum(len(segment.tokens) for segment in made.segments if segment.seek == 0)
        if not first:
            continue
        starts = times_of(model, data, prompt, tokens)
        expected = [
            (f"w{token}", starts[at], starts[at + 1])
            for at, token in enumerate(tokens)
            if token < NUM_WORDS
        ][:first]
        assert made.words is not None
        found = [(word.word, word.start, word.end) for word in made.words[:first]]
        assert [word for word, *_ in found] == [word for word, *_ in expected]
        spans = [[start, end] for _, start, end in found]
        assert np.allclose(spans, [[start, end] for _, start, end in expected], atol=1e-3)
        num_words += first
    assert num_words > 12


def test_words_of_several_windows_go_on(client: openai.OpenAI) -> None:
    made = client.audio.transcriptions.create(
        file=("a.wav", recording(3.4)), model="served", language="de", temperature=0.4,
        response_format="verbose_json", timestamp_granularities=["word"], extra_body={"seed": 7},
    )  # fmt: skip
    assert made.words is not None and made.segments is not None
    assert "".join(f" {word.word}" for word in made.words).strip() == made.text
    assert all(0 <= word.start <= word.end <= 3.41 for word in made.words)
    assert made.words[-1].start > 1


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (1, 9), (5, 5), (7, 40), (12, 3)])
def test_the_cheapest_path_is_that_of_transformers(tokens: int, rows: int) -> None:
    from transformers.models.whisper.generation_whisper import (
        _dynamic_time_warping,
        _median_filter,
    )

    from jackfield.entrypoints.openai.audio import word_times

    random = np.random.default_rng(tokens)
    for _ in range(20):
        cost = random.integers(-4, 5, (tokens, rows)).astype(np.float64)  # With equal ones.
        text, time = _dynamic_time_warping(cost)
        jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
        assert word_times._first_rows(cost).tolist() == time[jumps].tolist()
    values = random.normal(size=(2, tokens, rows)).astype(np.float32)
    smooth = word_times._median_filter(values, 7)
    assert np.allclose(smooth, _median_filter(torch.from_numpy(values), 7).numpy())


def test_punctuation_belongs_to_words() -> None:
    from jackfield.entrypoints.openai.audio.word_times import words_of

    pieces = [" Say", " (", "hel", "lo", "),", " it", "'s", " me", "!"]

    def decode(token_ids: Any) -> str:
        return "".join(pieces[token] for token in token_ids)

    times = [(float(number), number + 1.0) for number in range(len(pieces))]
    made = words_of(range(len(pieces)), times, decode, "en")
    assert [(word.word, word.start, word.end) for word in made] == [
        ("Say", 0, 1), ("(hello),", 1, 5), ("it's", 5, 7), ("me!", 7, 9),
    ]  # fmt: skip
    made = words_of(range(len(pieces)), times, decode, "ja")
    assert len(made) > 5


def test_every_form_says_the_same(server: Server, client: openai.OpenAI) -> None:
    """Of a recording of several windows."""
    data = recording(3.4)
    options: dict[str, Any] = {"temperature": "0.4", "seed": "7", "language": "de"}
    verbose = post(server, data, response_format="verbose_json", **options).json()
    segments = verbose["segments"]
    assert len(segments) > 1 and verbose["duration"] == pytest.approx(3.4, abs=0.01)
    assert (verbose["task"], verbose["language"]) == ("transcribe", "de")
    assert verbose["text"] == "".join(segment["text"] for segment in segments).strip()
    for number, segment in enumerate(segments):
        assert segment["id"] == number and 0 <= segment["start"] <= segment["end"] <= 3.41
        assert segment["temperature"] == 0.4 and 0 <= segment["no_speech_prob"] <= 1
    srt = post(server, data, response_format="srt", **options)
    vtt = post(server, data, response_format="vtt", **options)
    for form, mark in ((srt, ","), (vtt, ".")):
        assert form.status_code == 200
        assert form.text.count(" --> ") == len(segments)
        for segment in segments:
            clock = f"00:00:{segment['start']:06.3f}".replace(".", mark)
            assert f"{clock} --> " in form.text and segment["text"].strip() in form.text
    assert vtt.text.startswith("WEBVTT\n\n") and vtt.headers["Content-Type"].startswith("text/vtt")
    assert srt.text.startswith("1\n")


def test_a_stream_has_openais_events(server: Server, client: openai.OpenAI) -> None:
    data = recording(2.5)
    options: Any = {"temperature": 0.4, "extra_body": {"seed": 7}, "language": "fr"}
    whole = client.audio.transcriptions.create(file=("a.wav", data), model="served", **options)
    events = list(
        client.audio.transcriptions.create(
            file=("a.wav", data), model="served", stream=True, **options
        )
    )
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert "".join(event.delta for event in events[:-1]).strip() == whole.text
    assert len(events) > 2


@pytest.mark.parametrize(("form", "rate", "channels"), [("FLAC", 44_100, 2), ("OGG", 48_000, 1)])
def test_other_files_are_read(form: str, rate: int, channels: int, server: Server) -> None:
    response = post(server, recording(0.5, rate, form, channels), language="en")
    assert response.status_code == 200, response.text
    assert response.json()["usage"] == {"type": "duration", "seconds": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "word", "response_format": "srt"},
            "timestamp_granularities",
        ),
        ({"timestamp_granularities[]": "day"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"stream": "maybe"}, "stream"),
        ({"seed": "1.5"}, "seed"),
        ({"top_p": "0"}, "top_p"),
        ({"prompt": "w" * 20_000}, "prompt"),
        ({"seed": "1", "seed[]": "2"}, "seed"),
        ({"hot_words": "a"}, "hot_words"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, str], param: str, server: Server) -> None:
    response = post(server, recording(0.2), **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].partition("[")[0] == param


def test_a_form_of_all_fields_is_read(server: Server) -> None:
    schema = httpx.get(f"{server.url}/openapi.json").json()
    route = schema["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    properties = route["multipart/form-data"]["schema"]["properties"]
    defaults = {name: json.dumps(each.get("default", "")) for name, each in properties.items()}
    fields = {name: text.strip('"') for name, text in defaults.items()} | {
        "model": "served", "language": "en", "seed": "7", "response_format": "verbose_json",
    }  # fmt: skip
    for name in ("file", "include", "timestamp_granularities"):
        del fields[name]
    times = {"timestamp_granularities": "word", "timestamp_granularities[]": "segment"}
    response = post(server, recording(0.2), **fields, **times)
    assert response.status_code == 200, response.text
    assert response.json()["words"] == []  # Asked for, though nobody speaks.


def test_a_wrong_file_or_model_is_named(server: Server) -> None:
    for data in (None, b"", b"hello", recording(0.2)[:60] + b"\xff" * 9):
        response = post(server, data, language="en")
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "file"
    assert post(server, recording(0.2), model="other").status_code == 404
    response = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"file": "a"})
    assert response.status_code == 400 and "multipart" in response.text
    assert post(server, recording(0.2)).status_code == 200


def test_a_large_file_is_refused(whisper: Any) -> None:
    with running(config(whisper[1]), ServerOptions(max_audio_bytes=9000)) as server:
        response = post(server, recording(0.5))
        assert response.status_code == 413 and "--max-audio-bytes" in response.text
        assert post(server, recording(0.2)).status_code == 200


def test_text_models_say_that_they_write_nothing_down(scripted_server: Server) -> None:
    response = post(scripted_server, recording(0.2))
    assert response.status_code == 404 and "Whisper" in response.text


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(engine_config(save_random(tmp_path_factory.mktemp("text")))) as server:
        yield server
