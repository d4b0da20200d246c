"""`All2AllKit`: whether an all-to-all backend brings tokens to their experts, and the sums back.

    class TestMine(All2AllKit):
        name = "mine"                               # as registered: `--all2all-backend mine`

Ranks are threads of this process, on devices that the backend supports: a CPU, or several GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...core.protocols.all2all import All2AllSetup
from ...core.protocols.collectives import CollectivesSetup
from .collectives import GroupKit

WIDTH = 32
MOST_TOKENS = 40


class All2AllKit(GroupKit):
    """Subclass it, and set the name."""

    kind = "all2all_backend"

    def setup(self, **facts: Any) -> CollectivesSetup:
        return All2AllSetup(**facts, max_tokens=MOST_TOKENS)

    def tokens(
        self, counts: tuple[int, ...], top_k: int, num_local: int, seed: int = 1
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return states, experts and weights of each rank's tokens."""
        draw = torch.Generator().manual_seed(seed)
        parts = []
        for count in counts:
            scores = torch.rand(count, len(counts) * num_local, generator=draw)
            experts = scores.topk(top_k).indices.int()
            weights = torch.rand(count, top_k, generator=draw)
            parts.append((torch.randn(count, WIDTH, generator=draw), experts, weights))
        return parts

    def computed(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, first: int, number: int
    ) -> torch.Tensor:
        """Return what `number` experts, which are called from `first` on, add to each token: unlike
        functions of it, times the weight."""
        own = (experts >= 0) & (experts < number)
        factors = torch.where(own, weights * (1.0 + experts + first), torch.zeros_like(weights))
        return (x.float().sin() * factors.sum(dim=1, keepdim=True)).to(x.dtype)

    def there_and_back(
        self, group: Any, part: tuple[torch.Tensor, ...], num_local: int, capacity: int
    ) -> torch.Tensor:
        """Send a rank's tokens to their experts; return the sums."""
        x, experts, weights = part
        sent = group.dispatch(x, experts, weights, num_local_experts=num_local, capacity=capacity)
        assert sent.x.dtype == x.dtype and sent.x.shape[1:] == x.shape[1:]
        assert sent.experts.dtype == torch.int32 and sent.weights.dtype == torch.float32
        assert sent.experts.shape == sent.weights.shape == (len(sent.x), experts.shape[1])
        first = group.rank * num_local
        out = self.computed(sent.x, sent.experts, sent.weights, first, num_local)
        back: torch.Tensor = group.combine(out, sent.handle)
        return back

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        ("counts", "top_k"), [((5, 5), 1), ((17, 3), 2), ((40, 0, 9), 2), ((1, 0, 0), 4)], ids=str
    )
    def test_sums_of_all_experts_come_back(
        self, counts: tuple[int, ...], top_k: int, dtype: torch.dtype
    ) -> None:
        """With ranks that have no tokens, or are sent none."""
        num_local = 3
        parts = self.tokens(counts, top_k, num_local)

        def work(group: Any, device: torch.device) -> torch.Tensor:
            x, experts, weights = (each.to(device) for each in parts[group.rank])
            part = x.to(dtype), experts, weights
            return self.there_and_back(group, part, num_local, max(counts))

        for got, (x, experts, weights) in zip(self.exchange(len(counts), work), parts, strict=True):
            number = len(counts) * num_local
            want = self.computed(x.to(dtype).float(), experts, weights, 0, number)
            assert got.dtype == dtype and got.shape == x.shape
            bound = 40 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.float(), want, atol=bound, rtol=bound)

    def test_calls_of_unlike_sizes_stay_in_order(self) -> None:
        """One after another, without a look at results; what is given is not overwritten."""
        sizes = [(3, 1), (0, 2), (20, 40), (1, 1), (0, 0), (7, 0)]
        rounds = [self.tokens(counts, 1, 2, seed) for seed, counts in enumerate(sizes)]

        def work(group: Any, device: torch.device) -> bool:
            inputs = [tuple(p.to(device, copy=True) for p in each[group.rank]) for each in rounds]
            results = [
                self.there_and_back(group, part, 2, max(counts))
                for part, counts in zip(inputs, sizes, strict=True)
            ]
            for got, part, each in zip(results, inputs, rounds, strict=True):
                for now, before in zip(part, each[group.rank], strict=True):
                    assert torch.equal(now.cpu(), before), "it was overwritten"
                x, experts, weights = each[group.rank]
                want = self.computed(x, experts, weights, 0, 4)
                torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-5)
            return True

        assert self.exchange(2, work) == [True, True]

    def test_it_says_whether_calls_can_be_recorded(self) -> None:
        assert isinstance(self.registered().recordable, bool)
