"""Suffix decoding, in torch and by the kernels: what a plain search by the same rules finds."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.protocols import KnownTokens, RequestText, SpeculatorSetup
from jackfield.plugins.speculators import suffix, suffix_tables
from jackfield.plugins.speculators.suffix import Suffix, SuffixOptions

LONGEST = 60
SLOTS = 3


class Plain:
    """The rules, by lists, for one row at a time. Scores are rounded as those of the tables, since
    some are equal but for that."""

    def __init__(self, num_drafts: int, options: SuffixOptions, cells: int, shared: int) -> None:
        self.num_drafts, self.options = num_drafts, options
        self.own_buckets, self.num_shared = cells // 8, shared
        self.shared_buckets = suffix._power_of_2(4 * shared) // 8
        self.shared: list[int] = []
        self.owners: list[int] = []
        self.first: list[int] = []
        self.cells: dict[tuple[int, int], int] = {}

    @staticmethod
    def bucket(last: list[int], owner: int, num_buckets: int) -> int:
        state = (owner + len(last)) % 2**31
        for token in last:
            state = (state * 1000003 + token + 1) % 2**31
        state = ((state ^ state >> 15) * 741103597) % 2**31
        return (state ^ state >> 12) % num_buckets

    def noted(
        self, cells: dict[tuple[int, int], int], text: list[int], begin: int, owner: int, many: int
    ) -> None:
        for place in range(begin, len(text)):
            for size in (1, 2, 4, 8):
                last = text[place - size + 1 : place + 1]
                if place - size + 1 >= begin and min(last, default=-1) >= 0:
                    cells[self.bucket(last, owner, many), place % 8] = place

    def release(self, output: list[int], owner: int, above: int) -> None:
        """An output of a request that has ended, of so many tokens less than the host knows."""
        begin, output = len(self.shared), output + [-1] * above
        if self.options.suffix_decoding_max_cached_requests and len(output) > 1:
            self.shared += [*output, -1]
            self.owners += [owner] * (len(output) + 1)
            self.first.append(begin)
            self.noted(self.cells, self.shared, begin, owner, self.shared_buckets)

    def propose(self, tokens: list[int], owner: int) -> list[int]:
        own: dict[tuple[int, int], int] = {}
        self.noted(own, tokens[:-1], 0, 0, self.own_buckets)
        best = self.best(tokens, tokens, own, 0, 0, self.own_buckets)
        most = self.options.suffix_decoding_max_cached_requests
        if most:
            first = (self.first[-most:] or [0])[0]
            first = max(first, len(self.shared) - self.num_shared)
            more = (self.shared, self.cells, first, owner, self.shared_buckets)
            other = self.best(tokens, *more)
            best = other if other[0] > best[0] else best
        return best[2]

    def best(
        self, tokens: list[int], text: list[int], cells: Any, first: int, owner: int, many: int
    ) -> tuple[np.float32, int, list[int]]:
        depth = self.options.suffix_decoding_max_tree_depth
        matches: dict[int, int] = {}
        for size in (1, 2, 4, 8):
            last = tokens[-size:]
            for way in range(8 if len(last) == size else 0):
                place = cells.get((self.bucket(last, owner, many), way))
                if place is None or not first <= place < len(text) - 1:
                    continue
                if text is self.shared and self.owners[place] != owner:
                    continue
                matched = 0
                while (
                    matched < min(depth - 1, len(tokens))
                    and place - matched >= first
                    and text[place - matched] == tokens[-1 - matched]
                ):
                    matched += 1
                if matched >= min(size, depth - 1):
                    matches[place] = matched
        best: tuple[np.float32, int, list[int]] = (np.float32(0), 0, [])
        for level in range(1, 1 + max(matches.values(), default=0)):
            at = [place for place, matched in matches.items() if matched >= level]
            budget = min(int(level * self.options.suffix_decoding_max_spec_factor), self.num_drafts)
            product, score, drafts = np.float32(1), np.float32(0), []
            while len(drafts) < min(budget, depth - level):
                at = [place + 1 for place in at if place + 1 < len(text) and text[place + 1] >= 0]
                if not at:
                    break
                followers = [text[place] for place in at]
                token = min(set(followers), key=lambda token: (-followers.count(token), token))
                product *= np.float32(followers.count(token)) / np.float32(len(at))
                if product < self.options.suffix_decoding_min_token_prob:
                    break
                score, drafts = score + product, [*drafts, token]
                at = [place for place in at if text[place] == token]
            best = max(best, (score, level, drafts), key=lambda each: each[:2])
        return best


def kinds() -> list[bool]:
    """With the torch functions, and the kernels where Triton is."""
    return [False, True] if suffix._launches else [False]


def made(kernels: bool, num_drafts: int, options: dict[str, Any]) -> Suffix:
    device = torch.device("cuda" if kernels and torch.cuda.is_available() else "cpu")
    setup = SpeculatorSetup(
        num_drafts=num_drafts, options=msgspec.convert(options, SuffixOptions), vocab_size=50,
        max_model_len=LONGEST, num_slots=SLOTS, device=device,
    )  # fmt: skip
    speculator = Suffix(setup)
    speculator._launches = kernels
    return speculator


def proposed(speculator: Suffix, texts: dict[int, list[int]]) -> list[list[int]]:
    history = torch.full((SLOTS + 1, LONGEST + 9), 7, dtype=torch.int32)
    for slot, tokens in texts.items():
        history[slot, : len(tokens)] = torch.tensor(tokens)
    slots, lengths = list(texts), [len(tokens) for tokens in texts.values()]
    rows = KnownTokens(history, torch.tensor(slots), torch.tensor(lengths))
    device = speculator._device
    drafts = speculator.propose(KnownTokens(*(part.to(device) for part in rows[:3])))
    pairs = zip(drafts.token_ids.tolist(), drafts.counts.tolist(), strict=True)
    return [ids[:count] for ids, count in pairs]


def ended(speculator: Suffix, slot: int, tokens: list[int], bound: int) -> None:
    history = torch.full((SLOTS + 1, LONGEST + 9), 7, dtype=torch.int32)
    history[slot, : len(tokens)] = torch.tensor(tokens)
    rows = KnownTokens(history, torch.tensor([slot]), torch.tensor([len(tokens)]))
    device = speculator._device
    speculator.release(KnownTokens(*(part.to(device) for part in rows[:3])), slot, bound)


def texts(most: int) -> st.SearchStrategy[list[int]]:
    """Of few kinds of tokens, and with repetitions, as drafts need them."""
    pieces = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    times = st.integers(1, 6)
    repeated = st.tuples(pieces, times).map(lambda pair: pair[0] * pair[1])
    return st.lists(repeated, min_size=1, max_size=6).map(
        lambda parts: list(itertools.chain(*parts))[:most]
    )


OPTIONS = st.fixed_dictionaries(
    {
        "suffix_decoding_max_tree_depth": st.sampled_from([2, 3, 5, 8, 24]),
        "suffix_decoding_max_spec_factor": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "suffix_decoding_min_token_prob": st.sampled_from([0.0, 0.125, 0.5, 1.0]),
        "suffix_decoding_max_cached_requests": st.sampled_from([0, 1, 2, 9]),
    }
)
REQUEST = st.tuples(texts(28), texts(28), st.integers(0, 1), st.integers(0, 4))
"""Prompt, output, tenant, and how many tokens the host's bound is above."""


REQUESTS = st.lists(REQUEST, min_size=1, max_size=5)


@settings(deadline=None, max_examples=25)
@given(num_drafts=st.integers(1, 9), options=OPTIONS, requests=REQUESTS, step=st.integers(2, 9))
def test_drafts_are_those_of_a_plain_search(
    num_drafts: int, options: dict[str, Any], requests: list[Any], step: int
) -> None:
    """One request after the other, each asked at the end of its prompt and after each few tokens,
    with what the ones before have left."""
    check(False, num_drafts, options, requests, step)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", kinds())
@settings(deadline=None, max_examples=300)
@given(num_drafts=st.integers(1, 9), options=OPTIONS, requests=REQUESTS, step=st.integers(1, 9))
def test_many_drafts_are_those_of_a_plain_search(
    kernels: bool, num_drafts: int, options: dict[str, Any], requests: list[Any], step: int
) -> None:
    check(kernels, num_drafts, options, requests, step)


@pytest.mark.skipif(not suffix._launches, reason="needs Triton")
@settings(deadline=None, max_examples=6)
@given(num_drafts=st.integers(1, 9), options=OPTIONS, requests=REQUESTS, step=st.integers(4, 9))
def test_the_kernels_do_the_same(
    num_drafts: int, options: dict[str, Any], requests: list[Any], step: int
) -> None:
    check(True, num_drafts, options, requests, step)


def check(
    kernels: bool, num_drafts: int, options: dict[str, Any], requests: list[Any], step: int
) -> None:
    speculator = made(kernels, num_drafts, options)
    plain = Plain(
        num_drafts, msgspec.convert(options, SuffixOptions), speculator._num_cells,
        speculator._num_shared,
    )  # fmt: skip
    for number, (prompt, output, tenant, above) in enumerate(requests):
        slot = number % SLOTS
        speculator.start(RequestText(slot, len(prompt), len(prompt), 5 + tenant))
        tokens = list(prompt)
        for begin in range(0, len(output) + 1, min(step, num_drafts + 1)):
            tokens = prompt + output[:begin]
            assert proposed(speculator, {slot: tokens}) == [plain.propose(tokens, 5 + tenant)]
        ended(speculator, slot, tokens, len(tokens) + above)
        plain.release(tokens[len(prompt) :], 5 + tenant, above)


@pytest.mark.parametrize("kernels", kinds())
def test_rows_are_independent_and_tenants_too(kernels: bool) -> None:
    """Text of another tenant never becomes a draft, nor does a prompt of another request."""
    speculator = made(kernels, 4, {})
    phrase = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for slot, tenant in enumerate((1, 2)):
        speculator.start(RequestText(slot, 2, 2, tenant))
    assert proposed(speculator, {0: [11, 12], 1: [21, 22]}) == [[], []]
    ended(speculator, 0, [11, 12, *phrase], 11)
    asks = [30, *phrase[:4]]
    for tenant, expected in ((1, [5, 6, 7, 8]), (2, [])):
        speculator.start(RequestText(2, 5, 5, tenant))
        found = proposed(speculator, {1: [21, 22, *phrase[:3]], 2: asks})
        assert found == [[], expected]
    speculator.start(RequestText(0, 9, 9, 2))
    proposed(speculator, {0: phrase})
    ended(speculator, 0, phrase, 9)
    assert proposed(speculator, {2: asks}) == [[]], "that was a prompt"


@pytest.mark.parametrize("kernels", kinds())
def test_an_output_is_found_by_its_first_token(kernels: bool) -> None:
    speculator = made(kernels, 4, {})
    speculator.start(RequestText(0, 2, 2, 1))
    ended(speculator, 0, [11, 12, 1, 2, 3], 5)
    speculator.start(RequestText(1, 2, 2, 1))
    assert proposed(speculator, {1: [30, 1]}) == [[2]]


@pytest.mark.parametrize("kernels", kinds())
@pytest.mark.parametrize("period", [5, 8, 16, 27])
def test_a_text_that_repeats_itself_has_most_drafts(kernels: bool, period: int) -> None:
    """Also where the place before is a multiple of the cells of a bucket away, and where the match
    is so long that the depth leaves it few: half of the depth is best."""
    speculator = made(kernels, 24, {})
    text = [20 + number % period for number in range(LONGEST)]
    known = LONGEST - 1
    speculator.start(RequestText(0, known - 1, known - 1, 1))
    # Of a period of 8, the cells have the latest place alone, which so many tokens follow.
    expected = [20 + (known + number) % period for number in range(8 if period == 8 else 12)]
    assert proposed(speculator, {0: text[:known]}) == [expected]


@pytest.mark.parametrize("kernels", kinds())
@pytest.mark.parametrize("cached", [0, 9])
def test_a_prediction_is_drafted_for_its_request_alone(kernels: bool, cached: int) -> None:
    """From its beginning, and again where the output returns to it; also with an output beside
    it that others may find."""
    speculator = made(kernels, 4, {"suffix_decoding_max_cached_requests": cached})
    prompt, prediction = [11, 12, 13, 14, 15, 16, 17], (1, 2, 3, 4, 5, 6, 7, 8)
    speculator.start(RequestText(0, 7, 7, 1, tuple(prompt), prediction))
    speculator.start(RequestText(1, 7, 7, 1, tuple(prompt)))
    both = {0: prompt, 1: prompt}
    assert proposed(speculator, both) == [[1, 2, 3, 4], []]
    assert proposed(speculator, {0: [*prompt, 1, 9, 3, 4]}) == [[5, 6]]
    ended(speculator, 1, [*prompt, 3, 4, 20, 21, 22], 12)
    speculator.start(RequestText(2, 7, 7, 1, tuple(prompt)))
    found = proposed(speculator, {0: [*prompt, 1, 2, 3, 4], 2: [*prompt, 3, 4]})
    assert found == [[5, 6, 7, 8], [20, 21] if cached else []]
    ended(speculator, 0, prompt, 7)
    speculator.start(RequestText(0, 7, 7, 1, tuple(prompt)))
    assert proposed(speculator, both) == [[], []]


def test_a_resumed_request_shares_its_output_once() -> None:
    """It left its slot with a part of it, which is known when it takes one again."""
    speculator = made(False, 4, {})
    prompt, output = [11, 12], [1, 2, 3, 4, 5, 6, 7, 8]
    speculator.start(RequestText(0, 2, 2, 1))
    ended(speculator, 0, prompt + output[:4], 6)
    speculator.start(RequestText(1, 6, 2, 1))
    ended(speculator, 1, prompt + output, 10)
    assert speculator._shared.tokens[: speculator._end].tolist() == [1, 2, 3, 4, -1, 5, 6, 7, 8, -1]


@pytest.mark.parametrize("kernels", kinds())
def test_the_oldest_outputs_are_forgotten(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of requests, by the room for their tokens, and all once places run out."""
    monkeypatch.setattr(suffix, "SHARED_TOKENS_PER_REQUEST", 8)
    speculator = made(kernels, 2, {"suffix_decoding_max_cached_requests": 3})

    def end(first: int, size: int = 5) -> None:
        speculator.start(RequestText(0, 2, 2, 1))
        ended(speculator, 0, [11, 12, *range(first, first + size)], 2 + size)

    def finds(first: int) -> bool:
        speculator.start(RequestText(1, 3, 3, 1))
        expected = [[first + 3, first + 4]]
        found = proposed(speculator, {1: [first, first + 1, first + 2]})
        assert found in (expected, [[]])
        return found == expected

    for first in (20, 30, 40):
        end(first)
    assert [finds(first) for first in (20, 30, 40)] == [True] * 3
    end(10)
    assert [finds(first) for first in (20, 30, 40, 10)] == [False, True, True, True]
    end(100, 20)
    assert [finds(first) for first in (30, 40, 10, 100)] == [False, False, False, True]
    monkeypatch.setattr(suffix, "LAST_PLACE", speculator._end + 3)
    end(40)
    assert not finds(40) and speculator._end == 0
    end(30)
    assert finds(30)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, "tree_depth"),
        ({"suffix_decoding_max_cached_requests": -1}, "cached_requests"),
        ({"suffix_decoding_min_token_prob": 1.5}, "token_prob"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "spec_factor"),
        ({"suffix_decoding": 1}, "suffix_decoding"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(options, SuffixOptions)


def test_the_tables_of_both_are_one() -> None:
    """The kernels have the numbers of the torch functions."""
    kernels = pytest.importorskip("jackfield.kernels.step.suffix_drafts")
    sizes = tuple(1 << level for level in range(kernels.LEVELS.value))
    assert sizes == suffix_tables.SIZES and kernels.LONGEST.value == sizes[-1]
    for name in ("WAYS", "MASK", "FACTOR", "MIX"):
        assert getattr(kernels, name).value == getattr(suffix_tables, name)
