"""Moves experts between ranks while an engine serves (`BalanceExperts`)."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..nn.expert_balance.placement import Placement, balanced, rank_loads
from ..nn.expert_balance.places import ExpertBalance
from ..nn.experts import ExpertLinear, Experts
from ..nn.quantized import QuantizedWeightLinear
from ..parallel.ranks import Group

logger = logging.getLogger("jackfield.worker")
GAIN = 0.95
"""A layer's experts move if the busiest rank then has at most this share of its tokens."""


class ExpertMover:
    """Moves a model's experts. All ranks of a group call the methods in the same order."""

    def __init__(self, model: nn.Module, group: Group, device: torch.device) -> None:
        """Raises ConfigError, with the layer's name, for immovable weights."""
        self.group, self.device = group, device
        self.layers: list[tuple[ExpertBalance, list[torch.Tensor]]] = []
        for name, module in model.named_modules():
            if isinstance(module, Experts) and module.balance is not None:
                parts = [
                    part
                    for layer in (module.first, module.down_proj)
                    for part in _by_place(name, layer, module.balance.num_places)
                ]
                self.layers.append((module.balance, parts))
        self._check_alike()

    def _check_alike(self) -> None:
        """Raise ConfigError unless ranks store experts alike: formats may omit what is trivial on a
        rank.
        """
        kinds = [[(part.shape[1:], part.dtype) for part in parts] for _, parts in self.layers]
        number = zlib.crc32(repr(kinds).encode())
        all_ranks = self.group.all_gather(torch.tensor([number], device=self.device))
        if not bool((all_ranks == number).all()):
            raise ConfigError(
                "enable_eplb: ranks store experts of this checkpoint in unlike tensors",
                param="enable_eplb",
            )

    def forget(self) -> None:
        for balance, _ in self.layers:
            balance.loads.zero_()

    def move(self) -> int:
        """Place experts by the tokens counted since the last call; return the number of changed
        places.
        """
        if not self.layers:
            return 0
        # Rank 0's, so that all decide alike.
        counted = torch.cat([balance.loads for balance, _ in self.layers])
        counted = self.group.all_gather(counted)[: len(counted)]
        moved, before, after = 0, 0.0, 0.0
        split = torch.split(counted, [balance.num_experts for balance, _ in self.layers])
        for (balance, parts), loads in zip(self.layers, split, strict=True):
            numbers = loads.tolist()
            now = rank_loads(balance.placement, numbers)
            target = balanced(balance.placement, numbers)
            then = rank_loads(target, numbers)
            if max(then) > GAIN * max(now):
                target, then = balance.placement, now
            else:
                moved += self._move_layer(balance, parts, target)
            mean = sum(now) / len(now) or 1.0
            before += max(now) / mean / len(self.layers)
            after += max(then) / mean / len(self.layers)
        self.forget()
        logger.info(
            "experts: the busiest rank had %.2f times the mean of tokens, and will have %.2f; %d "
            "experts moved", before, after, moved,
        )  # fmt: skip
        return moved

    def _move_layer(
        self, balance: ExpertBalance, parts: list[torch.Tensor], target: Placement
    ) -> int:
        """Exchange weights, one expert of each rank at a time."""
        old, rank = balance.placement, self.group.rank
        sends = _sends(old, target)
        received: dict[int, list[torch.Tensor]] = {}
        needed = set(target[rank]) - set(old[rank])
        for number in range(max((len(each) for each in sends), default=0)):
            own = sends[rank][number] if number < len(sends[rank]) else old[rank][0]
            place = old[rank].index(own)
            flat = torch.cat([_bytes(part[place]) for part in parts])
            buffers = self.group.all_gather(flat).view(self.group.size, -1)
            for source, each in enumerate(sends):
                if number < len(each) and each[number] in needed:
                    received[each[number]] = _unpacked(buffers[source], parts)
        for place, expert in enumerate(target[rank]):
            if expert in received:
                for part, new in zip(parts, received[expert], strict=True):
                    part[place].copy_(new)
        balance.move_to(target)
        return sum(
            one != other
            for before, after in zip(old, target, strict=True)
            for one, other in zip(before, after, strict=True)
        )


def _sends(old: Placement, target: Placement) -> list[list[int]]:
    """Return the experts that each rank sends: those needed elsewhere, from the least busy
    sender.
    """
    needed = {
        e for before, after in zip(old, target, strict=True) for e in set(after) - set(before)
    }
    sends: list[list[int]] = [[] for _ in old]
    for expert in sorted(needed):
        holders = [rank for rank, experts in enumerate(old) if expert in experts]
        sends[min(holders, key=lambda rank: len(sends[rank]))].append(expert)
    return sends


def _by_place(name: str, layer: Any, num_places: int) -> list[torch.Tensor]:
    """Return views of a layer's tensors by place. Raises ConfigError."""
    if isinstance(layer, ExpertLinear):
        views = [layer.weight.data.unflatten(0, (num_places, -1))]
    elif isinstance(layer, QuantizedWeightLinear) and layer.weight.input_scale is None:
        weight = layer.weight
        views = [weight.values.data.unflatten(0, (num_places, -1))]
        for part in (weight.scale, weight.zero):
            if part is None:
                continue
            if part.shape[1] % num_places:
                raise _unmovable(name, "experts share scales")
            views.append(part.data.unflatten(1, (num_places, -1)).movedim(1, 0))
    else:
        raise _unmovable(name, "its quantization method does not store it by expert")
    if layer.bias is not None:
        views.append(layer.bias.data.unflatten(0, (num_places, -1)))
    return views


def _unmovable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"enable_eplb: the experts of {name} cannot be moved: {reason}", param="enable_eplb"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _unpacked(flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [part[0].numel() * part.element_size() for part in parts])
    # Cloned, as bytes in the middle may not be aligned.
    return [
        piece.clone().view(part.dtype).view(part.shape[1:])
        for piece, part in zip(pieces, parts, strict=True)
    ]
