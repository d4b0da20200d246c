"""Where the experts of a layer are by now, on the device, and how many tokens chose each."""

from __future__ import annotations

import torch

from ...parallel.expert_share import ExpertShare
from ...parallel.ranks import Group
from ..routing import Routing
from .placement import Placement


class ExpertBalance:
    """The places of a layer's experts. E = num_experts, C = most copies of one.

    Its tensors keep their addresses, so that recorded steps see changes.
    """

    def __init__(
        self, share: ExpertShare, num_copies: int, group: Group, device: torch.device
    ) -> None:
        """`num_copies`: of experts, beyond one each."""
        self.num_experts, self.group = share.num_experts, group
        self.num_places = len(share.own)
        numbers = [place % share.num_experts for place in range(self.num_places * group.size)]
        self.placement: Placement = tuple(
            tuple(numbers[rank * self.num_places :][: self.num_places])
            for rank in range(group.size)
        )
        most = min(1 + num_copies, group.size)
        self.loads = torch.zeros(share.num_experts, dtype=torch.int64, device=device)
        """[E]: tokens that chose each expert since they were last set to 0."""
        self._copies = torch.ones(share.num_experts, dtype=torch.int64, device=device)
        """[E]"""
        self._places = torch.zeros(share.num_experts, most, dtype=torch.int32, device=device)
        """[E, C]: places of each copy, counted from this rank's first one."""
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.move_to(self.placement)

    def move_to(self, placement: Placement) -> None:
        """Route by this placement from now on."""
        places: list[list[int]] = [[] for _ in range(self.num_experts)]
        first = self.group.rank * self.num_places
        for number, expert in enumerate(expert for rank in placement for expert in rank):
            places[expert].append(number - first)
        width = self._places.shape[1]
        rows = [own + own[:1] * (width - len(own)) for own in places]
        self._places.copy_(torch.tensor(rows, dtype=torch.int32))
        self._copies.copy_(torch.tensor([len(own) for own in places]))
        self.placement = placement

    def place(self, routing: Routing) -> Routing:
        """Count what a routing chose, and number its experts as this rank holds them. Tokens take
        the copies of an expert in turns."""
        # In range also where a kernel that is only compiled has written nothing.
        experts = routing.experts.clamp(0, self.num_experts - 1).long()
        flat = experts.flatten()
        self.loads.scatter_add_(0, flat, self._one.expand_as(flat))
        tokens = torch.arange(len(experts), device=experts.device)[:, None]
        places = self._places[experts, tokens % self._copies[experts]]
        return routing._replace(experts=places, num_experts=self.num_experts)
