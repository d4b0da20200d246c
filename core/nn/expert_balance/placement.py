"""Which rank holds which experts, by how many tokens chose each: plain Python, the same everywhere.

After DeepSeek's balancer of experts for one node (github.com/deepseek-ai/EPLB): copies go to the
experts with the most tokens per copy, and then the heaviest copies to the ranks with the least.
"""

from __future__ import annotations

from collections.abc import Sequence

Placement = tuple[tuple[int, ...], ...]
"""Rank → the expert in each of its places. No rank has an expert twice."""


def rank_loads(placement: Placement, loads: Sequence[int]) -> list[float]:
    """Return the tokens that each rank computes: an expert's are shared evenly by its copies.
    `loads`: expert → its tokens."""
    copies = _copies(placement, len(loads))
    return [sum(loads[expert] / copies[expert] for expert in rank) for rank in placement]


def balanced(placement: Placement, loads: Sequence[int]) -> Placement:
    """Return a placement with about as many tokens for each rank, with as many copies in all as
    `placement`, from which it moves little."""
    num_ranks, places = len(placement), len(placement[0])
    copies = [1] * len(loads)
    for _ in range(num_ranks * places - len(loads)):
        able = (expert for expert in range(len(loads)) if copies[expert] < num_ranks)
        copies[max(able, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    # Never 0, so that experts without tokens are spread as well.
    weights = [max(load, 1e-3) / count for load, count in zip(loads, copies, strict=True)]
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    for expert in sorted(items, key=lambda expert: (-weights[expert], expert)):
        _pack(expert, packs, places, weights)
    return _near(placement, packs)


def _pack(expert: int, packs: list[list[int]], places: int, weights: Sequence[float]) -> None:
    """Add an expert to the lightest pack that has room and does not have it."""

    def weight(pack: list[int]) -> float:
        return sum(weights[each] for each in pack)

    others = [pack for pack in packs if expert not in pack]
    if free := [pack for pack in others if len(pack) < places]:
        min(free, key=weight).append(expert)
        return
    # Packs with room have it: one that is full gives them another expert.
    full = min(others, key=weight)
    room = min((pack for pack in packs if len(pack) < places), key=weight)
    moved = min((each for each in full if each not in room), key=lambda each: weights[each])
    full.remove(moved)
    full.append(expert)
    room.append(moved)


def _near(placement: Placement, packs: list[list[int]]) -> Placement:
    """Give each rank the pack of which it has most, and leave what it has in its place."""
    left, near = list(packs), []
    for rank in placement:
        pack = max(left, key=lambda pack: len(set(pack) & set(rank)))
        left.remove(pack)
        new = iter(sorted(set(pack) - set(rank)))
        near.append(tuple(expert if expert in pack else next(new) for expert in rank))
    return tuple(near)


def _copies(placement: Placement, num_experts: int) -> list[int]:
    copies = [0] * num_experts
    for rank in placement:
        for expert in rank:
            copies[expert] += 1
    return copies
