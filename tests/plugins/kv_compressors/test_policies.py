"""The policies against their formulas, token by token in float64; and what they are for."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.protocols.kv_compressors import KVCompressor
from jackfield.plugins.kv_compressors.by_keys import RECENT, SINKS, KeyDiff, KeyNorm
from jackfield.plugins.kv_compressors.by_queries import (
    RKV,
    ExpectedAttention,
    MergingSnapKV,
    SnapKV,
)
from jackfield.plugins.kv_compressors.fast import FastMergingSnapKV, FastRKV
from jackfield.plugins.kv_compressors.weighted import Weighted

from helpers import kept_tokens

COUNT, HEADS, GROUP, DIM = 45, 2, 3, 8
SPEC = AttentionSpec(num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, scale=0.4)


def case(num_queries: int, peak: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Random keys and values [COUNT, HEADS, DIM], and queries; `peak`: size of the queries."""
    draw = torch.Generator().manual_seed(num_queries)
    keys, values = torch.randn(2, COUNT, HEADS, DIM, generator=draw)
    return keys, values, torch.randn(num_queries, HEADS * GROUP, DIM, generator=draw) * peak


def softmax(numbers: list[float]) -> list[float]:
    top = max(numbers)
    powers = [math.exp(number - top) for number in numbers]
    return [power / sum(powers) for power in powers]


def logit(queries: torch.Tensor, keys: torch.Tensor, query: int, head: int, token: int) -> float:
    kv_head = head // GROUP
    return float(queries[query, head].double() @ keys[token, kv_head].double()) * SPEC.scale


def middle(scores: torch.Tensor, sinks: int = SINKS) -> torch.Tensor:
    assert scores[:sinks].isinf().all() and scores[-RECENT:].isinf().all()
    assert scores[sinks:-RECENT].isfinite().all()
    return scores[sinks:-RECENT].double()


@pytest.mark.parametrize("peak", [1.0, 8.0])
def test_snap_kv(peak: float) -> None:
    keys, values, queries = case(6, peak)
    total = torch.zeros(COUNT, HEADS * GROUP, dtype=torch.float64)
    for query in range(6):
        last = COUNT - 6 + query
        for head in range(HEADS * GROUP):
            row = softmax([logit(queries, keys, query, head, t) for t in range(last + 1)])
            total[: last + 1, head] += torch.tensor(row, dtype=torch.float64)
    mean = total / torch.tensor([sum(t <= COUNT - 6 + q for q in range(6)) for t in range(COUNT)])[
        :, None
    ]  # fmt: skip
    pooled = torch.stack([mean[max(0, t - 2) : t + 3].mean(0) for t in range(COUNT)])
    expected = pooled.unflatten(1, (HEADS, GROUP)).mean(2)
    scores = SnapKV().scores(SPEC, keys, values, queries=queries)
    torch.testing.assert_close(middle(scores, 0), expected[:-RECENT], atol=1e-6, rtol=1e-4)


def test_expected_attention_is_the_expectation_over_normal_queries() -> None:
    """With the explicit mean and covariance of the queries."""
    keys, values, queries = case(9)
    expected = torch.zeros(COUNT, HEADS, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        own = queries[:, head].double()
        mean = own.mean(0)
        covariance = (own - mean).T @ (own - mean) / 9
        numbers = []
        for token in range(COUNT):
            key = keys[token, head // GROUP].double()
            spread = float(key @ covariance @ key) * SPEC.scale**2
            numbers.append(float(mean @ key) * SPEC.scale + spread / 2)
        expected[:, head // GROUP] += torch.tensor(softmax(numbers), dtype=torch.float64) / GROUP
    expected *= values.double().norm(dim=2)
    scores = ExpectedAttention().scores(SPEC, keys, values, queries=queries)
    torch.testing.assert_close(middle(scores), expected[SINKS:-RECENT], atol=1e-6, rtol=1e-4)


def test_r_kv() -> None:
    keys, values, queries = case(8)
    keys[20:30] = keys[10:11] * 2 + keys[20:30] * 0.1  # Repetitions.
    expected = torch.zeros(COUNT, HEADS, dtype=torch.float64)
    for kv_head in range(HEADS):
        weights = torch.zeros(COUNT, dtype=torch.float64)
        for query in range(8):
            heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
            row = softmax([
                max(logit(queries, keys, query, head, token) for head in heads)
                for token in range(COUNT - 8 + query + 1)
            ])  # fmt: skip
            weights[: len(row)] += torch.tensor(row, dtype=torch.float64) / 8
        important = [float(weights[max(0, t - 3) : t + 4].max()) for t in range(COUNT)]
        unit = keys[:, kv_head].double()
        unit /= unit.norm(dim=1, keepdim=True)
        mean = [0.0] * COUNT
        for row_number in range(COUNT):
            cosines = [float(unit[row_number] @ unit[t]) for t in range(COUNT)]
            cosines[row_number] = 0.0
            similar = [t for t in range(COUNT) if cosines[t] > 0.5]
            if similar:
                cosines[similar[-1]] = 0.0
            mean = [old + new / COUNT for old, new in zip(mean, cosines, strict=True)]
        pairs = zip(important, softmax(mean), strict=True)
        expected[:, kv_head] = torch.tensor([0.1 * i - 0.9 * r for i, r in pairs])
    scores = RKV().scores(SPEC, keys, values, queries=queries)
    torch.testing.assert_close(middle(scores), expected[SINKS:-RECENT], atol=1e-6, rtol=1e-4)


def test_r_kv_drops_repetitions_but_the_newest() -> None:
    keys, values, queries = case(8, peak=0.0)
    keys[10:30] = keys[9:10]
    kept = kept_tokens(RKV().scores(SPEC, keys, values, queries=queries), COUNT - 19)
    for head in range(HEADS):
        repeats = [token for token in kept[:, head].tolist() if 9 <= token < 30]
        assert 29 in repeats and len(repeats) <= 3


def test_key_diff_keeps_what_is_unlike_the_rest() -> None:
    keys, values, _ = case(1)
    keys = torch.ones(COUNT, HEADS, DIM) + 0.05 * keys
    keys[17, 0], keys[23, 1] = -keys[17, 0], torch.arange(DIM) - 3.0
    mean = (keys.double() / keys.double().norm(dim=2, keepdim=True)).mean(0)
    expected = -torch.cosine_similarity(keys.double(), mean[None].expand_as(keys), dim=2)
    scores = KeyDiff().scores(SPEC, keys, values)
    torch.testing.assert_close(middle(scores), expected[SINKS:-RECENT], atol=1e-5, rtol=1e-4)
    assert (scores[SINKS:-RECENT].argmax(0) + SINKS).tolist() == [17, 23]


def test_the_last_queries_find_a_needle_in_each_head() -> None:
    """A key that the queries of a head's group look for, between many others."""
    keys, values, _ = case(1)
    keys[12, 0] *= 3
    keys[31, 1] *= 3
    for policy in (SnapKV(), ExpectedAttention()):
        queries = torch.zeros(policy.num_queries, HEADS * GROUP, DIM)
        queries[:, :GROUP], queries[:, GROUP:] = keys[12, 0], keys[31, 1]
        kept = kept_tokens(policy.scores(SPEC, keys, values, queries=queries), 16)
        assert 12 in kept[:, 0] and 31 in kept[:, 1]


def test_merged_values() -> None:
    keys, values, _ = case(1)
    keys[20:26] = keys[5:6] + 0.1 * keys[20:26]  # Dropped, and like the 5th; its value takes them.
    chosen = torch.tensor([[t, t] for t in range(20)])
    merged = MergingSnapKV().merged_values(SPEC, keys, values, chosen)
    for head in range(HEADS):
        unit = keys[:, head].double()
        unit /= unit.norm(dim=1, keepdim=True)
        own = values[:, head].double()
        sums, weights = own[:20].clone(), torch.ones(20, dtype=torch.float64)
        for token in range(20, COUNT):
            cosines = unit[:20] @ unit[token]
            target = int(cosines.argmax())
            if cosines[target] >= 0.75:
                norm, other = own[token].norm(), own[target].norm()
                weight = cosines[target] * norm / (norm + other)
                sums[target] += weight * own[token]
                weights[target] += weight
        expected = sums / weights[:, None]
        torch.testing.assert_close(merged[:, head].double(), expected, atol=1e-5, rtol=1e-4)
        changed = (merged[:, head] - values[:20, head]).abs().amax(1) > 1e-4
        assert changed[5] and not changed.all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy", [KeyNorm, KeyDiff, SnapKV, MergingSnapKV, ExpectedAttention, RKV]
)
def test_16_bit_caches_on_a_gpu_score_like_float32(policy: type[KVCompressor]) -> None:
    """At the shapes of an 8B model; nearly all of what stays is the same."""
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    draw = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 1500, 8, 128, generator=draw).bfloat16()
    more = {}
    if policy.num_queries:
        queries = torch.randn(policy.num_queries, 32, 128, generator=draw).bfloat16()
        more["queries"] = queries
    expected = policy().scores(
        spec, keys.float(), values.float(), **{name: each.float() for name, each in more.items()}
    )
    on_gpu = {name: each.cuda() for name, each in more.items()}
    scores = policy().scores(spec, keys.cuda(), values.cuda(), **on_gpu).cpu()
    want, got = kept_tokens(expected, 500), kept_tokens(scores, 500)
    for head in range(8):
        same = len(set(want[:, head].tolist()) & set(got[:, head].tolist()))
        assert same >= 490


def test_weighted() -> None:
    """Each measure is divided by the largest of its head, first and last tokens left out."""
    keys, values, queries = case(8)
    values[17, 0] *= 20  # Near the top in one measure.
    keys[23, 1] = -keys[:, 1].mean(0) * 5  # Unlike the others.
    keys += torch.tensor([2.0, *[0.0] * (DIM - 1)])
    received = torch.zeros(COUNT, HEADS, dtype=torch.float64)
    for query in range(8):
        for head in range(HEADS * GROUP):
            row = [logit(queries, keys, query, head, t) for t in range(COUNT - 8 + query + 1)]
            received[: len(row), head // GROUP] += torch.tensor(softmax(row)).double() / 8 / GROUP
    expected = torch.zeros(COUNT, HEADS, dtype=torch.float64)
    for head in range(HEADS):
        lengths = [keys[:, head].double().norm(dim=1), values[:, head].double().norm(dim=1)]
        parts = [each / each[SINKS:-RECENT].max() for each in (received[:, head], *lengths)]
        unit = keys[:, head].double() / lengths[0][:, None]
        mean = unit.sum(0) / unit.sum(0).norm()
        for token in range(SINKS, COUNT - RECENT):
            own = [float(part[token]) for part in parts]
            expected[token, head] = 0.4 * own[0] + 0.4 * own[1] + 0.2 * own[2]
            expected[token, head] += (max(own) >= 0.9) + bool(unit[token] @ mean < 0.3)
    scores = Weighted().scores(SPEC, keys, values, queries=queries)
    torch.testing.assert_close(middle(scores), expected[SINKS:-RECENT], atol=1e-5, rtol=1e-4)
    assert scores[17, 0] > 1 and scores[SINKS:-RECENT].amin() < 1


@pytest.mark.parametrize("count", [40, 700])
def test_fast_r_kv_looks_for_repetitions_among_few_tokens(count: int) -> None:
    """Among all while they are few; otherwise a repetition is found of the newest, or of others
    that stand for it."""
    draw = torch.Generator().manual_seed(count)
    keys = torch.randn(count, HEADS, DIM, generator=draw)
    queries = torch.randn(8, HEADS * GROUP, DIM, generator=draw)
    policy, exact = FastRKV(), RKV()
    directions = torch.nn.functional.normalize(keys, dim=2).transpose(0, 1)
    found = policy.newest_similar(keys, directions)
    half = policy.candidates // 2
    spread = [n * (count - half) // half for n in range(half)]
    own = list(range(count)) if count <= 2 * half else [*spread, *range(count - half, count)]
    cosines = (directions @ directions.transpose(1, 2)).double()
    for head in range(HEADS):
        for token in range(count):
            similar = [t for t in own if t != token and cosines[head, token, t] > 0.5]
            assert found[head, token] == (similar[-1] if similar else -1)
    if count <= 2 * half:
        arguments = (SPEC, keys, keys)
        assert torch.equal(
            policy.scores(*arguments, queries=queries), exact.scores(*arguments, queries=queries)
        )


def test_fast_merging_gives_values_to_the_most_similar_neighbour_that_stays() -> None:
    keys, values, _ = case(1)
    keys[:, :, 0] += 4.0  # Alike enough to be merged.
    chosen = torch.stack([torch.arange(0, COUNT, 5), torch.arange(1, COUNT, 5)], dim=1)
    merged = FastMergingSnapKV().merged_values(SPEC, keys, values, chosen)
    changed = 0
    for head in range(HEADS):
        kept = chosen[:, head].tolist()
        sums = values[kept, head].double()
        weights = torch.ones(len(kept), dtype=torch.float64)
        for token in range(COUNT):
            if token in kept:
                continue
            after = sum(place < token for place in kept)
            near = [n for n in range(after - 2, after + 2) if 0 <= n < len(kept)]
            own = keys[token, head].double()
            cosine = {
                n: float(own @ keys[kept[n], head].double())
                / float(own.norm() * keys[kept[n], head].double().norm())
                for n in near
            }
            best = max(near, key=lambda n: cosine[n])
            if cosine[best] >= 0.75:
                size, aim = values[token, head].norm(), values[kept[best], head].norm()
                share = cosine[best] * float(size / (size + aim))
                sums[best] += share * values[token, head].double()
                weights[best] += share
                changed += 1
        torch.testing.assert_close(
            merged[:, head].double(), sums / weights[:, None], atol=1e-5, rtol=1e-4
        )
    assert changed > 10


def test_fast_policies_need_operations_by_the_token_not_by_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted: at twice the tokens, about twice as many, where the others need four times."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # Kernels do not count theirs.
    draw = torch.Generator().manual_seed(0)

    def counted(policy: KVCompressor, count: int) -> int:
        keys = torch.randn(count, HEADS, DIM, generator=draw)
        queries = torch.randn(policy.num_queries, HEADS * GROUP, DIM, generator=draw)
        chosen = torch.arange(0, count, 2)[:, None].expand(-1, HEADS).contiguous()
        with FlopCounterMode(display=False) as flops:
            policy.scores(SPEC, keys, keys, queries=queries)
            policy.merged_values(SPEC, keys, keys, chosen)
        return int(flops.get_total_flops())

    for exact, fast in ((RKV(), FastRKV()), (MergingSnapKV(), FastMergingSnapKV())):
        assert counted(fast, 4096) < 2.2 * counted(fast, 2048)
        assert counted(exact, 4096) > 3 * counted(exact, 2048)
        assert 6 * counted(fast, 4096) < counted(exact, 4096)
