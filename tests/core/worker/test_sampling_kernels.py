"""Sampling by kernels against the sampler in torch and the float64 oracle: the same tokens, for
any mix of requests, and the same books."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies

from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import GrammarStart
from jackfield.core.worker.sampling import slot_lists
from jackfield.core.worker.sampling.logprobs import token_logprobs
from jackfield.core.worker.sampling.masks import TokenMask
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_columns import Column, Flag
from jackfield.core.worker.sampling.sampling_state import SamplingState

from sampling_bench import MAX_LEN, Bench, oracle_token, random_params

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from jackfield.kernels.sampling import layout as sampling_layout
from jackfield.kernels.sampling import sample_tokens
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 8
GRAMMAR = GrammarStart(eos_token_ids=())


class KernelBench(Bench):
    """The same, by kernels; the last slot is the scratch slot."""

    def __init__(self, vocab_size: int, slots: int = SLOTS) -> None:
        super().__init__(vocab_size, slots=slots, device=DEVICE)
        history = torch.zeros((slots + 1, MAX_LEN), dtype=torch.int32, device=DEVICE)
        self.history = history
        self.state = SamplingState(slots + 1, vocab_size, self.device, history, kernels=True)
        self.sampler = Sampler(self.state, operations=TritonOperations())
        self.chosen: torch.Tensor | None = None

    def choose(
        self, rows: list[int], logits: torch.Tensor, mask: TokenMask | None = None
    ) -> tuple[list[int], Any]:
        """Tokens and log-probabilities of a step; the books are the kernels' own."""
        logits = logits.to(self.device)
        slots = torch.tensor(rows, dtype=torch.int64, device=self.device)
        lengths = torch.tensor([len(self.tokens.get(s, [])) for s in rows], device=self.device)
        self.state.upload()
        before = logits.clone()
        token_ids, logprobs = self.sampler.sample_eagerly(logits, slots, rows, lengths, mask)
        assert torch.equal(logits, before) or logits.isnan().any()
        tokens = token_ids.tolist()
        for slot, token in zip(rows, tokens, strict=True):
            if slot in self.tokens:
                assert int(self.history[slot, len(self.tokens[slot])]) == max(token, 0)
                self.tokens[slot].append(max(token, 0))
        return tokens, logprobs


def pair(vocab_size: int) -> tuple[Bench, KernelBench]:
    return Bench(vocab_size, slots=SLOTS + 1, device=DEVICE), KernelBench(vocab_size)


def start_both(benches: tuple[Bench, KernelBench], slot: int, *args: Any, **more: Any) -> None:
    for bench in benches:
        bench.start(slot, *args, **more)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "candidates", "steps"),
    [
        (23, torch.float32, 8192, 5),
        (301, torch.bfloat16, 8192, 5),
        (301, torch.float32, 16, 4),
        (3001, torch.float32, 8192, 3),
        (3001, torch.float32, 256, 3),
        (3001, torch.bfloat16, 64, 3),
    ],
)
def test_any_mix_of_rows_gets_the_tokens_of_torch(
    vocab_size: int,
    dtype: torch.dtype,
    candidates: int,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few candidates: limits are narrowed down by pivots, and at last in passes over the row."""
    monkeypatch.setattr(sample_tokens, "CANDIDATES", candidates)
    monkeypatch.setattr(sample_tokens, "PART", 1024 if vocab_size > 3000 else 2048)
    rng = np.random.default_rng(vocab_size + candidates)
    benches = torch_bench, bench = pair(vocab_size)
    checked = skipped = 0
    # The interpreter takes half a second a row.
    steps *= 1 if DEVICE == "cpu" else 20
    for _ in range(steps):
        for slot in rng.choice(SLOTS, size=3, replace=False).tolist():
            widest = vocab_size if rng.random() < 0.5 else 4
            prompt = rng.integers(0, widest, size=rng.integers(1, 9)).tolist()
            output = rng.integers(0, 4, size=rng.integers(0, 4)).tolist()
            more = random_params(rng, vocab_size)
            seed = int(rng.integers(-(2**63), 2**63 - 1))
            start_both(benches, slot, more.pop("params"), prompt, output=output, seed=seed, **more)
        rows = rng.permutation(list(bench.starts)).tolist()
        scale = 0.3 if rng.random() < 0.3 else 3
        logits = torch.from_numpy(rng.normal(size=(len(rows), vocab_size)) * scale).to(dtype)
        logits[:, :4] += 3
        near = [
            oracle_token(row, bench.starts[slot], bench.tokens[slot])[1]
            for row, slot in zip(logits.double().numpy(), rows, strict=True)
        ]
        expected = torch_bench.step(rows, logits)
        # A padding row stands in between: it changes nothing.
        padded = torch.cat([logits[:1], logits[:1], logits[1:]])
        tokens, logprobs = bench.choose([rows[0], SLOTS, *rows[1:]], padded)
        tokens = [tokens[0], *tokens[2:]]
        for index, (slot, token) in enumerate(zip(rows, expected.token_ids.tolist(), strict=True)):
            checked, skipped = checked + 1, skipped + near[index]
            if near[index] and tokens[index] != token:
                # Go on from the same tokens.
                bench.start(
                    slot, bench.starts[slot].params, torch_bench.tokens[slot][:1],
                    output=torch_bench.tokens[slot][1:],
                )  # fmt: skip
                torch_bench.start(
                    slot, bench.starts[slot].params, torch_bench.tokens[slot][:1],
                    output=torch_bench.tokens[slot][1:],
                )  # fmt: skip
                continue
            assert tokens[index] == token, bench.starts[slot]
            if (k := bench.starts[slot].params.logprobs) is None:
                continue
            assert expected.logprobs is not None and logprobs is not None
            at = index + (index > 0)
            assert logprobs.rank[at] == expected.logprobs.rank[index]
            assert float(logprobs.logprob[at]) == pytest.approx(
                float(expected.logprobs.logprob[index]), abs=2e-5
            )
            assert (
                logprobs.top_ids[at, :k].tolist() == expected.logprobs.top_ids[index, :k].tolist()
            )
            torch.testing.assert_close(
                logprobs.top_logprobs[at, :k], expected.logprobs.top_logprobs[index, :k],
                atol=2e-5, rtol=0,
            )  # fmt: skip
        for slot, start in bench.starts.items():
            if start.params.has_penalties:
                assert torch.equal(bench.state.counts[slot], torch_bench.state.counts[slot])
    assert checked > steps * 2
    assert skipped < 4 + checked * 0.1


def names(layout: Any) -> dict[str, int]:
    """Its numbers by name."""
    return {
        name: value.value
        for name, value in vars(layout).items()
        if name.isupper() and hasattr(value, "value")
    }


def test_the_kernels_and_the_state_mean_the_same_by_each_word_and_flag() -> None:
    known = names(sampling_layout)
    for name, value in [*Column.__members__.items(), *Flag.__members__.items()]:
        if name not in ("WIDE", "PROCESSED"):  # The host's own.
            assert known.pop(name) == int(value), name
    assert known == {"BIAS_PART": slot_lists.BIAS_PART, "HEADER": 4}


@pytest.mark.parametrize("poison", [math.nan, math.inf, None])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 2},
        {"top_p": 0.8},
        {"top_k": 3, "repetition_penalty": 1.3},
        {"logit_bias": {3: 4.0}},
    ],
)
def test_a_row_that_cannot_be_sampled_fails_alone(
    params: dict[str, Any], poison: float | None
) -> None:
    """None: everything is masked."""
    benches = torch_bench, bench = pair(40)
    for slot in range(3):
        start_both(benches, slot, SamplingParams(**params), [1], seed=slot)
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(1))
    expected = torch_bench.step([0, 1, 2], logits).token_ids.tolist()
    logits[1, 17] = poison or 0.0
    if poison is None:
        logits[1] = -math.inf
    assert bench.choose([0, 1, 2], logits)[0] == [expected[0], -1, expected[2]]
    if params.get("repetition_penalty"):
        assert int((bench.state.counts[1] > 0).sum()) == 0, "no token, nothing to count"


def test_equal_logits_beyond_the_candidates_are_kept_by_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not fit is done in passes over the row, with the same result."""
    monkeypatch.setattr(sample_tokens, "CANDIDATES", 16)
    benches = torch_bench, bench = pair(200)
    for slot, params in enumerate(
        [{"top_k": 7}, {"top_p": 0.25}, {"top_k": 90, "top_p": 0.5}, {"min_p": 1.0}]
    ):
        start_both(benches, slot, SamplingParams(**params), [1], seed=slot)
    tokens: dict[int, set[int]] = {slot: set() for slot in range(4)}
    logits = torch.zeros(4, 200)
    for _ in range(3):
        expected = torch_bench.step([0, 1, 2, 3], logits).token_ids.tolist()
        assert bench.choose([0, 1, 2, 3], logits)[0] == expected
        for slot, token in enumerate(expected):
            tokens[slot].add(token)
    assert max(tokens[0]) < 7 and max(tokens[1]) < 50 and max(tokens[2]) < 45
    assert max(tokens[3]) >= 90


def test_a_grammar_masks_its_rows_and_leaves_log_probabilities_alone() -> None:
    benches = _, bench = pair(70)
    params = SamplingParams(temperature=0.0, logprobs=3)
    for slot in range(3):
        start_both(
            benches, slot, params, [1],
            grammar=GRAMMAR if slot != 1 else None,
        )  # fmt: skip
    logits = torch.randn((3, 70), generator=torch.Generator().manual_seed(2))
    bits = torch.zeros((2, 3), dtype=torch.int32)
    bits[0, 0], bits[1, 2] = 1 << 9, 1 << 3
    mask = TokenMask(
        bits.to(DEVICE), torch.tensor([0, 2], device=DEVICE),
        torch.tensor([0, -1, 1], device=DEVICE),
    )  # fmt: skip
    tokens, logprobs = bench.choose([0, 1, 2], logits, mask)
    assert tokens == [9, int(logits[1].argmax()), 67]
    expected = token_logprobs(logits.to(DEVICE), torch.tensor(tokens, device=DEVICE), 3)
    torch.testing.assert_close(logprobs.logprob, expected.logprob, atol=2e-5, rtol=0)
    assert torch.equal(logprobs.top_ids[:, :3].long(), expected.top_ids)


@pytest.mark.parametrize("k", [0, 4, 20, 25, -1])
def test_prompt_log_probabilities_equal_those_of_torch(k: int) -> None:
    bench = KernelBench(301)
    logits = (torch.randn((5, 301), generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    logits[1] = 0.5  # All equal: more top tokens than there is room for.
    targets = torch.tensor([3, 300, 0, 17, 150], device=DEVICE)
    actual = bench.sampler.prompt_logprobs(logits.to(DEVICE), targets, k)
    expected = token_logprobs(logits.to(DEVICE), targets, 301 if k < 0 else k)
    assert torch.equal(actual.top_ids.long(), expected.top_ids)
    assert torch.equal(actual.rank.long(), expected.rank)
    torch.testing.assert_close(actual.logprob, expected.logprob, atol=2e-5, rtol=0)
    torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, atol=2e-5, rtol=0)


def test_top_tokens_among_more_equals_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_tokens, "LIKELIEST", 16)
    test_prompt_log_probabilities_equal_those_of_torch(4)


def test_books_after_a_preemption_are_those_of_a_run_without_one() -> None:
    """Bad words, stop ids before min_tokens, and counts, made by the host for a resumed request."""
    rng = np.random.default_rng(5)
    params = SamplingParams(
        temperature=0.7, min_tokens=4, presence_penalty=0.5, allowed_token_ids=tuple(range(2, 30))
    )
    more: dict[str, Any] = {
        "stop_token_ids": (4, 31, 90),
        "bad_words_token_ids": ((5, 6), (6,), (2, 3, 4), (40, 41)),
    }
    whole, torn = KernelBench(33), KernelBench(33)
    whole.start(0, params, [1, 5], seed=4, **more)
    torn.start(0, params, [1, 5], seed=4, **more)
    slot = 0
    for step in range(9):
        logits = torch.from_numpy(rng.normal(size=(1, 33))).float()
        logits[:, 2:7] += 3
        if step in (3, 6):
            torn.state.release(slot)
            output = torn.tokens[slot][2:]
            slot = step
            torn.start(slot, params, [1, 5], output=output, seed=4, **more)
        whole.choose([0], logits)
        torn.choose([slot], logits)
        assert torn.tokens[slot] == whole.tokens[0]
        assert torch.equal(torn.state.allowed[slot], whole.state.allowed[0])
        assert torch.equal(torn.state.counts[slot], whole.state.counts[0])


def test_what_a_step_asks_for_says_how_it_ends() -> None:
    bench = KernelBench(50)
    for slot, more in enumerate([{}, {"top_p": 0.5}, {"logprobs": 20}, {"logprobs": 21}]):
        bench.start(slot, SamplingParams(**more), [1])
    bench.start(4, SamplingParams(), [1], grammar=GRAMMAR)
    sampler = bench.sampler
    assert [sampler.is_plain([slot]) for slot in range(5)] == [True] + [False] * 4
    assert [sampler.recordable([slot]) for slot in range(5)] == [True, True, True, False, False]
    assert sampler.recordable([0, 1, 2]) and not sampler.recordable([0, 3])
    tokens, logprobs = bench.choose([2, 3], torch.randn(2, 50))
    assert logprobs.top_ids.shape == (2, 21) and all(token >= 0 for token in tokens)
    bench.state.release(3)
    bench.start(3, SamplingParams(), [1])
    assert sampler.is_plain([0, 3])


def settings_of(vocab_size: int) -> Any:
    """Any mix of what requests may ask for."""
    ids = strategies.lists(strategies.integers(0, vocab_size - 1), min_size=1, max_size=9)
    return strategies.fixed_dictionaries(
        {},
        optional={
            "temperature": strategies.sampled_from([0.0, 0.3, 1.0, 1.7]),
            "top_k": strategies.integers(1, vocab_size),
            "top_p": strategies.floats(0.01, 0.999),
            "min_p": strategies.floats(0.0, 1.0),
            "presence_penalty": strategies.floats(-2, 2),
            "frequency_penalty": strategies.floats(-2, 2),
            "repetition_penalty": strategies.floats(0.2, 5),
            "logit_bias": strategies.dictionaries(
                strategies.integers(0, vocab_size - 1), strategies.floats(-20, 20), max_size=9
            ),
            "allowed_token_ids": ids.map(tuple),
        },
    )


@hypothesis.settings(max_examples=12 if DEVICE == "cpu" else 300, deadline=None)
@hypothesis.given(
    params=strategies.lists(settings_of(90), min_size=2, max_size=2),
    seed=strategies.integers(0, 2**32 - 1),
    scale=strategies.sampled_from([0.0, 0.1, 3.0]),
)
def test_any_parameters_give_the_tokens_of_torch(
    params: list[dict[str, Any]], seed: int, scale: float
) -> None:
    benches = torch_bench, bench = pair(90)
    for slot, more in enumerate(params):
        start_both(benches, slot, SamplingParams(**more), [1, 2, 3], output=[4, 4], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((2, 90), generator=generator) * scale
    near = [
        oracle_token(row, bench.starts[slot], bench.tokens[slot])[1]
        for slot, row in enumerate(logits.double().numpy())
    ]
    expected = torch_bench.step([0, 1], logits).token_ids.tolist()
    actual, _ = bench.choose([0, 1], logits)
    for slot in range(2):
        assert actual[slot] == expected[slot] or near[slot], bench.starts[slot]
