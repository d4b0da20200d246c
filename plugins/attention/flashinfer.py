"""Attention through FlashInfer (the optional package `flashinfer-python`).

Its wrappers take keys and values as two tensors of [num_blocks, block_size, num_kv_heads, head_dim]
(layout NHD), and page tables in rows without gaps. The wrappers plan each step on the host, from
the layout's numpy twins, so nothing waits for the device; a plan cannot be captured in a graph.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import AttentionBackend, AttentionSpec, BackendSetup

PACKAGE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
WRAPPERS_IN_TURN = 3
"""More than the steps in flight: planning writes host memory that the last step's copy may still
read."""


@functools.cache
def _missing() -> str | None:
    """Return why the package is unusable; None if it is usable."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "flashinfer is not installed"
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:
        return f"flashinfer cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
    return None


@dataclass(frozen=True)
class Pages:
    """Cache blocks of a run of rows in FlashInfer's format: rows without gaps."""

    num_rows: int
    tokens: slice
    query_start: torch.Tensor
    """[num_rows + 1] int32, on the host, from 0"""
    indptr: torch.Tensor
    """[num_rows + 1] int32, on the host: row r's blocks are indices[indptr[r]:indptr[r + 1]]."""
    indices: torch.Tensor
    """[blocks of all rows] int32, on the device"""
    last_page_len: torch.Tensor
    """[num_rows] int32, on the host: tokens in a row's last block."""


@dataclass(frozen=True)
class FlashInferMetadata:
    """A step's leading one-token rows, its others, and the plans made so far."""

    layout: BatchLayout
    step: int
    num_decode: int
    """Leading rows of one token each."""
    pages: dict[tuple[str, int | None], Pages] = field(default_factory=dict)
    planned: dict[tuple[str, AttentionSpec], Any] = field(default_factory=dict)


class FlashInferAttention(AttentionBackend):
    name: ClassVar[str] = "flashinfer"
    cache_groups: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "it needs a CUDA device"
        if (missing := _missing()) is not None:
            return missing
        if dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float16 or bfloat16"
        if spec.num_heads % spec.num_kv_heads:
            return (
                f"num_heads ({spec.num_heads}) is no multiple of num_kv_heads ({spec.num_kv_heads})"
            )
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
        return None

    def __init__(self, setup: BackendSetup) -> None:
        device = self.device = setup.device
        self.dtype = setup.dtype
        self.block_size = setup.block_size
        self._package = importlib.import_module(PACKAGE)
        # One workspace for all wrappers: work on one stream does not overlap.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, AttentionSpec, int, int], Any] = {}
        """Keyed by kind of rows, layer, group of layers and turn."""
        self._steps = 0

    def build_metadata(self, layout: BatchLayout) -> FlashInferMetadata:
        rows = layout.num_rows
        lengths = np.diff(np.asarray(layout.query_start_cpu)[: rows + 1])
        longer = lengths != 1
        num_decode = int(np.argmax(longer)) if longer.any() else rows
        if layout.group == 0:
            self._steps += 1
        return FlashInferMetadata(layout, self._steps, num_decode)

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashInferMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows, decode = metadata.layout.num_rows, metadata.num_decode
        for kind, first, end in (("decode", 0, decode), ("prefill", decode, rows)):
            if first < end:
                at = (kind, spec.sliding_window)
                pages = metadata.pages.get(at)
                if pages is None:
                    pages = make_pages(
                        metadata.layout, first, end, self.block_size, spec.sliding_window
                    )
                    metadata.pages[at] = pages
                wrapper = self._planned(kind, spec, pages, metadata)
                part = query[pages.tokens].contiguous()
                wrapper.run(part, (kv_cache[0], kv_cache[1]), out=out[pages.tokens])
        return out

    def _planned(
        self, kind: str, spec: AttentionSpec, pages: Pages, metadata: FlashInferMetadata
    ) -> Any:
        wrapper = metadata.planned.get((kind, spec))
        if wrapper is not None:
            return wrapper
        key = (kind, spec, metadata.layout.group, metadata.step % WRAPPERS_IN_TURN)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._make(kind)
        layer: dict[str, Any] = {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }
        tables = (pages.indptr, pages.indices, pages.last_page_len)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, self.block_size)
        if kind == "decode":
            wrapper.plan(*tables, *heads, **layer)
        else:
            wrapper.plan(pages.query_start, *tables, *heads, causal=True, **layer)
        metadata.planned[kind, spec] = wrapper
        return wrapper

    def _make(self, kind: str) -> Any:
        if kind == "decode":
            # On CUDA cores it supports few numbers of query heads per kv head.
            return self._package.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=True
            )
        return self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")


def make_pages(
    layout: BatchLayout, first: int, end: int, block_size: int, window: int | None = None
) -> Pages:
    """Rows [first, end) of a step. Pages before the window are omitted: FlashInfer counts from the
    end of a row, and they may be released.
    """
    starts = np.asarray(layout.query_start_cpu, dtype=np.int32)[first : end + 1]
    lengths = np.asarray(layout.seq_lens_cpu, dtype=np.int32)[first:end]
    behind = np.zeros_like(lengths)
    if window is not None:
        behind = np.maximum(lengths - np.diff(starts) - window + 1, 0) // block_size
    counts = -(-lengths // block_size) - behind
    indptr = np.zeros(end - first + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    column = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - behind, counts)
    table = layout.block_table
    at = np.repeat(np.arange(first, end), counts) * table.shape[1] + column
    index = torch.from_numpy(at).to(table.device, non_blocking=True)
    return Pages(
        num_rows=end - first,
        tokens=slice(int(starts[0]), int(starts[-1])),
        query_start=torch.from_numpy(starts - starts[0]),
        indptr=torch.from_numpy(indptr),
        indices=table.reshape(-1)[index].to(torch.int32),
        last_page_len=torch.from_numpy(lengths - (behind + counts - 1) * block_size),
    )
