"""Policies whose cost grows with the cache, after others whose cost grows with its square."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from .by_queries import RKV, MergingSnapKV

ROWS = 4096
"""Rows of a similarity matrix per product; it has few columns."""


class FastRKV(RKV):
    """As RKV, but looks for repetitions among few tokens: the newest, and others evenly spread. So
    its cost grows with the cache, not with its square."""

    candidates: ClassVar[int] = 256
    """Tokens that each is compared with, half of them the newest."""

    def newest_similar(self, keys: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        count, half = directions.shape[1], self.candidates // 2
        order = torch.arange(count, device=keys.device)
        if count <= 2 * half:
            own = order
        else:
            spread = torch.arange(half, device=keys.device) * (count - half) // half
            own = torch.cat((spread, order[count - half :]))
        aims = directions[:, own].transpose(1, 2)
        newest = []
        for start in range(0, count, ROWS):
            rows = order[start : start + ROWS]
            cosines = directions[:, rows] @ aims
            cosines.masked_fill_(rows[:, None] == own, 0.0)
            newest.append(torch.where(cosines > self.similar, own, -1).amax(-1))
        return torch.cat(newest, dim=1)


class FastMergingSnapKV(MergingSnapKV):
    """As MergingSnapKV, but a value goes to the most similar of the tokens beside it that stay, as
    in CaM (https://proceedings.mlr.press/v235/zhang24n.html): its cost grows with the cache, not
    with its square."""

    beside: ClassVar[int] = 2
    """Tokens that stay on either side, which a key is compared with."""

    def nearest(
        self, keys: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = chosen.T.contiguous()
        own = F.normalize(keys.float(), dim=2).to(keys.dtype).transpose(0, 1)
        order = torch.arange(own.shape[1], device=keys.device).expand(own.shape[:2]).contiguous()
        after = torch.searchsorted(kept, order)
        best = torch.full(order.shape, -torch.inf, device=keys.device)
        target = torch.zeros_like(order)
        for offset in range(-self.beside, self.beside):
            place = (after + offset).clamp_(0, kept.shape[1] - 1)
            others = own.gather(1, kept.gather(1, place)[:, :, None].expand(own.shape))
            cosines = (own * others).sum(2, dtype=torch.float32)
            target = torch.where(cosines > best, place, target)
            best = torch.maximum(best, cosines)
        return best, target
