"""Workers that compute one model together serve what one serves."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoders import save_decoder, save_encoder
from rank_executor import Plugin, RankThreads

import jackfield
from jackfield import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputsParams
from jackfield.core.errors import ConfigError
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import load_plugins
from jackfield.core.worker.graphs.endings import Ending
from jackfield.core.worker.graphs.recorder import CudaRecorder, NotRecorded
from jackfield.core.worker.start.cache_room import CacheRoom
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import VOCAB, edit_json, make_checkpoint

EMBEDDED = Path(jackfield.__file__).resolve().parent / "plugins/models/embedded"
EXTRAS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": {5: 3.0}},
]


def config(folder: Path | str, size: int, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 128,
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 60,
        "block_size": 8, "skip_tokenizer_init": bool(str(folder)),
        "tensor_parallel_size": size, "executor": "rank_threads" if size > 1 else "inprocess",
    }  # fmt: skip
    return EngineConfig(**{**settings, **options})


async def tokens(
    settings: EngineConfig,
    params: list[SamplingParams],
    executor: type = RankThreads,
) -> list[list[int]]:
    """Each request's tokens; some are preempted, some come in chunks."""
    draw = random.Random(4)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(3, 50))] for _ in params]

    async def generate(engine: AsyncEngine, prompt: list[int], each: SamplingParams) -> list[int]:
        async for output in engine.generate(prompt, each):
            last = output
        assert last.error is None, last.error
        return list(last.outputs[0].token_ids)

    plugins = load_plugins(extra=[Plugin(executor), Static()])
    async with AsyncEngine(settings, plugins=plugins) as engine:
        return list(
            await asyncio.gather(
                *(generate(engine, *each) for each in zip(prompts, params, strict=True))
            )
        )


def requests(count: int = 6, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=12, seed=number, ignore_eos=True, detokenize=False,
            **{**EXTRAS[number % len(EXTRAS)], **more},
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gpt-oss", "olmo2"])
async def test_two_ranks_serve_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    want = await tokens(config(folder, 1), requests())
    assert await tokens(config(folder, 2), requests()) == want


@pytest.mark.parametrize("stored", ["int8", "int4"])
async def test_ranks_quantize_the_heads_that_they_have(stored: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    want = await tokens(config(folder, 1, kv_cache_dtype=stored), requests())
    assert await tokens(config(folder, 2, kv_cache_dtype=stored), requests()) == want


async def pooled(folder: Path, size: int, **options: Any) -> list[np.ndarray]:
    prompts = [[4 + (7 * at) % 50 for at in range(length)] for length in (1, 17, 40)]
    settings = config(
        folder, size, runner="pooling", skip_tokenizer_init=False, num_gpu_blocks_override=None,
        max_num_batched_tokens=130, **options,
    )  # fmt: skip
    async with AsyncEngine(settings, plugins=load_plugins(extra=[Plugin()])) as engine:
        outputs = await asyncio.gather(*(engine.encode(prompt) for prompt in prompts))
    return [np.asarray(output.outputs.data) for output in outputs]


@pytest.mark.parametrize(
    ("save", "family", "kind"),
    [
        (save_encoder, "Bert", "ForSequenceClassification"),
        (save_encoder, "XLMRoberta", "Model"),
        (save_decoder, "Qwen3", "Model"),
        (save_decoder, "Llama", "ForSequenceClassification"),
    ],
)
async def test_two_ranks_pool_as_one(save: Any, family: str, kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family, kind)
    for got, want in zip(await pooled(folder, 2), await pooled(folder, 1), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
async def test_ranks_classify_by_rows_of_a_head(tied: bool, tmp_path: Path) -> None:
    """The tokens belong to different ranks."""
    folder = save_decoder(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=tied)
    edit_json(folder / "tokenizer_config.json", unk_token="[UNK]")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["cat", "dog"], "is_original_qwen3_reranker": True,
    }  # fmt: skip
    want = await pooled(folder, 1, hf_overrides=overrides)
    for got, one in zip(await pooled(folder, 2, hf_overrides=overrides), want, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-5)


async def test_plain_rows_are_sampled_without_whole_logits(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma2", tmp_path)  # Its logits are capped.
    params = [
        SamplingParams(max_tokens=9, seed=n, temperature=0.5 * n, ignore_eos=True, detokenize=False)
        for n in range(4)
    ]

    class Watching(RankThreads):
        async def start(self) -> Any:
            info = await super().start()
            for worker in self.workers:
                worker.runner.logits = functools.partial(watched, worker.runner.logits)  # type: ignore
            return info

    def watched(logits: Any, hidden: torch.Tensor, ending: Any, *places: Any) -> torch.Tensor:
        seen.add(ending)
        result: torch.Tensor = logits(hidden, ending, *places)
        assert result.shape[1] == 100 - (result.shape[1] < 100)
        return result

    seen: set[Any] = set()
    want = await tokens(config(folder, 1), params)
    assert await tokens(config(folder, 2), params, Watching) == want
    assert seen == {Ending.PLAIN}


def with_tokenizer(folder: Path) -> Path:
    """A random checkpoint with the embedded model's tokenizer, whose heads two ranks can share."""
    own = EMBEDDED / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16,
             "num_attention_heads": 4, "initializer_range": 0.2}  # fmt: skip
    torch.manual_seed(5)
    raw = {**json.loads(own.read_text()), **sizes}
    kind = transformers.AutoConfig.for_model(**raw)
    transformers.AutoModelForCausalLM.from_config(kind).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


async def test_a_grammar_is_advanced_by_the_first_rank_alone(tmp_path: Path) -> None:
    """The others get its masks, and no object of its process."""
    folder = with_tokenizer(tmp_path)
    words = StructuredOutputsParams(regex="[ab]{3,9}")
    params = [
        SamplingParams(max_tokens=12, seed=number, temperature=0.9, **each)
        for number, each in enumerate(
            ({"structured_outputs": words, "frequency_penalty": 0.5}, {}, {"top_k": 5})
        )
    ]
    want, got = [
        await tokens(config(folder, size, skip_tokenizer_init=False), params) for size in (1, 2)
    ]
    assert got == want and 3 <= len(want[0]) <= 10


class StaticAttention(TorchAttention):
    """Fit to be called again and again with the same metadata: every length is the longest."""

    graph_safe = True

    def forward(self, spec: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any):
        metadata.chunks.clear()
        return super().forward(spec, query, key, value, kv_cache, metadata)


class Static:
    jackfield_api = 3

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("static", StaticAttention)


class Slow(RankThreads):
    """The second rank is late each time."""

    delays = (0.0, 0.005)


class Recording(RankThreads):
    """Steps are recorded as far as a CPU can: a replay calls the function again."""

    delays = (0.002, 0.0)
    replays: list[list[int]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counts = [0] * len(self.workers)
        self.replays.append(counts)
        for rank, worker in enumerate(self.workers):
            worker._recorder = lambda r=rank: functools.partial(record, counts, r)  # type: ignore


def record(counts: list[int], rank: int, function: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        counts[rank] += 1
        function()

    return replay


async def test_a_rank_may_be_late(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    want = await tokens(config(folder, 1), requests())
    assert await tokens(config(folder, 2), requests(), Slow) == want


async def test_ranks_record_the_same_steps(tmp_path: Path) -> None:
    """One is slower, and time decides how much is recorded before the first request."""
    folder = make_checkpoint("qwen3", tmp_path)
    want = await tokens(config(folder, 1), requests())
    got = await tokens(config(folder, 2, attention_backend="static"), requests(), Recording)
    assert got == want
    first, second = Recording.replays.pop()
    assert first == second > 10


async def test_the_smallest_cache_of_all_ranks_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def available(room: CacheRoom, *_: Any) -> int:
        return 150_000 if room._ranks.tensor.rank else 1_000_000

    monkeypatch.setattr(CacheRoom, "_available", available)
    folder = make_checkpoint("qwen3", tmp_path)
    settings = config(folder, 2, num_gpu_blocks_override=None)
    async with AsyncEngine(settings, plugins=load_plugins(extra=[Plugin()])) as engine:
        assert engine.stats().kv_blocks_total == 150_000 // (8 * 3 * 2 * 32 * 4) - 1


@pytest.mark.parametrize("refused", [0, 1])
def test_what_one_rank_cannot_record_none_records(refused: int) -> None:
    ranks = thread_ranks(2)

    def run(rank: int) -> None:
        recorder = CudaRecorder.__new__(CudaRecorder)
        recorder._device, recorder._ranks = torch.device("cpu"), ranks[rank]
        recorder._record = failing if rank == refused else (lambda function: function)  # type: ignore
        with pytest.raises(NotRecorded):
            recorder(lambda: None)

    def failing(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("capture failed")

    run_ranks([functools.partial(run, rank) for rank in range(2)])


async def test_an_executor_of_one_rank_refuses_more(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="'inprocess' runs one rank") as caught:
        await AsyncEngine(config(folder, 2, executor="inprocess")).start()
    assert caught.value.param == "tensor_parallel_size"
