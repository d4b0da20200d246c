"""A model with random adapters, and the reference model with the same changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.adapters.file import AdapterFile, ExpertsLowRank, LowRank
from ...core.errors import ConfigError
from ...core.nn.adapter_sites import ActiveAdapters, LayerChange, LowRankChange, SpecialTokens
from ...core.nn.step_operations.adapters import CHUNK_TOKENS, AdapterTables, chunk_count
from ...core.worker.adapters.host_change import HostChange, Piece
from ...core.worker.adapters.pool import AdapterPool
from ...core.worker.adapters.sites import Sites
from .paged_model import PagedModel

RANK, SCALE, SPREAD = 3, 0.5, 0.2
SLOTS = 8


@dataclass(frozen=True)
class Change:
    """A random change of one tensor of the reference model."""

    file: AdapterFile
    tensor: torch.Tensor
    """What is changed: its data."""
    delta: torch.Tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def random_changes(model: nn.Module) -> Iterator[Change]:
    """Yield a random change for each linear layer of a `transformers` model, and for each tensor of
    all experts; not for a head that is tied to embeddings."""
    generator = torch.Generator().manual_seed(3)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * SPREAD

    for name, module in model.named_modules():
        flipped = type(module).__name__ == "Conv1D"
        if (isinstance(module, nn.Linear) or flipped) and not (tied and module is head):
            weight: Any = module.weight
            width, out = weight.shape if flipped else weight.shape[::-1]
            a, b = random(RANK, width), random(out, RANK)
            change = LowRank(name, RANK, width, out, SCALE, partial(_same, a), partial(_same, b))
            delta = SCALE * b @ a
            yield Change(AdapterFile("random", (change,)), weight, delta.t() if flipped else delta)
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() != 3 or "expert" not in name:
                continue
            count, rows, columns = parameter.shape
            flipped = bool(getattr(module, "is_transposed", False)) or "Llama4" in str(type(module))
            width, out = (rows, columns) if flipped else (columns, rows)
            a, b = random(count, RANK, width), random(count, out, RANK)
            experts = ExpertsLowRank(
                f"{name}.{leaf}",
                count,
                RANK,
                width,
                out,
                SCALE,
                partial(_same, a),
                partial(_same, b),
            )
            delta = SCALE * b @ a
            yield Change(
                AdapterFile("random", experts=(experts,)), parameter,
                delta.transpose(1, 2) if flipped else delta,
            )  # fmt: skip


class AdaptedModel:
    """A built model whose slot 0 has an adapter, and whose other slots have none."""

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged
        self.sites = Sites(paged.model)
        self.pool = AdapterPool(self.sites, torch.float32, 1, RANK)
        self.pool.allocate(paged.device)
        self.operations = next(
            layer.operations if hasattr(layer, "operations") else layer.spec.operations
            for _, layer in self.sites.linear()
        )
        # A pass without an adapter shows which layers are called.
        self.sites.state.active = ActiveAdapters(None)
        paged.run({SLOTS - 1: [1, 2, 3, 4]})
        self.sites.state.active = None
        self._special: dict[str, LayerChange] = {}
        self.refused: list[str] = []

    def take(self, changes: Sequence[Change]) -> list[Change]:
        """Use the changes that the model takes as one adapter, and return them."""
        taken = []
        for change in changes:
            try:
                self.sites.changes(change.file)
            except ConfigError as error:
                self.refused.append(error.message)
            else:
                taken.append(change)
        file = AdapterFile(
            "random",
            tuple(each for change in taken for each in change.file.low_rank),
            tuple(each for change in taken for each in change.file.experts),
        )
        host = self.sites.changes(file)
        pooled = {layout.site.key for layout in self.pool.layouts}
        plain = {key: each for key, each in host.items() if key in pooled}
        self.pool.load(self.pool.pack(plain, pinned=False), 0, [0])
        special = {key: each for key, each in host.items() if key not in pooled}
        self._special = {key: self._on_device(each) for key, each in special.items()}
        return taken

    def _on_device(self, change: HostChange) -> LayerChange:
        def low_rank(piece: Piece) -> LowRankChange:
            a, b = piece.a.to(self.paged.device), piece.b.to(self.paged.device)
            return LowRankChange(piece.span, a, b, piece.scale)

        return LayerChange(
            low_rank=tuple(map(low_rank, change.pieces)),
            experts={at: each.weights(self.paged.device) for at, each in change.experts.items()},
        )

    @torch.inference_mode()
    def run(self, rows: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run one step of slot → its next tokens; return slot → logits [tokens, vocab] float32."""
        device = self.paged.device
        places = torch.full((SLOTS + 1,), -1, dtype=torch.int32, device=device)
        places[0] = 0
        starts = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)
        counts = torch.tensor([0, *map(len, rows.values())], device=device)
        num_tokens = int(counts.sum())
        chunks = self.operations.adapter_chunks(
            torch.tensor(list(rows), device=device), counts.cumsum(0).int(),
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            AdapterTables(places, starts), chunk_count(num_tokens, 1), CHUNK_TOKENS,
        )  # fmt: skip
        slots = [slot for slot, tokens in rows.items() for _ in tokens]
        own = torch.tensor([n for n, slot in enumerate(slots) if slot == 0], device=device)
        special = [SpecialTokens(self._special, own)] if self._special else []
        self.sites.state.active = ActiveAdapters(chunks, special)
        try:
            return self.paged.run(rows)
        finally:
            self.sites.state.active = None


def apply(changes: Sequence[Change]) -> None:
    """Change the reference model."""
    with torch.no_grad():
        for change in changes:
            change.tensor.add_(change.delta)


def check_adapters(
    paged: PagedModel,
    reference: nn.Module,
    score: Callable[[Any, Sequence[int]], torch.Tensor],
    tolerance: float,
) -> list[str]:
    """Compare a model whose layers an adapter changes with the reference, changed likewise; and
    rows without one with the reference as it was. score: model, tokens → log-probabilities,
    [tokens, vocab] float32. Return why some layers are not changed; all are refused by name."""
    tokens, others = [3, 17, 5, 40, 3, 99, 23, 7, 51, 60, 8, 12], [9, 4, 77, 33, 12]
    model, changed = AdaptedModel(paged), copy.deepcopy(reference)
    taken = model.take(list(random_changes(changed)))
    assert taken, model.refused
    apply(taken)
    scores = model.run({3: others, 0: tokens})
    for slot, wanted in ((0, score(changed, tokens)), (3, score(reference, others))):
        got = scores[slot].log_softmax(-1).cpu()
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
    return model.refused


__all__ = ["AdaptedModel", "check_adapters", "random_changes"]
