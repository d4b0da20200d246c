"""What building blocks are given: how to build a model, and what a forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..protocols import AttentionBackend
from .operations import Operations


@dataclass(frozen=True)
class BuildContext:
    """How parameters are created."""

    device: torch.device
    dtype: torch.dtype
    operations: Operations
    defer_weights: bool = False
    """Make no memory for weights yet: a quantization method may take the layer over."""

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def weight(self, *shape: int) -> torch.Tensor:
        """An uninitialised matrix, for blocks that a quantization method can replace."""
        device = torch.device("meta") if self.defer_weights else self.device
        return torch.empty(shape, device=device, dtype=self.dtype)


@dataclass(frozen=True)
class MixedRows:
    """Where a recorded step's rows begin to be more than decode rows: known on the device alone.

    Decode rows (one token each) come first, so row r is one if query_start[r + 1] is r + 1.
    """

    bounds: torch.Tensor
    """[2] int32: the first row that is no decode row, and the number of rows from it on."""
    max_decode_rows: int
    """At most so many rows are decode rows; 0: none is."""
    max_prompt_rows: int
    """At most so many rows are not, padding included."""


@dataclass(frozen=True)
class BatchLayout:
    """One step's rows and tokens. Tensors live on the device; `*_cpu` twins are numpy.

    R = num_rows, T = num_tokens, B = blocks a request may hold.
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start: torch.Tensor
    """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once this step has written its own."""
    block_table: torch.Tensor
    """[R, B] int32"""
    slot_mapping: torch.Tensor
    """[T] int64: block * block_size + offset, where each token's KV goes."""
    query_start_cpu: np.ndarray
    """With `mixed`: of rows of no tokens."""
    seq_lens_cpu: np.ndarray
    """With `mixed`, and in recorded decode steps: upper bounds."""
    mixed: MixedRows | None = None
    """Of a recorded step that may hold prompts: lengths and starts are in device memory alone. Only
    backends that are `mixed_graph_safe` get it. Rows of no tokens come last."""

    @property
    def decode_only(self) -> bool:
        """Every row computes one token."""
        return self.max_query_len == 1


@dataclass(frozen=True)
class ForwardContext:
    """Passed down through a forward call: no globals."""

    backend: AttentionBackend | None
    """None in an encoder, which has no cache to attend to."""
    metadata: Any
    """What the backend made of the layout."""
    layout: BatchLayout
    positions: torch.Tensor
    """[num_tokens] int64"""
    token_type_ids: torch.Tensor | None = None
    """[num_tokens] int64, for encoders of two texts; None: all 0."""
