"""Requests of any mix, together and with departures, get the tokens that each gets alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams

from helpers import VOCAB, make_checkpoint

MAX_MODEL_LEN = 160
NEAR_TIES = 0.002
"""Share of streams in which another number of rows may decide a near tie the other way."""
MARGIN = 1e-4
"""Logits, of tokens or of experts, that are closer are a near tie."""


def draw(number: int) -> tuple[list[int], SamplingParams, int | None]:
    """A request, and the tokens after which its caller leaves; the same for the same number."""
    source = random.Random(number)
    shared = [3 + (7 * place) % (VOCAB - 3) for place in range(40)]
    prompt = shared[: source.choice((0, 0, 16, 40))]
    prompt = prompt + [source.randrange(3, VOCAB) for _ in range(source.randint(1, 90))]
    output = source.randint(1, 24)
    options: dict[str, Any] = {"temperature": source.choice((0.0, 0.7, 1.0))}
    for share, option in (
        (0.2, {"top_p": 0.8}),
        (0.2, {"top_k": 7}),
        (0.1, {"min_p": 0.1}),
        (0.1, {"presence_penalty": 0.7}),
        (0.1, {"frequency_penalty": 0.4}),
        (0.1, {"repetition_penalty": 1.2}),
        (0.1, {"logprobs": 3}),
        (0.1, {"prompt_logprobs": 2}),
        (0.1, {"logit_bias": {source.randrange(VOCAB): 2.0}}),
        (0.1, {"min_tokens": min(3, output), "stop_token_ids": [source.randrange(3, VOCAB)]}),
        (0.1, {"allowed_token_ids": source.sample(range(VOCAB), 20)}),
        (0.1, {"n": 2}),
    ):
        if source.random() < share:
            options |= option
    params = SamplingParams(
        max_tokens=output, seed=number, detokenize=False, output_kind=OutputKind.DELTA, **options
    )
    leave_after = source.randint(1, output) if source.random() < 0.25 else None
    return prompt, params, leave_after


async def tokens_of(
    engine: AsyncEngine, number: int, *, whole: bool, bias: dict[int, float] | None = None
) -> list[list[int]]:
    """Each completion's tokens, up to where the caller leaves unless `whole`. `bias`: more for the
    logits of some tokens."""
    prompt, params, leave_after = draw(number)
    if bias:
        own = params.logit_bias or {}
        more = {token: own.get(token, 0.0) + value for token, value in bias.items()}
        params = msgspec.structs.replace(params, logit_bias={**own, **more})
    completions: list[list[int]] = [[] for _ in range(params.n)]
    async for out in engine.generate(prompt, params):
        for completion in out.outputs:
            completions[completion.index] += completion.token_ids
        if not whole and leave_after and len(completions[0]) >= leave_after:
            break
    return completions


def shared_prefix(ours: list[int], theirs: list[int]) -> list[int]:
    """Return the tokens before the first one in which two completions differ."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return [token for token, _ in pairs]


async def is_near_tie(
    engine: AsyncEngine, number: int, index: int, ours: list[int], theirs: list[int]
) -> bool:
    """Whether the first token in which a completion differs from the same request alone is decided
    by a bias of MARGIN on the logit of one of the two."""
    place = len(shared_prefix(ours, theirs))
    tokens = {ours[place], theirs[place]}
    found = set()
    for token in tokens:
        for bias in (MARGIN, -MARGIN):
            made = (await tokens_of(engine, number, whole=True, bias={token: bias}))[index]
            if made[:place] == theirs[:place] and len(made) > place:
                found.add(made[place])
    return tokens <= found


@torch.no_grad()
def smallest_routing_margin(folder: Path, token_ids: list[int]) -> float:
    """Return the smallest difference, over tokens and layers, between the last expert that is
    chosen and the first that is not, in float64; infinite for a dense model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    margins = [float("inf")]

    def compare(router: Any, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        logits = inputs[0].flatten(0, -2) @ router.weight.T
        ordered = logits.sort(-1, descending=True).values
        chosen = model.config.num_experts_per_tok
        margins.append(float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(compare)
    model(torch.tensor([token_ids]))
    return min(margins)


async def client(
    engine: AsyncEngine, numbers: Iterator[int], together: dict[int, list[list[int]]]
) -> None:
    """Sends the next request when one has ended."""
    for number in numbers:
        together[number] = await tokens_of(engine, number, whole=False)


async def check_traffic(
    config: EngineConfig, *, clients: int, requests: int, seconds: float | None = None
) -> tuple[int, int]:
    """→ (streams, those that differ from the same request alone). `seconds`: go on in rounds of
    `requests` for so long."""
    streams = different = 0
    begin = time.monotonic()
    first = 0
    allocated: list[int] = []
    async with AsyncEngine(config) as engine:
        while True:
            numbers = iter(range(first, first + requests))
            together: dict[int, list[list[int]]] = {}
            await asyncio.gather(*(client(engine, numbers, together) for _ in range(clients)))
            stats = engine.stats()
            assert stats.num_requests_running == 0 and stats.kv_blocks_used == 0
            for number, completions in together.items():
                alone = await tokens_of(engine, number, whole=True)
                for index, (ours, theirs) in enumerate(zip(completions, alone, strict=True)):
                    streams += 1
                    if ours != theirs[: len(ours)]:
                        different += 1
                        message = f"request {number}, completion {index}: {ours}, {theirs} alone"
                        if not await is_near_tie(engine, number, index, ours, theirs):
                            tokens = draw(number)[0] + shared_prefix(ours, theirs)
                            margin = smallest_routing_margin(Path(config.model or ""), tokens)
                            assert margin < MARGIN, f"{message}; routing margin {margin}"
            if torch.cuda.is_available():
                allocated.append(torch.cuda.memory_allocated())
            first += requests
            if seconds is None or time.monotonic() - begin > seconds:
                break
        assert engine.stats().kv_blocks_used == 0
    # Tables that grow with what requests ask for have grown after the first rounds.
    assert len(allocated) < 4 or allocated[-1] <= allocated[len(allocated) // 2] * 1.01, allocated
    return streams, different


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=12, max_num_batched_tokens=96, block_size=8, num_gpu_blocks_override=90,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


async def test_requests_together_get_the_tokens_of_each_alone(checkpoint: Path) -> None:
    """Blocks for some of the requests only, so that they are preempted, too."""
    config = config_of(checkpoint, device="cpu", operations="torch", attention_backend="torch")
    streams, different = await check_traffic(config, clients=16, requests=40)
    assert streams >= 40 and different <= max(1, NEAR_TIES * streams)


async def test_another_token_is_no_near_tie(checkpoint: Path) -> None:
    config = config_of(checkpoint, device="cpu", operations="torch", attention_backend="torch")
    async with AsyncEngine(config) as engine:
        alone = (await tokens_of(engine, 5, whole=True))[0]
        other = [*alone[:1], (alone[1] + 1) % VOCAB, *alone[2:]]
        assert not await is_near_tie(engine, 5, 0, other, alone)


def test_a_stream_of_a_mixture_differs_where_experts_tie(tmp_path: Path) -> None:
    """As seen on a GPU: the third and the fourth expert of request 3,202's token are 7e-7 apart,
    and after that the stream differed from the same request alone."""
    tokens = draw(3202)[0] + [13, 112, 85, 119, 45, 41, 89]
    assert smallest_routing_margin(make_checkpoint("qwen3-moe", tmp_path), tokens) < 1e-6
    assert smallest_routing_margin(tmp_path, tokens[:-1]) > 1e-3
    assert smallest_routing_margin(make_checkpoint("qwen3", tmp_path), tokens) == float("inf")


@pytest.mark.slow
async def test_thousands_of_mixes_get_the_tokens_of_each_alone(checkpoint: Path) -> None:
    config = config_of(checkpoint, device="cpu", operations="torch", attention_backend="torch")
    streams, different = await check_traffic(config, clients=24, requests=3000)
    assert streams >= 3000 and different <= NEAR_TIES * streams


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3-moe"])
async def test_traffic_on_a_gpu_is_right_and_leaves_nothing(family: str, tmp_path: Path) -> None:
    """Triton's kernels and recorded steps, for 40 seconds a family."""
    folder = make_checkpoint(family, tmp_path)
    config = config_of(folder, device="cuda", operations="triton", attention_backend="triton")
    streams, different = await check_traffic(config, clients=24, requests=150, seconds=40)
    print(f"{family}: {streams} streams, {different} differ")
    assert streams >= 150 and different <= NEAR_TIES * streams
