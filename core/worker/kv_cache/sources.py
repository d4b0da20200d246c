"""Sources of an encoder-decoder model: encoding them, and what layers need to attend to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ...nn.context import EncodeContext, SourceContext
from ...nn.encoder import SourceAttention
from ...nn.ragged import RaggedRows
from ...protocols.attention import AttentionBackend
from ...step import EncodeItem
from ..selection import CacheLayer

if TYPE_CHECKING:
    from ..batch import PersistentBatch, StepInputs


def source_layers(
    model: nn.Module, layers: Sequence[CacheLayer], dtype: torch.dtype
) -> list[SourceAttention]:
    """Return the layers of a decoder that attend to a source; [] without an encoder.

    Each shares its memory with one of `layers`, those that attend to the sequence itself. Raises
    ConfigError if they differ in size.
    """
    sources = [module for module in model.modules() if isinstance(module, SourceAttention)]
    own = [layer.cache_spec(dtype).parts for layer in layers]
    if [source.cache_spec(dtype).parts for source in sources] != own[: len(sources)]:
        raise ConfigError(
            "model: the layers that attend to the encoder have other sizes than the decoder's own "
            "attention, and their blocks cannot share memory",
            param="model",
        )
    return sources


def bind_sources(
    sources: Sequence[SourceAttention], caches: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Give the layers that attend to sources the memory of those that attend to the sequence."""
    for source, parts in zip(sources, caches, strict=False):
        source.bind(parts)


class Sources:
    """Encodes the sources of plans."""

    def __init__(self, model: nn.Module, backend: AttentionBackend, batch: PersistentBatch) -> None:
        """backend: for layouts whose rows are tokens of a step."""
        self._model = model
        self._backend = backend
        self._batch = batch

    def context(self, inputs: StepInputs) -> SourceContext:
        """Return what the layers of a step need."""
        assert inputs.source is not None, "the batch has sources"
        return SourceContext(self._backend, self._backend.build_metadata(inputs.source))

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encode sources, all together, and write their keys and values to their blocks."""
        lengths = np.asarray([len(item.token_ids) for item in items], dtype=np.int32)
        starts = np.zeros(len(items) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        size = self._batch.block_size
        places = []
        for item, length in zip(items, lengths, strict=True):
            blocks = np.asarray(item.block_ids, dtype=np.int64)
            offsets = np.arange(length, dtype=np.int64)
            places.append(blocks[offsets // size] * size + offsets % size)
        token_ids, device_positions = self._batch.upload([
            np.concatenate([np.asarray(item.token_ids, dtype=np.int32) for item in items]),
            positions,
        ])  # fmt: skip
        slot_mapping = torch.from_numpy(np.concatenate(places))
        self._run(
            token_ids.long(), device_positions.long(), starts,
            slot_mapping.to(self._batch.device, non_blocking=True),
        )  # fmt: skip

    def warm_up(self, num_tokens: int, longest: int) -> None:
        """Encode sources of `num_tokens` in all, each of `longest` or fewer, to the null block, so
        that kernels are compiled, or the memory of so many is measured."""
        lengths = [longest] * (num_tokens // longest)
        if rest := num_tokens % longest:
            lengths.append(rest)
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._batch.device)
        self._run(zeros, zeros, starts, zeros)

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        starts: np.ndarray,
        slot_mapping: torch.Tensor,
    ) -> None:
        rows = RaggedRows.of(starts, self._batch.device)
        encode: Any = self._model.encode
        encode(token_ids, EncodeContext(positions, rows, slot_mapping))
