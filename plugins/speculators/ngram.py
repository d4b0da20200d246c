"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

It looks up the last `prompt_lookup_max` tokens, down to `prompt_lookup_min`, in prompt and output;
the first occurrence wins, as most tokens follow it. (Saxena 2023, "Prompt lookup decoding"; names
and ties are vLLM's.)
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ...core.protocols.speculators import Drafts, KnownTokens, Speculator, SpeculatorSetup

try:
    from ...kernels.step.lookup_ngrams import lookup_ngrams

    _launches = True
except ImportError:
    _launches = False

DEFAULT = 5
Count = Annotated[int, Meta(ge=1, le=32)]


class NgramOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `speculative_config`. One alone sets both; the default is 5."""

    prompt_lookup_max: Annotated[
        Count | None, Meta(description="Most last tokens that are looked up.")
    ] = None
    prompt_lookup_min: Annotated[
        Count | None, Meta(description="Fewest last tokens that are looked up.")
    ] = None

    def __post_init__(self) -> None:
        least, most = self.bounds
        if least > most:
            raise ValueError(f"prompt_lookup_min ({least}) is above prompt_lookup_max ({most})")

    @property
    def bounds(self) -> tuple[int, int]:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or DEFAULT, most or least or DEFAULT


class Ngram(Speculator):
    options = NgramOptions

    def __init__(self, setup: SpeculatorSetup) -> None:
        assert isinstance(setup.options, NgramOptions)
        self._least, self._most = setup.options.bounds
        self._num_drafts = setup.num_drafts
        self._longest = setup.max_model_len
        self._launches = _launches and setup.device.type == "cuda"

    def propose(self, tokens: KnownTokens) -> Drafts:
        arguments: tuple[Any, ...] = (*tokens[:3], self._least, self._most, self._num_drafts)
        if self._launches:
            return Drafts(*lookup_ngrams(*arguments))
        return Drafts(*lookup(*arguments, longest=self._longest))


def lookup(
    history: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    least: int,
    most: int,
    num_drafts: int,
    *,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the kernel does; see `KnownTokens` and `Drafts`.

    least, most: numbers of last tokens to look up; longest: of any row.
    """
    known = history[slots, :longest]
    positions = torch.arange(known.shape[1], device=known.device)
    last = lengths[:, None] - 1
    matched = torch.zeros_like(known)
    alike = positions < last
    for back in range(most):
        # The token `back` places before each position, and before the last token.
        before = known.roll(back, dims=1)
        wanted = known.gather(1, (last - back).clamp(min=0))
        alike = alike & (positions >= back) & (before == wanted)
        matched += alike
    matched.masked_fill_(matched < least, 0)
    # The first of the longest: argmax does not say which of equal ones it takes.
    rank = matched.long() * (len(positions) + 1) - positions
    end = rank.masked_fill_(matched == 0, -len(positions) - 1).argmax(dim=1, keepdim=True)
    found = matched.gather(1, end) > 0
    places = end + 1 + torch.arange(num_drafts, device=known.device)
    counts = torch.where(found, (last - end).clamp(max=num_drafts), 0)
    return known.gather(1, places.clamp(max=known.shape[1] - 1)), counts.squeeze(1)
