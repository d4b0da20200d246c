"""What an adapter changes in each site, in host memory, as one rank needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...nn.step_operations.adapters import SiteWeights


@dataclass(frozen=True)
class Piece:
    """A part of an adapter's change, as this rank has it, in host memory."""

    span: slice
    """Output features of the site."""
    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features of the span, rank]"""
    scale: float
    part: int
    """Number of the site's part."""
    bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None


@dataclass
class ExpertPieces:
    """What one adapter changes in a layer of all experts, in host memory."""

    num_experts: int
    """Experts of this rank."""
    in_features: int
    bounds: tuple[int, ...]
    """Where the parts of one expert's output features begin, and the end."""
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    """Number of an expert as this rank counts → its changes."""

    def weights(self, device: torch.device) -> SiteWeights:
        """Return the matrices on a device, an expert in each place."""
        rank = max(p.a.shape[0] for pieces in self.pieces.values() for p in pieces)
        parts, count = len(self.bounds) - 1, self.num_experts
        first = next(iter(self.pieces.values()))[0].a
        a = first.new_zeros(count, rank, parts, self.in_features)
        b = first.new_zeros(count, rank, self.bounds[-1])
        ranks = torch.zeros(count, parts, dtype=torch.int32)
        scales = torch.zeros(count, parts)
        for expert, pieces in self.pieces.items():
            for piece in pieces:
                own, part = piece.a.shape[0], piece.part
                a[expert, :own, part] = piece.a
                b[expert, :own, piece.span] = piece.b.t()
                ranks[expert, part], scales[expert, part] = own, piece.scale
        return SiteWeights(
            a=a.flatten(0, 1).to(device),
            b=b.flatten(0, 1).to(device),
            bounds=self.bounds,
            rank_rows=torch.arange(count * rank, dtype=torch.int32, device=device).view(count, -1),
            ranks=ranks.to(device),
            scales=scales.to(device),
        )


@dataclass
class HostChange:
    """What one adapter changes in one site, in host memory: as `LayerChange`."""

    pieces: list[Piece] = field(default_factory=list)
    weight: torch.Tensor | None = None
    weights: list[tuple[slice, torch.Tensor]] = field(default_factory=list)
    biases: list[tuple[slice, torch.Tensor]] = field(default_factory=list)
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    experts: dict[str, ExpertPieces] = field(default_factory=dict)
    """By FIRST and DOWN."""

    @property
    def plain(self) -> bool:
        """Whether it is low-rank products alone."""
        return (
            not (self.experts or self.weights or self.biases)
            and self.weight is None
            and self.token_ids is None
            and all(piece.bias is None and piece.magnitude is None for piece in self.pieces)
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors."""
        whole = (self.weight, self.token_ids, self.token_rows)
        yield from (each for each in whole if each is not None)
        yield from (value for _, value in (*self.weights, *self.biases))
        lists = (pieces for each in self.experts.values() for pieces in each.pieces.values())
        for piece in (*self.pieces, *itertools.chain(*lists)):
            parts = (piece.a, piece.b, piece.bias, piece.magnitude)
            yield from (each for each in parts if each is not None)
