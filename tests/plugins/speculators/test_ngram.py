"""Prompt lookup, in torch and by the kernel: what a plain search finds."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from jackfield.plugins.speculators.ngram import NgramOptions, lookup

LONGEST = 70


def searched(tokens: list[int], least: int, most: int, num_drafts: int) -> list[int]:
    """Of the longest last tokens that stand before, the first place; by definition."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size :][:num_drafts]
    return []


@pytest.mark.parametrize(
    ("tokens", "least", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 1, 3, [3, 4, 1]),
        ([5, 1, 7, 2, 1, 8, 2, 1], 1, 1, [7, 2, 1]),  # The first of several.
        ([5, 1, 7, 2, 1, 8, 2, 1], 1, 2, [8, 2, 1]),  # A longer one wins.
        ([5, 1, 7, 2, 1, 8, 2, 1], 2, 2, [8, 2, 1]),
        ([4, 4, 4, 4], 1, 2, [4, 4]),  # It may overlap the last tokens.
        ([4, 4], 1, 2, [4]),
        ([1, 2, 3], 1, 3, []),
        ([1, 2, 9, 2], 2, 3, []),  # Too short.
        ([7], 1, 3, []),
    ],
)
def test_cases(tokens: list[int], least: int, most: int, expected: list[int]) -> None:
    assert searched(tokens, least, most, 3) == expected
    history = torch.full((3, LONGEST + 4), tokens[-1], dtype=torch.int32)
    history[1, : len(tokens)] = torch.tensor(tokens)
    for find in finders():
        ids, counts = find(history, torch.tensor([1]), torch.tensor([len(tokens)]), least, most, 3)
        assert ids[0, : counts[0]].tolist() == expected


def finders() -> list:
    """Both implementations; the kernel where Triton is, with more than one part of each row."""

    def in_torch(*arguments):
        return lookup(*arguments, longest=LONGEST)

    try:
        from jackfield.kernels.step import lookup_ngrams
    except ImportError:
        return [in_torch]
    lookup_ngrams.TOKENS = 16
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def kernel(history, slots, lengths, *more):
        on_device = (part.to(device) for part in (history, slots, lengths))
        return [part.cpu() for part in lookup_ngrams.lookup_ngrams(*on_device, *more)]

    return [in_torch, kernel]


@pytest.mark.parametrize("seed", range(8))
def test_random_rows(seed: int) -> None:
    draw = random.Random(seed)
    least = draw.randrange(1, 4)
    most, num_drafts = least + draw.randrange(3), draw.randrange(1, 8)
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(2 + seed % 4, (7, LONGEST + 4), generator=generator, dtype=torch.int32)
    slots = torch.randperm(7, generator=generator)[:5]
    lengths = torch.tensor([1, 2, LONGEST, draw.randrange(3, LONGEST), draw.randrange(3, 30)])
    for find in finders():
        ids, counts = find(history, slots, lengths, least, most, num_drafts)
        assert ids.shape == (5, num_drafts)
        for row, slot in enumerate(slots.tolist()):
            known = history[slot, : lengths[row]].tolist()
            expected = searched(known, least, most, num_drafts)
            assert ids[row, : counts[row]].tolist() == expected, (row, least, most)


def test_the_bounds_are_vllms() -> None:
    def bounds(**options: int) -> tuple[int, int]:
        return msgspec.convert(options, NgramOptions).bounds

    assert bounds() == (5, 5)
    assert bounds(prompt_lookup_max=4) == (4, 4)
    assert bounds(prompt_lookup_min=2) == (2, 2)
    assert bounds(prompt_lookup_max=4, prompt_lookup_min=2) == (2, 4)
    for wrong in ({"prompt_lookup_max": 1, "prompt_lookup_min": 2}, {"prompt_lookup_min": 0}):
        with pytest.raises(msgspec.ValidationError, match=r"prompt_lookup_m|>= 1"):
            bounds(**wrong)
