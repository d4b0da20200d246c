"""The kit of KV compressors: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.plugins.conformance.kv_compressors import KVCompressorKit
from jackfield.plugins.kv_compressors.by_keys import KeyNorm


class TestWindow(KVCompressorKit):
    name = "window"


class TestKeyNorm(KVCompressorKit):
    name = "key_norm"


class TestKeyDiff(KVCompressorKit):
    name = "key_diff"


class TestSnapKV(KVCompressorKit):
    name = "snap_kv"


class TestMergingSnapKV(KVCompressorKit):
    name = "snap_kv_merge"


class TestExpectedAttention(KVCompressorKit):
    name = "expected_attention"


class TestRKV(KVCompressorKit):
    name = "r_kv"


class TestFastRKV(KVCompressorKit):
    name = "r_kv_fast"


class TestFastMergingSnapKV(KVCompressorKit):
    name = "snap_kv_merge_fast"


class TestWeighted(KVCompressorKit):
    name = "weighted"


class Kit(KVCompressorKit):
    name = "subject"
    plugin = plugin_of("kv_compressor", "subject", KeyNorm)


SCORES = "test_every_token_of_every_head_has_a_score"
COPIES = "test_scores_of_caches_are_those_of_copies"
UNCHANGED = "test_keys_and_values_are_read_and_not_changed"
SEEN = "test_requests_seen_before_do_not_matter"
MERGED = "test_merged_values_are_those_of_tokens_that_stay"
ENGINE = "test_an_engine_serves_with_it"


def one_for_all_heads(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return keys.float().mean(dim=(1, 2))


def of_directions(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return (keys / keys.norm(dim=2, keepdim=True)).sum(dim=2)


def in_place(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return keys.mul_(0.5).sum(dim=2)


def in_place_values(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return values.neg_().sum(dim=2)


def by_chance(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return torch.rand(keys.shape[:2])


def heads_first(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return keys.float().norm(dim=2).T


def short_alone(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return torch.arange(128)[: keys.shape[0], None].expand(keys.shape[:2])


class Remembers(KeyNorm):
    """Adds up what it has seen of all requests."""

    def __init__(self) -> None:
        self.calls = 0

    def scores(self, spec: Any, keys: Any, values: Any) -> torch.Tensor:
        self.calls += 1
        return super().scores(spec, keys, values) * self.calls


class KeepsTheFirst(KeyNorm):
    """Measures all keys from the mean of those that it saw first."""

    mean: torch.Tensor | None = None

    def scores(self, spec: Any, keys: Any, values: Any) -> torch.Tensor:
        if self.mean is None:
            self.mean = keys.float().mean()
        return (keys.float() - self.mean).norm(dim=2)


class KeepsEachLength(KeyNorm):
    """Finds what it computed for as many tokens."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}

    def scores(self, spec: Any, keys: Any, values: Any) -> torch.Tensor:
        return self.known.setdefault(len(keys), super().scores(spec, keys, values))


class KeepsTheLargest(KeyNorm):
    """Relative to the largest key so far."""

    def __init__(self) -> None:
        self.largest = 0.0

    def scores(self, spec: Any, keys: Any, values: Any) -> torch.Tensor:
        scores = super().scores(spec, keys, values)
        self.largest = max(self.largest, float(scores.max()) or 1.0)
        return scores / self.largest


def first_block_alone(
    self: Any, spec: Any, caches: Any, blocks: Any, num_tokens: int, **more: Any
) -> torch.Tensor:
    """Reads the blocks where they are, not where the request has them."""
    keys = torch.stack([cache[0, 1:].flatten(0, 1)[:num_tokens] for cache in caches])
    return -keys.float().norm(dim=3).transpose(1, 2).contiguous()


def mean_of_all(self: Any, spec: Any, keys: Any, values: Any, chosen: Any) -> torch.Tensor:
    return KeyNorm.merged_values(self, spec, keys, values, chosen) * 0.5 + values.mean(0) * 0.5


class NeedsArguments(KeyNorm):
    def __init__(self, ratio: float) -> None:
        self.ratio = ratio


def all_values(self: Any, spec: Any, keys: Any, values: Any, chosen: Any) -> torch.Tensor:
    return values


def dropped_alone(self: Any, spec: Any, keys: Any, values: Any, chosen: Any) -> torch.Tensor:
    return values[: len(chosen)].flip(0)


def of_values(self: Any, spec: Any, keys: Any, values: Any) -> torch.Tensor:
    return values.float().norm(dim=2)


def scored(scores: Any, *, reads_values: bool = True) -> type:
    return subclass(KeyNorm, scores=scores, reads_values=reads_values)


MUTANTS = {
    "one score for all heads": Mutant(scored(one_for_all_heads), (SCORES, SEEN, MERGED, ENGINE)),
    "divides by zero": Mutant(scored(of_directions), (SCORES,)),
    "writes to the keys": Mutant(scored(in_place), (UNCHANGED, SEEN, MERGED)),
    "writes to the values": Mutant(scored(in_place_values), (UNCHANGED, SEEN, MERGED)),
    "reads values in secret": Mutant(
        scored(of_values, reads_values=False), (SCORES, MERGED, ENGINE)
    ),
    "by chance": Mutant(scored(by_chance), (UNCHANGED, SEEN)),
    "heads first": Mutant(scored(heads_first), (SCORES, SEEN, MERGED, ENGINE)),
    "fails for long prompts": Mutant(scored(short_alone), (SCORES,)),
    "remembers": Mutant(Remembers, (UNCHANGED, SEEN)),
    "keeps the first request": Mutant(KeepsTheFirst, (SEEN,)),
    "keeps each length": Mutant(KeepsEachLength, (SEEN,)),
    "keeps the largest": Mutant(KeepsTheLargest, (SEEN, SCORES, UNCHANGED)),
    "blocks in another order": Mutant(
        subclass(KeyNorm, cached_scores=first_block_alone), (COPIES,)
    ),
    "merges where nothing is dropped": Mutant(
        subclass(KeyNorm, merged_values=mean_of_all), (MERGED,)
    ),
    "cannot be made": Mutant(NeedsArguments, (SCORES, COPIES, UNCHANGED, SEEN, MERGED, ENGINE)),
    "merges into all tokens": Mutant(subclass(KeyNorm, merged_values=all_values), (MERGED, ENGINE)),
    "values of other tokens": Mutant(subclass(KeyNorm, merged_values=dropped_alone), (MERGED,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
