"""Whisper says what `transformers` says, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rank_executor import Plugin

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.audio.source import make_source
from jackfield.core.errors import InvalidRequest
from jackfield.core.parts.encoder_decoder import FeatureShape
from jackfield.core.registry import load_plugins
from jackfield.plugins.models.whisper import LogMel

from helpers import at_once, edit_json

ROWS, RATE = 50, 16_000
SETTINGS: dict[str, Any] = {
    "vocab_size": 151, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "max_source_positions": ROWS, "max_target_positions": 40,
    "num_mel_bins": 80, "init_std": 0.3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 100, "suppress_tokens": [], "begin_suppress_tokens": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "WhisperForConditionalGeneration": {},
    "WhisperForConditionalGeneration:large": {"num_mel_bins": 128, "scale_embedding": True},
}
OUTPUT = 7


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """→ model of `transformers`, its folder"""
    folder = tmp_path_factory.mktemp("whisper")
    return make("WhisperForConditionalGeneration", folder), folder


def make(case: str, folder: Path) -> Any:
    """Save a random checkpoint, and return the model of `transformers`."""
    torch.manual_seed(11)
    model_class = transformers.WhisperForConditionalGeneration
    model = model_class(transformers.WhisperConfig(**{**SETTINGS, **CASES[case]})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    edit_json(folder / "generation_config.json", suppress_tokens=[3, 5, 8])
    return model


def tone(seed: int, seconds: float, rate: int = RATE) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(440 * (1 + seed) * time * 2 * np.pi)).astype(np.float32)


def recording(seed: int, seconds: float) -> np.ndarray:
    sound = tone(seed, seconds)
    return sound + 0.05 * np.random.RandomState(seed).randn(len(sound)).astype(np.float32)


def config(folder: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 3,
        "max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks_override": 120, **options,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings)


async def answer(engine: AsyncEngine, prompt: Any, **params: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 1}
    *_, last = [
        output async for output in engine.generate(prompt, SamplingParams(**{**options, **params}))
    ]
    return last


def features(samples: np.ndarray, bands: int) -> torch.Tensor:
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=bands)
    made: torch.Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    return made


@torch.no_grad()
def check(model: Any, samples: np.ndarray, output: Any) -> None:
    """Each greedy token is the most likely one of the reference that is not barred."""
    begin = output.prompt_token_ids
    for completion in output.outputs:
        ids = torch.tensor([begin + completion.token_ids])
        heard = features(samples, model.config.num_mel_bins)
        logits = model(input_features=heard, decoder_input_ids=ids).logits[0]
        rows = torch.log_softmax(logits.float(), -1)[len(begin) - 1 : -1]
        assert len(completion.token_ids) == OUTPUT
        for row, token, told in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            best = row.clone()
            best[[3, 5, 8]] = -torch.inf
            assert token not in (3, 5, 8) and float(best.max() - row[token]) <= 1e-3


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    """Four recordings for three slots, of several lengths; both forms of prompts; a recording that
    was heard before; text from before it."""
    model = make(case, tmp_path)
    recordings = [recording(seed, 0.2 + 0.25 * seed) for seed in range(4)]
    prompts: list[Any] = [
        {"prompt_token_ids": [100, 101], "multi_modal_data": {"audio": (recordings[0], RATE)}},
        {"prompt_token_ids": [9, 8, 7, 100, 101], "multi_modal_data": {"audio": recordings[1]}},
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (recordings[2], RATE)}},
            "decoder_prompt": {"prompt_token_ids": [101, 102]},
        },
        {"multi_modal_data": {"audio": [(recordings[3], RATE)]}},
    ]
    begins = [[100, 101], [9, 8, 7, 100, 101], [100, 101, 102], [100]]
    async with AsyncEngine(config(tmp_path)) as engine:
        outputs = await at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        again = await answer(engine, prompts[1], n=2)
        engine.core.check_idle()
    assert [output.prompt_token_ids for output in outputs] == begins
    for samples, output in zip(recordings, outputs, strict=True):
        check(model, samples, output)
    assert again.num_cached_tokens == 4
    check(model, recordings[1], again)


async def test_two_ranks_hear_what_one_does(whisper: Any) -> None:
    model, folder = whisper
    options = {"executor": "rank_threads", "tensor_parallel_size": 2}
    samples = recording(1, 0.7)
    async with AsyncEngine(
        config(folder, **options), plugins=load_plugins(extra=[Plugin()])
    ) as engine:
        output = await answer(engine, {"multi_modal_data": {"audio": samples}})
    check(model, samples, output)


async def test_other_rates_are_resampled(whisper: Any) -> None:
    """A tone at 48,000 samples per second is the tone that it is at 16,000."""
    audio = LogMel(FeatureShape(80, 100, 50), None)
    heard = []
    for rate in (16_000, 48_000):
        source = make_source(audio, {"audio": (tone(1, 1.0, rate), rate)})
        assert source.features is not None
        heard.append(np.frombuffer(source.features.data, np.float32).reshape(80, -1))
    low, high = (each[:40, 10:90].mean(axis=1) for each in heard)
    assert low.argmax() == high.argmax()
    np.testing.assert_allclose(low, high, atol=0.1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "this model reads audio"),
        ({}, "this model reads audio"),
        ({"image": 1}, "this model reads audio"),
        ({"audio": "a.wav"}, "one-dimensional array"),
        ({"audio": np.zeros((3, 2), dtype=np.float32)}, "one-dimensional array"),
        ({"audio": np.zeros(0, dtype=np.float32)}, "one-dimensional array"),
        ({"audio": np.zeros(9, dtype=np.int16)}, "one-dimensional array"),
        ({"audio": np.array([0.0, np.nan])}, "finite"),
        ({"audio": (np.zeros(9), 0)}, "sampling rate"),
        ({"audio": (np.zeros(9), "fast")}, "sampling rate"),
        ({"audio": (np.zeros(9), 10)}, "samples per second"),
        ({"audio": np.zeros(RATE + 1)}, "at once"),
    ],
)
def test_what_is_no_recording_is_refused(data: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        make_source(LogMel(FeatureShape(80, 100, 50), None), data)
    assert caught.value.param == "multi_modal_data"


async def test_a_prompt_without_a_recording_costs_its_request(whisper: Any) -> None:
    _, folder = whisper
    async with AsyncEngine(config(folder)) as engine:
        for prompt in ([100], "text", {"prompt_token_ids": [100]}, {"encoder_prompt": [100]}):
            with pytest.raises(InvalidRequest):
                await answer(engine, prompt)
        await answer(engine, {"multi_modal_data": {"audio": recording(1, 0.1)}})


def test_spectra_are_those_of_transformers() -> None:
    """At sizes of published checkpoints, to rounding."""
    for bands in (80, 128):
        samples = recording(2, 7.3)
        extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
        want = extractor(samples, sampling_rate=RATE).input_features[0]
        got = LogMel(FeatureShape(bands, 3000, 1500), None).features(samples)
        assert got.shape == want.shape == (bands, 3000)
        np.testing.assert_allclose(got, want, atol=1e-4)
