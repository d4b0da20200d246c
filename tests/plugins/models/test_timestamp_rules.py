"""Times of Whisper's decoder: the rules are those of `transformers`, and so are the tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rank_executor import Plugin
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols.logits_processors import LogitsProcessorSetup, ProcessedRows
from jackfield.core.registry import load_plugins
from jackfield.core.step import SlotStart
from jackfield.plugins.conformance.logits_processors import LogitsProcessorKit
from jackfield.plugins.models.timestamp_rules import TIMESTAMP_RULES, TimestampRules

from helpers import edit_json

RATE, VOCAB, OUTPUT = 16_000, 151, 24
END, START, NO_TIMESTAMPS = 2, 100, 108
PROMPT = [START, 102, 104]
GENERATION: dict[str, Any] = {
    "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START,
    "lang_to_id": {"<|en|>": 101, "<|de|>": 102},
    "task_to_id": {"translate": 103, "transcribe": 104}, "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMESTAMPS, "max_initial_timestamp_index": 20,
    "suppress_tokens": [*range(3), *range(100, 108)], "begin_suppress_tokens": None,
}  # fmt: skip


class TestKit(LogitsProcessorKit):
    processor_class = TimestampRules
    refused = tuple(
        {TIMESTAMP_RULES: rules}
        for rules in (
            None, True, [], {}, {"end": 3}, {"end": 3, "no_timestamps": -1},
            {"end": 3, "no_timestamps": None}, {"end": 3.0, "no_timestamps": 5},
            {"end": True, "no_timestamps": 5}, {"end": 3, "no_timestamps": 5, "begin": 1},
            {"end": 3, "no_timestamps": 5, "max_initial": "1"},
        )
    )  # fmt: skip


@pytest.mark.parametrize("max_initial", [None, 7])
def test_the_rules_are_those_of_transformers(max_initial: int | None) -> None:
    """For outputs of all lengths at once that random logits lead to."""
    random = torch.Generator().manual_seed(1)
    config = transformers.GenerationConfig(
        eos_token_id=END, no_timestamps_token_id=NO_TIMESTAMPS,
        max_initial_timestamp_index=max_initial,
    )  # fmt: skip
    lengths = [3 + number % 4 for number in range(24)]
    theirs = [WhisperTimeStampLogitsProcessor(config, begin_index=length) for length in lengths]
    history = torch.full((len(lengths), 40), NO_TIMESTAMPS + 5, dtype=torch.int32)
    rules = TimestampRules(
        LogitsProcessorSetup(VOCAB, len(lengths), 40, torch.device("cpu"), history)
    )
    args = {"no_timestamps": NO_TIMESTAMPS, "end": END, "max_initial": max_initial}
    params = SamplingParams(extra_args={TIMESTAMP_RULES: args})
    for slot, length in enumerate(lengths):
        tokens = tuple(range(length))
        assert rules.start(slot, SlotStart(slot, f"r{slot}", tokens, length, 0, params, 0))
    slots = torch.arange(len(lengths))
    kinds = set()
    for step in range(30):
        logits = 2 * torch.randn((len(lengths), VOCAB), generator=random)
        # Some rows are sure of a text, and some of a time.
        logits[::3, 40] += 6.0
        logits[1::3, NO_TIMESTAMPS + 1 + step :] += 3.0
        now = torch.tensor([length + step for length in lengths])
        made = rules.apply(logits.clone(), ProcessedRows(tuple(slots.tolist()), slots, now))
        for slot, processor in enumerate(theirs):
            tokens = history[slot, : now[slot]][None].long()
            expected = processor(tokens, logits[slot][None])[0]
            assert torch.equal(made[slot], expected), (step, slot)
            token = int(expected.softmax(-1).multinomial(1, generator=random))
            kinds.add((token > NO_TIMESTAMPS, bool(tokens[0, -1] > NO_TIMESTAMPS)))
            history[slot, now[slot]] = token
    assert len(kinds) == 4


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """→ model of `transformers`, its folder"""
    folder = tmp_path_factory.mktemp("timed")
    torch.manual_seed(9)
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=40, max_source_positions=50, max_target_positions=40,
            num_mel_bins=80, init_std=0.35, pad_token_id=END, bos_token_id=END, eos_token_id=END,
            decoder_start_token_id=START, suppress_tokens=[], begin_suppress_tokens=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():  # What it hears tells more than what it has written.
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(6)
            layer.encoder_attn.q_proj.weight.mul_(4)
    model.save_pretrained(folder)
    edit_json(folder / "generation_config.json", **GENERATION)
    return model, folder


def recording(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    time = np.arange(RATE // 2 + 600 * seed) / RATE
    tone = 0.3 * np.sin(2 * np.pi * (200 + random.integers(3000)) * time)
    return (tone + random.normal(0, 0.05, len(time))).astype(np.float32)


RECORDINGS = [recording(seed) for seed in range(10)]


@pytest.fixture(scope="module")
def expected(whisper: Any) -> list[list[int]]:
    model, _ = whisper
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=80)
    config = transformers.GenerationConfig(**{**GENERATION, "max_new_tokens": OUTPUT})
    processors = transformers.LogitsProcessorList([
        SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"]),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT)),
    ])  # fmt: skip
    config.suppress_tokens = None
    heard = extractor(RECORDINGS, sampling_rate=RATE, return_tensors="pt").input_features
    # Of one window: Whisper's own `generate` goes on to the next.
    made = transformers.GenerationMixin.generate(
        model, heard, generation_config=config, logits_processor=processors,
        decoder_input_ids=torch.tensor([PROMPT] * len(RECORDINGS)),
    )  # fmt: skip
    tokens = [[token for token in row if token != END] for row in made[:, len(PROMPT) :].tolist()]
    times = [sum(token > NO_TIMESTAMPS for token in each) for each in tokens]
    assert len(set(map(tuple, tokens))) > 5 and max(times) > 3, "varied enough to compare"
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"executor": "rank_threads", "tensor_parallel_size": 2},
        {"max_num_seqs": 2, "num_gpu_blocks_override": 40},
    ],
    ids=["plain", "drafts", "ranks", "preempted"],
)
async def test_tokens_are_those_of_transformers(
    whisper: Any, expected: list[list[int]], options: dict[str, Any]
) -> None:
    _, folder = whisper
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks_override": 200,
    }  # fmt: skip
    config = EngineConfig(model=str(folder), **{**settings, **options})
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:
        source = engine.model_config.source
        assert source is not None and source.audio is not None and source.audio.speech is not None
        params = SamplingParams(
            temperature=0.0, max_tokens=OUTPUT, extra_args=dict(source.audio.speech.extra_args)
        )

        async def tokens(samples: np.ndarray) -> list[int]:
            data = {"audio": (samples, RATE)}
            prompt: Any = {"prompt_token_ids": PROMPT, "multi_modal_data": data}
            *_, last = [output async for output in engine.generate(prompt, params)]
            return [token for token in last.outputs[0].token_ids if token != END]

        made = await asyncio.gather(*map(tokens, RECORDINGS))
        refused = SamplingParams(extra_args={TIMESTAMP_RULES: {"end": 1}})
        with pytest.raises(InvalidRequest, match="no_timestamps"):
            data = {"audio": RECORDINGS[0]}
            await anext(engine.generate({"multi_modal_data": data}, refused))
        engine.core.check_idle()
    assert made == expected
