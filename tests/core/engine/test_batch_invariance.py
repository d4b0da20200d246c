"""A request's tokens and log-probabilities are the same bits, whatever other requests run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError

from helpers import VOCAB, at_once, make_checkpoint

OUTPUT = 24
FAMILIES = ("llama", "qwen3-moe", "mistral-window", "gpt-oss")
SHARED = [(3 + 7 * i) % (VOCAB - 3) + 3 for i in range(24)]
"""How some prompts begin."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def engine_of(folder: Path, **options: Any) -> AsyncEngine:
    given = {"device": "cpu", "batch_invariant": True, "max_num_seqs": 8, **options}
    return AsyncEngine(
        EngineConfig(
            model=str(folder), dtype="float32", skip_tokenizer_init=True,
            max_model_len=96, block_size=4, **given,
        )
    )  # fmt: skip


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of assorted lengths, some of which begin alike, greedy or sampled by a seed."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 3, 9, 20, 37)))]
        prompt = SHARED[: rng.choice((0, 0, 9, 24))] + own
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.9)), top_p=rng.choice((1.0, 0.8)), seed=number,
            max_tokens=rng.randrange(2, OUTPUT), ignore_eos=True, logprobs=3,
            prompt_logprobs=rng.choice((None, None, 2)),
        )  # fmt: skip
        made.append((prompt, params))
    # It repeats itself, so that drafts are accepted.
    few = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, allowed_token_ids=[5]
    )
    made[0] = (SHARED[:9], few)
    return made


async def answer(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
    """Return tokens and log-probabilities, as exact numbers."""
    last: Any = None
    async for output in engine.generate(prompt, params):
        last = output
    completion = last.outputs[0]
    scores = [
        {token: found.logprob for token, found in position.items()}
        for position in completion.logprobs
    ]
    prompt_scores = [
        None if position is None else {token: found.logprob for token, found in position.items()}
        for position in last.prompt_logprobs or ()
    ]
    return completion.token_ids, scores, prompt_scores


async def alone(folder: Path, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Answers of an engine that has cached nothing, one request after the other."""
    async with engine_of(folder, enable_prefix_caching=False) as engine:
        return [await answer(engine, *request) for request in asked]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
          "adaptive_width": False}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks, preempted": {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 16},
    "drafts": {"speculative_config": DRAFTS},
}


@pytest.mark.parametrize(
    "name", [*FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[2:])]
)
async def test_batches_do_not_change_a_bit(name: str, checkpoints: Any) -> None:
    """Requests alone, and all at once: with prefix hits, in chunks, preempted, and with drafts."""
    asked = requests(5, 10)
    expected = await alone(checkpoints(name), asked)
    for setting, options in SETTINGS.items():
        if name == "gpt-oss" and "num_gpu_blocks_override" in options:
            options = {**options, "num_gpu_blocks_override": 30}  # It has two groups of layers.
        async with engine_of(checkpoints(name), **options) as engine:
            assert engine.core.info.attention_backend == "torch_invariant"
            answers = await at_once(engine, *(answer(engine, *request) for request in asked))
            again = [await answer(engine, *request) for request in asked[:2]]
            stats = engine.stats()
        for number, (got, want) in enumerate(zip(answers, expected, strict=True)):
            assert got == want, f"{setting}: request {number}"
        assert again == expected[:2], f"{setting}: from the cache of prefixes"
        if setting == "chunks, preempted" and name == "llama":
            assert stats.num_preemptions > 0, "this setting is here to force preemption"
        if setting == "drafts":
            assert stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.slow
async def test_kernels_do_not_change_a_bit(checkpoints: Any, device: str) -> None:
    """The engine with Triton's kernels; a mixture, too, in chunks and with drafts."""
    kernels = {"operations": "triton_invariant", "attention_backend": "triton_invariant"}
    kernels["device"] = device
    asked = requests(6, 5)
    for name in ("llama", "qwen3-moe"):
        async with engine_of(checkpoints(name), enable_prefix_caching=False, **kernels) as engine:
            expected = [await answer(engine, *request) for request in asked]
        async with engine_of(
            checkpoints(name), max_num_batched_tokens=16, speculative_config=DRAFTS, **kernels
        ) as engine:
            answers = await at_once(engine, *(answer(engine, *request) for request in asked))
        assert answers == expected, name


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"enable_lora": True}, "batch_invariant"),
        ({"tensor_parallel_size": 2}, "batch_invariant"),
        ({"kv_compression": "window"}, "batch_invariant"),
        ({"calculate_kv_scales": True, "kv_cache_dtype": "fp8"}, "batch_invariant"),
        ({"operations": "torch"}, "operations"),
        ({"attention_backend": "torch"}, "attention_backend"),
    ],
)
async def test_what_is_not_invariant_is_refused_by_name(
    options: dict[str, Any], param: str, checkpoints: Any
) -> None:
    with pytest.raises(ConfigError) as raised:
        async with engine_of(checkpoints("llama"), **options):
            pass
    assert raised.value.param == param


async def test_without_the_option_nothing_is_slower(checkpoints: Any) -> None:
    async with engine_of(checkpoints("llama"), batch_invariant=False) as engine:
        assert engine.core.info.attention_backend == "torch"


async def test_blocks_of_other_engines_are_not_loaded(checkpoints: Any) -> None:
    """By a KV connector: they differ in the last bits."""
    options = {
        "kv_transfer_config": {
            "kv_connector": "cpu_offload",
            "kv_connector_extra_config": {"kv_offloading_size": 0.01},
        }
    }
    fingerprints = []
    for invariant in (True, True, False):
        async with engine_of(checkpoints("llama"), batch_invariant=invariant, **options) as engine:
            assert engine.info.kv_layout is not None
            fingerprints.append(engine.info.kv_layout.fingerprint)
    first, same, other = fingerprints
    assert first == same != other
