"""The sampler against a row-by-row float64 oracle, its distributions, and its independence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.sampling_params import SamplingParams
from jackfield.core.worker.sampling import row_chunks
from jackfield.core.worker.sampling import sampling_state as state_module
from jackfield.core.worker.sampling.logprobs import top_tokens

from sampling_bench import (
    Bench,
    WouldSynchronize,
    no_sync,
    oracle_filter,
    oracle_token,
    random_params,
)

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.multinomial(x, 1),
        lambda x: bool(x.sum() > 0),
    ],
)
def test_the_guard_sees_what_would_synchronize(use: Any) -> None:
    with pytest.raises(WouldSynchronize), no_sync("cpu"):
        use(torch.ones(3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "chunk", "small_top_k"),
    [
        (23, torch.float32, 1 << 24, 1024),
        (23, torch.bfloat16, 64, 8),
        (301, torch.bfloat16, 1 << 24, 1024),
        (301, torch.float32, 1500, 20),
    ],
)
def test_any_mix_of_rows_matches_the_oracle(
    vocab_size: int,
    dtype: torch.dtype,
    chunk: int,
    small_top_k: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(state_module, "SMALL_TOP_K", small_top_k)
    rng = np.random.default_rng(vocab_size + chunk)
    bench = Bench(vocab_size, slots=12, device=device)
    checked = skipped = 0
    for _ in range(100):
        for slot in rng.choice(12, size=3, replace=False).tolist():
            if slot in bench.starts and rng.random() < 0.5:
                bench.state.release(slot)
                del bench.starts[slot]
            else:
                widest = vocab_size if rng.random() < 0.5 else 4
                prompt = rng.integers(0, widest, size=rng.integers(1, 9)).tolist()
                output = rng.integers(0, 4, size=rng.integers(0, 4)).tolist()
                more = random_params(rng, vocab_size)
                seed = int(rng.integers(-(2**63), 2**63 - 1))
                bench.start(slot, more.pop("params"), prompt, output=output, seed=seed, **more)
        rows = rng.permutation(list(bench.starts))[: rng.integers(0, 12)].tolist()
        logits = torch.from_numpy(rng.normal(size=(len(rows), vocab_size)) * 3).to(dtype)
        logits[:, :4] += 3  # low ids are likely: bad words and penalties meet them
        expected = [
            oracle_token(row, bench.starts[slot], bench.tokens[slot])
            for row, slot in zip(logits.double().numpy(), rows, strict=True)
        ]
        actual = bench.step(rows, logits)
        assert not actual.bad_rows.any()
        for slot, token, (target, close) in zip(
            rows, actual.token_ids.tolist(), expected, strict=True
        ):
            checked, skipped = checked + 1, skipped + close
            assert close or token == target, bench.starts[slot]
    assert checked > 250
    assert skipped < checked * 0.05


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([1, 5], [6], False),
        ([1], [5, 6], True),
        ([1], [5, 6, 6], False),
        ([5, 6], [], False),
        ([1], [6, 5, 6], True),
    ],
)
def test_a_bad_word_is_matched_within_the_output(
    prompt: list[int], output: list[int], banned: bool
) -> None:
    bench = Bench(9)
    params = SamplingParams(temperature=0.0)
    bench.start(2, params, prompt, output=output, bad_words_token_ids=((5, 6, 7),))
    logits = torch.zeros(1, 9)
    logits[0, 7], logits[0, 8] = 2.0, 1.0
    assert bench.step([2], logits).token_ids.tolist() == [8 if banned else 7]


# ---------------------------------------------------------------- filters, exactly


def kept_tokens(params: SamplingParams, logits: list[float], draws: int = 4000) -> set[int]:
    """Tokens that ever come out."""
    return set(draw(params, torch.tensor(logits), draws).tolist())


def draw(params: SamplingParams, logits: torch.Tensor, draws: int, seed: int = 5) -> torch.Tensor:
    """[draws] tokens of one request at positions 0, 1, … for one row of logits."""
    bench = Bench(len(logits))
    bench.start(3, params, [0], seed=seed)
    bench.state.upload()
    out = bench.sampler.in_torch.sample(
        logits.expand(draws, -1), torch.full((draws,), 3), [3] * draws, torch.arange(draws)
    )
    return out.token_ids


def logs(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


@pytest.mark.parametrize(
    ("params", "logits", "expected"),
    [
        (dict(top_k=2), logs(0.2, 0.5, 0.3), {1, 2}),
        (dict(top_k=3), logs(0.2, 0.5, 0.3), {0, 1, 2}),
        (dict(top_k=2), [1.0, 2.0, 1.0, 1.0], {0, 1}),
        (dict(top_k=1), [1.0, 1.0, 1.0], {0}),
        (dict(top_p=0.49), logs(0.2, 0.5, 0.3), {1}),
        (dict(top_p=0.51), logs(0.2, 0.5, 0.3), {1, 2}),
        (dict(top_p=0.81), logs(0.2, 0.5, 0.3), {0, 1, 2}),
        (dict(top_p=1e-9), logs(0.2, 0.5, 0.3), {1}),
        (dict(top_p=0.6), [0.0, 0.0, 0.0, 0.0], {0, 1, 2}),
        (dict(top_p=0.6, top_k=2), logs(0.2, 0.5, 0.3), {1}),
        (dict(top_p=0.63, top_k=2), logs(0.2, 0.5, 0.3), {1, 2}),
        (dict(min_p=0.5), logs(0.2, 0.5, 0.3), {1, 2}),
        (dict(min_p=0.7), logs(0.2, 0.5, 0.3), {1}),
        (dict(min_p=1.0), [1.0, 2.0, 2.0], {1, 2}),
        (dict(min_p=0.5, top_p=0.62), logs(0.2, 0.5, 0.3), {1}),
        (dict(temperature=0.5, min_p=0.5), logs(0.2, 0.5, 0.3), {1}),
        (dict(temperature=0.0, top_k=3, top_p=0.9), [1.0, 3.0, 3.0], {1}),
        (dict(top_k=-1), logs(0.2, 0.5, 0.3), {0, 1, 2}),
        (dict(top_k=99), logs(0.2, 0.5, 0.3), {0, 1, 2}),
    ],
)
def test_filters_keep_exactly_these_tokens(
    params: dict[str, Any], logits: list[float], expected: set[int]
) -> None:
    assert kept_tokens(SamplingParams(**params), logits) == expected


@pytest.mark.parametrize("k", [1, 3, 7, 64])
def test_top_tokens_orders_equals_by_id(k: int) -> None:
    values = torch.randint(-2, 3, (20, 64), generator=torch.Generator().manual_seed(k)).float()
    values[0, 5:9] = -math.inf
    values[values == 0] *= torch.tensor([1.0, -1.0]).repeat(500)[: int((values == 0).sum())]
    actual, ids = top_tokens(values, k)
    expected = torch.sort(values, dim=-1, descending=True, stable=True)
    assert torch.equal(actual, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])


# ---------------------------------------------------------------- distributions


def chi_square_is_plausible(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Whether counts may come from probs: within five standard deviations of chi-square."""
    counts, probs = counts[probs > 0], probs[probs > 0]
    expected = counts.sum() * probs / probs.sum()
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(statistic < freedom + 5 * math.sqrt(2 * freedom))


def test_the_chi_square_check_refuses_a_wrong_distribution() -> None:
    counts = np.array([5200.0, 4800.0])
    assert chi_square_is_plausible(counts, np.array([0.52, 0.48]))
    assert not chi_square_is_plausible(counts, np.array([0.5, 0.5]))


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=0.5),
        dict(temperature=3.0),
        dict(top_k=5),
        dict(top_p=0.7),
        dict(min_p=0.2),
        dict(top_k=9, top_p=0.8, min_p=0.05, temperature=1.3),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, -77, 2**62 + 1])
def test_tokens_follow_the_filtered_softmax(params: dict[str, Any], seed: int) -> None:
    settings = SamplingParams(**params)
    logits = np.random.default_rng(4).normal(size=16) * 1.5
    x = logits.astype(np.float32).astype(np.float64) / settings.temperature
    keep, close = oracle_filter(x, settings)
    assert not close
    probs = np.where(keep, np.exp(x), 0.0)
    tokens = draw(settings, torch.from_numpy(logits).float(), 20_000, seed)
    counts = np.bincount(tokens.numpy(), minlength=16).astype(np.float64)
    assert counts[~keep].sum() == 0
    assert chi_square_is_plausible(counts, probs)


def test_a_wide_flat_vocabulary_is_drawn_evenly() -> None:
    tokens = torch.cat([draw(SamplingParams(), torch.zeros(20_000), 250, seed=s) for s in range(4)])
    counts = np.bincount(tokens.numpy() // 500, minlength=40).astype(np.float64)
    assert chi_square_is_plausible(counts, np.full(40, 1 / 40))
    assert len(set(tokens.tolist())) > 950


@pytest.mark.parametrize("apart", ["seed", "seed far", "position"])
def test_neighbouring_seeds_and_positions_draw_independently(apart: str) -> None:
    params, logits = SamplingParams(), torch.zeros(5)
    first = draw(params, logits, 30_000, seed=11)
    if apart == "position":
        first, second = first[:-1], first[1:]
    else:
        second = draw(params, logits, 30_000, seed=12 if apart == "seed" else 11 + 2**32)
    pairs = np.bincount((first * 5 + second).numpy(), minlength=25).astype(np.float64)
    assert chi_square_is_plausible(pairs, np.full(25, 1 / 25))


def test_tokens_that_share_a_row_are_drawn_independently() -> None:
    bench = Bench(60)
    noise = bench.sampler.in_torch.noise
    lanes = torch.from_numpy(state_module.seed_lanes(9)).expand(20_000, -1)
    values = noise.exponential(noise.row_keys(lanes, torch.arange(20_000)))
    correlation = np.corrcoef(values.numpy().T)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(20_000)
    uniform = np.exp(-values.double().numpy()).ravel()
    counts, _ = np.histogram(uniform, bins=500, range=(0, 1))
    assert chi_square_is_plausible(counts.astype(np.float64), np.full(500, 1 / 500))


def test_the_smallest_noise_has_full_resolution() -> None:
    bench = Bench(50_000)
    noise = bench.sampler.in_torch.noise
    lanes = torch.from_numpy(state_module.seed_lanes(1)).expand(40, -1)
    least = noise.exponential(noise.row_keys(lanes, torch.arange(40))).amin(dim=-1)
    scaled = least.double() * 50_000  # exponential with mean 1 again
    assert 0.6 < scaled.mean() < 1.4
    assert len(set(least.tolist())) == 40


# ---------------------------------------------------------------- the same seed, the same tokens

VARIED = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=0.0),
    dict(top_k=4),
    dict(top_p=0.8),
    dict(min_p=0.05),
    dict(top_k=30, top_p=0.9, temperature=1.4),
    dict(presence_penalty=1.0, repetition_penalty=1.3),
    dict(logit_bias={3: 4.0}, logprobs=2),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", VARIED)
def test_a_seeded_request_is_the_same_in_any_company(params: dict[str, Any], device: str) -> None:
    rng = np.random.default_rng(8)
    steps = torch.from_numpy(rng.normal(size=(25, 40)) * 2).to(torch.bfloat16)
    settings = SamplingParams(**params)
    alone = Bench(40, device=device)
    alone.start(0, settings, [1, 2], seed=99)
    for logits in steps:
        alone.step([0], logits[None])

    crowd = Bench(40, device=device)
    crowd.start(7, settings, [1, 2], seed=99)
    for n, logits in enumerate(steps):
        other = n % 7
        crowd.start(other, SamplingParams(**VARIED[n % len(VARIED)]), [5, n], seed=n)
        rows = rng.permutation([7, *(s for s in crowd.starts if s != 7)]).tolist()
        batch = torch.from_numpy(rng.normal(size=(len(rows), 40))).to(torch.bfloat16)
        batch[rows.index(7)] = logits
        crowd.step(rows, batch)
    assert crowd.tokens[7] == alone.tokens[0]
    assert settings.greedy or len(set(alone.tokens[0])) > 3


@pytest.mark.parametrize("params", VARIED)
def test_a_preempted_request_goes_on_with_the_same_tokens(params: dict[str, Any]) -> None:
    steps = torch.from_numpy(np.random.default_rng(3).normal(size=(20, 1, 40)) * 2)
    settings = SamplingParams(**params)
    whole, torn = Bench(40), Bench(40)
    whole.start(0, settings, [1, 2, 2], seed=4)
    torn.start(0, settings, [1, 2, 2], seed=4)
    for n, logits in enumerate(steps):
        if n == 11:
            output = torn.tokens[0][3:]
            torn.state.release(0)
            torn.start(5, settings, [1, 2, 2], output=output, seed=4)
        whole.step([0], logits)
        torn.step([0 if n < 11 else 5], logits)
    assert torn.tokens[5] == whole.tokens[0]


def test_requests_without_the_same_seed_differ() -> None:
    streams = {tuple(draw(SamplingParams(), torch.zeros(50), 20, s).tolist()) for s in range(50)}
    assert len(streams) == 50


# ---------------------------------------------------------------- failures of one row


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", VARIED)
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
def test_a_row_that_cannot_be_sampled_fails_alone(
    params: dict[str, Any], poison: float, device: str
) -> None:
    bench = Bench(40, device=device)
    for slot in range(3):
        bench.start(slot, SamplingParams(**params), [1], seed=slot)
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(1))
    reference = [
        oracle_token(row, bench.starts[s], [1])[0] for s, row in enumerate(logits.double().numpy())
    ]
    logits[1, 17] = poison
    out = bench.step([0, 1, 2], logits)
    assert out.bad_rows.tolist() == [False, True, False]
    assert out.token_ids.tolist() == [reference[0], 0, reference[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_is_bad(temperature: float) -> None:
    bench = Bench(10)
    params = SamplingParams(temperature=temperature, allowed_token_ids=(10, 99))
    bench.start(0, params, [1])
    out = bench.step([0], torch.zeros(1, 10))
    assert out.bad_rows.tolist() == [True]
    assert out.token_ids.tolist() == [0]


def test_no_rows_give_no_tokens() -> None:
    out = Bench(10).step([], torch.zeros(0, 10))
    assert out.token_ids.shape == (0,)
    assert out.bad_rows.shape == (0,)


# ---------------------------------------------------------------- log-probabilities


def check_logprobs(row: np.ndarray, token: int, k: int, actual: tuple[Any, ...]) -> None:
    """row: [V] float64 raw logits; got: one row of each tensor of `Logprobs`."""
    top_ids, top_logprobs, logprob, rank = actual
    expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
    order = np.lexsort((np.arange(len(row)), -row))[:k]
    assert top_ids[:k].tolist() == order.tolist()
    np.testing.assert_allclose(top_logprobs[:k].numpy(), expected[order], atol=2e-5)
    assert float(logprob) == pytest.approx(expected[token], abs=2e-5)
    assert int(rank) == 1 + int((row > row[token]).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_untouched_logits(dtype: torch.dtype, device: str) -> None:
    expected = {0: None, 1: 3, 2: 0, 3: -1, 4: 5}
    bench = Bench(12, device=device)
    for slot, k in expected.items():
        bench.start(
            slot,
            SamplingParams(
                logprobs=k, temperature=0.6, logit_bias={2: 50.0}, frequency_penalty=1.0
            ),
            [1, 2],
        )
    logits = (torch.randn((5, 12), generator=torch.Generator().manual_seed(2)) * 2).to(dtype)
    before = logits.clone()
    out = bench.step([4, 3, 2, 1, 0], logits)
    assert torch.equal(logits, before)
    assert out.logprobs is not None
    parts = [
        part.cpu()
        for part in (
            out.logprobs.top_ids,
            out.logprobs.top_logprobs,
            out.logprobs.logprob,
            out.logprobs.rank,
        )
    ]
    assert parts[0].shape == (5, 12)
    assert out.token_ids.tolist() == [2] * 5
    for row, slot in enumerate([4, 3, 2, 1]):
        k = expected[slot]
        k = 12 if k == -1 else k
        check_logprobs(logits[row].double().numpy(), 2, k, tuple(part[row] for part in parts))


def test_without_logprobs_asked_there_are_none() -> None:
    bench = Bench(12)
    bench.start(0, SamplingParams(), [1])
    assert bench.step([0], torch.zeros(1, 12)).logprobs is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [0, 4, -1])
def test_prompt_logprobs_match_the_log_softmax(
    k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 100)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn((17, 30), generator=generator) * 3).to(torch.bfloat16)
    targets = torch.randint(0, 30, (17,), generator=generator)
    bench = Bench(30, device=device)
    device_logits, device_targets = logits.to(device), targets.to(device)
    with no_sync(device):
        actual = bench.sampler.prompt_logprobs(device_logits, device_targets, k)
    parts = [p.cpu() for p in (actual.top_ids, actual.top_logprobs, actual.logprob, actual.rank)]
    width = 30 if k < 0 else k
    assert parts[0].shape == (17, width)
    for row in range(17):
        check_logprobs(
            logits[row].double().numpy(), int(targets[row]), width, tuple(p[row] for p in parts)
        )
