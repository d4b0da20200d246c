"""Encodes an encoder-decoder model's sources, and provides them to layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ...nn.context import EncodeContext, SourceContext
from ...nn.encoder import SourceAttention
from ...nn.ragged import RaggedRows
from ...parts.encoder_decoder import (
    NAME,
    EncodeItem,
    EncodePlan,
    FeatureShape,
    SourceStart,
)
from ...protocols.attention import AttentionBackend
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import PersistentBatch, StepInputs
from .part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart


class EncoderDecoderStart(PartStart):
    """Finds a decoder's layers with attention to a source."""

    option = "model"

    def __init__(self, start: StartContext) -> None:
        """Raises ConfigError if these layers differ in size from the decoder's own attention, whose
        memory they share.
        """
        self._start = start
        self._layers = source_attention(start.model)
        own = [layer.cache_spec(start.kv_dtype).parts for layer in start.layers]
        sizes = [layer.cache_spec(start.kv_dtype).parts for layer in self._layers]
        if sizes != own[: len(sizes)]:
            raise ConfigError(
                "model: the layers that attend to the encoder have other sizes than the decoder's "
                "own attention, and their blocks cannot share memory",
                param="model",
            )
        shape = source_shape(start.model)
        self.needs = PartNeeds(
            specs=[layer.spec for layer in self._layers],
            extra_tables=1,
            batch={"has_sources": True, "source_tokens": 0 if shape is None else shape.num_rows},
        )

    def make(self, site: PartSite) -> EncoderDecoder:
        """Make a backend with a row per token."""
        batch = site.batch
        backend = site.make_backend(batch.max_source_tokens, batch.max_tokens)
        assert isinstance(backend, AttentionBackend), "sources have keys and values"
        return EncoderDecoder(self._start.model, backend, batch)

    def bind(self, caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Share the memory of self-attention."""
        for layer, parts in zip(self._layers, caches, strict=False):
            layer.bind(parts)


def source_attention(model: nn.Module) -> list[SourceAttention]:
    return [module for module in model.modules() if isinstance(module, SourceAttention)]


def source_shape(model: nn.Module) -> FeatureShape | None:
    """Return the features that a model's encoder reads; None: it reads tokens."""
    shape: FeatureShape | None = getattr(model, "source_shape", None)
    return shape


class EncoderDecoder(WorkerPart):
    name = NAME
    methods = frozenset({"source_weights"})

    def __init__(self, model: nn.Module, backend: AttentionBackend, batch: PersistentBatch) -> None:
        """backend: for layouts with a row per token."""
        self._longest = batch.max_source_tokens
        self._shape = source_shape(model)
        self._model = model
        self._backend = backend
        self._batch = batch

    def context(self, inputs: StepInputs) -> SourceContext:
        assert inputs.source is not None, "the batch has sources"
        return SourceContext(self._backend, self._backend.build_metadata(inputs.source))

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        source: SourceStart = start.parts[NAME]
        self._batch.table.num_source[start.slot] = source.num_tokens

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        if isinstance(part, EncodePlan):
            self.encode(part.items)

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encode sources together, writing keys and values to their blocks."""
        lengths = np.asarray([item.source.num_tokens for item in items], dtype=np.int32)
        starts = np.zeros(len(items) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        size = self._batch.block_size
        places = []
        for item, length in zip(items, lengths, strict=True):
            blocks = np.asarray(item.block_ids, dtype=np.int64)
            offsets = np.arange(length, dtype=np.int64)
            places.append(blocks[offsets // size] * size + offsets % size)
        slot_mapping = torch.from_numpy(np.concatenate(places))
        ids = [np.asarray(item.source.token_ids, dtype=np.int32) for item in items]
        token_ids, device_positions = self._batch.upload([np.concatenate(ids), positions])
        source = token_ids.long() if self._shape is None else self._features(items, self._shape)
        self._run(
            source, device_positions.long(), starts,
            slot_mapping.to(self._batch.device, non_blocking=True),
        )  # fmt: skip

    def _features(self, items: Sequence[EncodeItem], shape: FeatureShape) -> torch.Tensor:
        """Return features on the device: [sources, channels, frames] float32"""
        features_of_items = (item.source.features for item in items)
        data = bytearray(b"".join(each.data for each in features_of_items if each is not None))
        features = torch.frombuffer(data, dtype=torch.float32)
        features = features.view(len(items), shape.channels, shape.frames)
        return features.to(self._batch.device, non_blocking=True)

    def source_weights(
        self, features: bytes, token_ids: Sequence[int], heads: Sequence[Sequence[int]]
    ) -> bytes:
        """Return how heads (layer, head) of the decoder attend to a source while they read tokens:
        [heads, tokens, rows] float32. Raises ValueError for a model that does not tell."""
        compute: Any = getattr(self._model, "source_weights", None)
        if compute is None or self._shape is None:
            raise ValueError("this model does not tell how it attends to its source")
        source = torch.frombuffer(bytearray(features), dtype=torch.float32)
        source = source.view(1, self._shape.channels, self._shape.frames).to(self._batch.device)
        tokens = torch.tensor(list(token_ids), dtype=torch.int64, device=self._batch.device)
        with torch.inference_mode():
            weights = compute(source, tokens, [(layer, head) for layer, head in heads])
        data: bytes = weights.float().cpu().numpy().tobytes()
        return data

    def run_scratch(self, num_tokens: int) -> None:
        """Encode `num_tokens` of sources to the null block, to compile kernels or measure
        memory.
        """
        longest, device = self._longest, self._batch.device
        lengths = [longest] * (num_tokens // longest)
        if self._shape is not None:
            lengths = lengths or [longest]
            num_tokens = sum(lengths)
        elif rest := num_tokens % longest:
            lengths.append(rest)
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        source = zeros
        if self._shape is not None:
            sizes = (len(lengths), self._shape.channels, self._shape.frames)
            source = torch.zeros(sizes, device=device)
        self._run(source, zeros, starts, zeros)

    def _run(
        self,
        source: torch.Tensor,
        positions: torch.Tensor,
        starts: np.ndarray,
        slot_mapping: torch.Tensor,
    ) -> None:
        rows = RaggedRows.of(starts, self._batch.device)
        encode: Any = self._model.encode
        encode(source, EncodeContext(positions, rows, slot_mapping))
