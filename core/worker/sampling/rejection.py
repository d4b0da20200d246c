"""Classic rejection sampling of drafts that were drawn from a distribution.

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)), p being what the
target samples from; after a rejection the token is drawn from max(p - q, 0), normalised. So tokens
are distributed as p says, whatever q is. (Leviathan, Kalman, Matias 2023, arXiv 2211.17192.)

The three draws at a position must be independent: the draft's, the verdict's, and the token's after
a rejection. Each has noise of its own (`Salt`). Of a draft that was not drawn, such as what stood
in a text, all probability is in x: to keep the sampled token while it is the draft is the same
rule. Greedy rows keep theirs, too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch

from .gumbel import TokenNoise
from .row_chunks import slices
from .sampling_columns import Column


class Salt(enum.IntEnum):
    """Tells the noise of a position's draws apart; the token's own is without."""

    DRAFT = 0x3C6EF372
    VERDICT = 0x510E527F


@dataclass(frozen=True)
class DrawnDrafts:
    """The drafts of L positions, and what they were drawn from."""

    token_ids: torch.Tensor
    """[L] int32 or int64: the draft for each position's token."""
    drawn: torch.Tensor
    """[L] bool: whether there is a draft, and it was drawn."""
    slots: torch.Tensor
    """[L] int64"""
    places: torch.Tensor
    """[L] int64: among the row's drafts."""
    tables: DraftDistributions

    def part(self, at: torch.Tensor) -> DrawnDrafts:
        """Return some positions: [n] int64."""
        return replace(
            self, token_ids=self.token_ids[at], drawn=self.drawn[at], slots=self.slots[at],
            places=self.places[at],
        )  # fmt: skip

    def tokens(
        self, scores: torch.Tensor, packed: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Decide on the drafts → [L] int64: the token of each position; -1: the target samples it.

        scores: [L, vocab_size], whose softmax the target samples from; packed: [L, NUM_COLUMNS] of
        the slots; lengths: [L] tokens before the sampled one
        """
        out = torch.full_like(self.slots, -1)
        for rows in slices(len(scores), scores.shape[1]):
            some = replace(
                self, token_ids=self.token_ids[rows], drawn=self.drawn[rows],
                slots=self.slots[rows], places=self.places[rows],
            )  # fmt: skip
            out[rows] = some._tokens(scores[rows].float(), packed[rows], lengths[rows])
        return out

    def _tokens(
        self, scores: torch.Tensor, packed: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        tables = self.tables
        settings, token_ids = packed.view(torch.float32), self.token_ids.long()[:, None]
        target = scores.softmax(dim=-1)
        draft = tables.logits[self.slots, self.places].float()
        draft = (draft * settings[:, Column.INVERSE_TEMPERATURE, None]).softmax(dim=-1)
        # u < p(x) / q(x), with -log(u) drawn.
        ratio = draft.gather(1, token_ids).log() - target.gather(1, token_ids).log()
        accepted = tables.noise(Salt.VERDICT, packed, lengths, first_alone=True) > ratio
        left = (target - draft).clamp_(min=0.0)
        best, others = left.div_(tables.noise(None, packed, lengths)).max(dim=-1, keepdim=True)
        # Where rounding leaves nothing, p and q are the same.
        decided = accepted | (best > 0)
        decided &= (self.drawn & (settings[:, Column.NOISE] != 0))[:, None]
        tokens = torch.where(accepted, token_ids, others)
        return tokens.masked_fill_(~decided, -1).squeeze(1)


class DraftDistributions:
    """What the newest drafts of each slot were drawn from. S = slots, K = most drafts.

    Memory: S * K * vocab_size numbers of the model's type.
    """

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        noise: TokenNoise,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._noise, self._num_drafts = noise, num_drafts
        self.logits = torch.zeros(num_slots, num_drafts, vocab_size, dtype=dtype, device=device)
        """[S, K, vocab_size], before the temperature."""
        self._drawn = torch.full((num_slots, num_drafts), -1, dtype=torch.int64, device=device)
        """[S, K] Drawn tokens, -1: none."""

    def draw(
        self,
        logits: torch.Tensor,
        number: int,
        slots: torch.Tensor,
        packed: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Draw draft `number` of R rows, by their temperature: [R, tokens], of the vocabulary's
        first tokens → [R] int64. Arguments otherwise as `DrawnDrafts.tokens`; recordable."""
        missing = self.logits.shape[2] - logits.shape[1]
        kept = logits.to(self.logits.dtype)
        if missing:
            kept = torch.nn.functional.pad(kept, (0, missing), value=-float("inf"))
        self.logits[slots, number] = kept
        settings = packed.view(torch.float32)
        scores = kept.float() * settings[:, Column.INVERSE_TEMPERATURE, None]
        noise = self.noise(Salt.DRAFT, packed, lengths).log_()
        token_ids = (scores - noise * settings[:, Column.NOISE, None]).argmax(dim=-1)
        self._drawn[slots, number] = token_ids
        return token_ids

    def keep(self, token_ids: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> None:
        """Note which drafts stand: [R, K]; counts: [R], so many of each row. Others, and tokens
        that are not those drawn, are none of these distributions."""
        order = torch.arange(self._num_drafts, device=slots.device)
        drawn = self._drawn[slots]
        stands = (drawn == token_ids) & (order < counts[:, None])
        self._drawn[slots] = drawn.masked_fill(~stands, -1)

    def forget(self) -> None:
        """Note that no draft stands."""
        self._drawn.fill_(-1)

    def of(self, token_ids: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> DrawnDrafts:
        """Return the drafts of L positions. places: [L] int64, K or more at a row's last one."""
        within = places.clamp(max=self._num_drafts - 1)
        drawn = (self._drawn[slots, within] >= 0) & (places < self._num_drafts)
        return DrawnDrafts(token_ids, drawn, slots, within, self)

    def noise(
        self,
        salt: Salt | None,
        packed: torch.Tensor,
        lengths: torch.Tensor,
        *,
        first_alone: bool = False,
    ) -> torch.Tensor:
        """Return exponential noise: [rows, vocab_size], or [rows, 1]. salt: None for that which the
        target samples with."""
        lanes = packed[:, Column.LANES :]
        keys = self._noise.row_keys(lanes if salt is None else lanes ^ int(salt), lengths)
        return self._noise.exponential(keys, own=slice(1) if first_alone else slice(None))


def leaving(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [L, V] in float32 that leave one token to choose, where it is not -1."""
    order = torch.arange(logits.shape[1], device=logits.device)
    others = (order != tokens[:, None]) & (tokens >= 0)[:, None]
    return logits.float().masked_fill(others, -float("inf"))
