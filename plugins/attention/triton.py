"""Attention on Triton kernels: split-KV decode and ragged prefill over the paged cache.

A step's leading one-token rows (a plan puts decode rows first) take the decode kernel, the rest
the prefill kernel: one launch for all would give every decode row a tile made for a hundred
queries and a single program for the whole of a long context.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...core.nn.context import BatchLayout
from ...core.protocols import AttentionSpec

try:
    from ...kernels.kv_cache_write import kv_cache_write
    from ...kernels.paged_attention_decode import (
        choose_num_splits,
        paged_attention_decode,
        tile_keys,
        workspace_elements,
    )
    from ...kernels.paged_attention_prefill import paged_attention_prefill

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"

MAX_GROUP = 128
INTERPRETER_SMS = 8
"""Multiprocessors to pretend to have in the interpreter, so that small batches split there too."""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class TritonMetadata:
    """The layout, and where its decode rows end."""

    layout: BatchLayout
    num_decode_rows: int
    """Leading rows of one token each, so also their tokens."""


class TritonAttention:
    """`AttentionBackend` on this project's Triton kernels.

    Decode-only batches may be captured in a CUDA graph: launches depend on the number of rows
    alone, lengths are read on the device, and the workspace of a head shape is made once.
    """

    name: ClassVar[str] = "triton"
    graph_safe: ClassVar[bool] = True
    standard_cache: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason."""
        if _MISSING is not None:
            return _MISSING
        if device.type != "cuda" and not _interpreted():
            return "it needs a CUDA device"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        if dtype == torch.bfloat16 and _interpreted():
            return "Triton's interpreter has no bfloat16 products"
        if spec.num_heads % spec.num_kv_heads:
            return (
                f"num_heads ({spec.num_heads}) is no multiple of num_kv_heads ({spec.num_kv_heads})"
            )
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return f"more than {MAX_GROUP} query heads share a key head"
        if not 1 <= spec.head_dim <= 256:
            return f"head_dim {spec.head_dim} is over 256"
        return None

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_sms = INTERPRETER_SMS
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspaces: dict[tuple[int, int, int], torch.Tensor] = {}

    def build_metadata(self, layout: BatchLayout) -> TritonMetadata:
        """Count the leading one-token rows, from the layout's numpy twin."""
        rows = layout.num_rows
        if not (layout.decode_only and layout.num_tokens == rows):
            longer = np.diff(layout.query_start_cpu[: rows + 1]) != 1
            rows = int(np.argmax(longer)) if longer.any() else rows
        return TritonMetadata(layout, rows)

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: TritonMetadata,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim] → the same shape; see the protocol."""
        layout, rows = metadata.layout, metadata.num_decode_rows
        if key is not None and value is not None:
            kv_cache_write(key, value, kv_cache, layout.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if rows:
            paged_attention_decode(
                query[:rows],
                kv_cache,
                layout.block_table,
                layout.seq_lens,
                scale=spec.scale,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                num_splits=self._num_splits(spec, rows, query.dtype),
                workspace=self._workspace(spec, query.dtype),
                out=out[:rows],
            )
        if rows < layout.num_rows:
            paged_attention_prefill(
                query,
                kv_cache,
                layout.block_table,
                layout.query_start,
                layout.seq_lens[: layout.num_rows],
                scale=spec.scale,
                max_query_len=layout.max_query_len,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                first_row=rows,
                num_tokens=layout.num_tokens - rows,
                out=out,
            )
        return out

    def _num_splits(self, spec: AttentionSpec, rows: int, dtype: torch.dtype) -> int:
        longest = min(self.max_model_len, spec.sliding_window or self.max_model_len)
        tile = tile_keys(spec.head_dim, dtype)
        return choose_num_splits(rows, spec.num_kv_heads, longest, tile, self.num_sms)

    def _workspace(self, spec: AttentionSpec, dtype: torch.dtype) -> torch.Tensor:
        """Room for any number of rows. Never replaced: captured graphs hold its address."""
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        workspace = self._workspaces.get(shape)
        if workspace is None:
            # Ignoring the window: layers that share a head shape share this.
            free = AttentionSpec(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.scale,
            )
            needed = max(
                workspace_elements(
                    rows, spec.num_heads, spec.head_dim, self._num_splits(free, rows, dtype)
                )
                for rows in range(1, self.max_num_seqs + 1)
            )
            workspace = torch.empty(needed, dtype=torch.float32, device=self.device)
            self._workspaces[shape] = workspace
        return workspace
