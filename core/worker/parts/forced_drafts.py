"""What grammars force after the newest tokens of rows: drafts for free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...protocols.speculators import Drafts
from ...step import StepPlan
from ..packing import PackedUpload
from ..sampling.masks import Forced


class ForcedDrafts(NamedTuple):
    """Of R rows."""

    token_ids: torch.Tensor
    """[R, K] int64"""
    counts: torch.Tensor
    """[R] int64; 0: nothing"""
    newest: torch.Tensor
    """[R] int64: they follow this token."""

    def used(self, newest: torch.Tensor) -> torch.Tensor:
        """Return which rows have any: [R] bool. newest: [R] int32, the rows' tokens"""
        return (self.counts > 0) & (self.newest == newest)

    def before(self, drafts: Drafts, used: torch.Tensor) -> Drafts:
        """Return these instead of a speculator's, in rows that have any."""
        token_ids = torch.where(used[:, None], self.token_ids, drafts.token_ids.long())
        return drafts._replace(
            token_ids=token_ids, counts=torch.where(used, self.counts, drafts.counts.long())
        )


def forced_drafts(
    found: Mapping[int, Forced],
    plan: StepPlan,
    which: Sequence[int],
    num_drafts: int,
    verdicts: torch.Tensor | None,
    device: torch.device,
) -> ForcedDrafts | None:
    """Return drafts of these rows of a plan; None: there are none.

    found: by sampling row; num_drafts: most per row; verdicts: [S, 2] of the step's sampling rows
    """
    if not found:
        return None
    sampling = {row: place for place, row in enumerate(np.flatnonzero(plan.samples).tolist())}
    places = np.array([sampling[row] for row in which], dtype=np.int64)
    numbers = np.zeros((len(places), 3 + num_drafts), dtype=np.int64)
    for number, place in enumerate(places.tolist()):
        if (forced := found.get(place)) is not None:
            drafts = forced.tokens[1 : 1 + num_drafts]
            numbers[number, :3] = len(drafts), forced.accepted, forced.tokens[0]
            numbers[number, 3 : 3 + len(drafts)] = drafts
    upload = PackedUpload(device)
    upload.add(numbers)
    upload.add(places)
    device_numbers, device_places = upload.send()
    accepted = torch.zeros_like(device_numbers[:, 1])
    if verdicts is not None:
        accepted = verdicts[device_places, 0].long()
    counts = device_numbers[:, 0] * (accepted == device_numbers[:, 1])
    return ForcedDrafts(device_numbers[:, 3:], counts, device_numbers[:, 2])
