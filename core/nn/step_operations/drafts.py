"""Operations of speculative decoding: a part of `Operations`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DraftTables(NamedTuple):
    """The slots' tables that drafts are in."""

    history: torch.Tensor
    """[slots, positions] int32: the tokens of each slot, then its drafts."""
    lengths: torch.Tensor
    """[slots] int32: computed tokens; one more is known."""
    num_proposed: torch.Tensor
    """[slots] int32: drafts behind the known tokens."""


class DraftOperations:
    """Which drafts are accepted, and where new ones go."""

    def verify_drafts(
        self,
        chosen: torch.Tensor,
        drafts: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        tables: DraftTables,
        most: int,
    ) -> torch.Tensor:
        """Accept the drafts of S rows up to the first that was not chosen, and take the others out
        of the slots' lengths.

        chosen, drafts: [L] int32, the token that each position sampled, and the draft for it;
        starts: [S + 1] int32, row s has the positions starts[s] .. starts[s + 1], the last of which
        has no draft; slots: [S] int64, each one once; most: drafts of a row at most → [S, 2] int32:
        the row's accepted drafts, and those that were proposed, of which alone any is accepted
        """
        counts = starts[1:] - starts[:-1] - 1
        proposed = torch.minimum(counts, tables.num_proposed[slots])
        order = torch.arange(most, device=chosen.device, dtype=torch.int32)
        places = (starts[:-1, None] + order).clamp(max=len(chosen) - 1).long()
        alike = (chosen[places] == drafts[places]) & (order < proposed[:, None])
        accepted = alike.cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        tables.lengths.index_add_(0, slots, accepted - counts)
        return torch.stack((accepted, proposed), dim=1)

    def keep_drafts(
        self,
        token_ids: torch.Tensor,
        counts: torch.Tensor,
        slots: torch.Tensor,
        tables: DraftTables,
        vocab_size: int,
    ) -> torch.Tensor:
        """Write the drafts of R rows behind the known tokens of their slots.

        token_ids: [R, K] int32 or int64; counts: [R] int32 or int64, the first so many are drafts,
        up to the first that is not in the vocabulary; slots: [R] int64, each one once → [R] int32:
        the number of each; token 0 is in the place of the others, which may be computed, too
        """
        order = torch.arange(token_ids.shape[1], device=token_ids.device)
        valid = (token_ids >= 0) & (token_ids < vocab_size) & (order < counts[:, None])
        valid = valid.cumprod(dim=1)
        kept = valid.sum(dim=1, dtype=torch.int32)
        places = tables.lengths[slots, None] + 1 + order
        tables.history[slots[:, None], places] = (token_ids * valid).int()
        tables.num_proposed[slots] = kept
        return kept
