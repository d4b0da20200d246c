"""Towers that read the patches of several pictures as one sequence. Their parts compute what those
of `transformers` do, in fewer launches: attention in all pictures, or windows, of a length at once,
patches by a matrix product, norms by the engine's kernels."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.nn.layer_operations.heads import rotate
from ...core.nn.operations import Norm, Operations
from ...core.nn.ragged import RaggedRows


class Lengths:
    """Rows of `cu_seqlens`, which all layers of a pass have in common."""

    def __init__(self) -> None:
        self._known: deque[tuple[torch.Tensor, RaggedRows]] = deque(maxlen=2)
        """Of pictures, and of windows."""

    def rows(self, cu_seqlens: torch.Tensor) -> RaggedRows:
        for known, rows in self._known:
            if known is cu_seqlens:
                return rows
        made = RaggedRows.of(cu_seqlens.cpu().numpy(), cu_seqlens.device)
        self._known.append((cu_seqlens, made))
        return made


class PackedAttention(nn.Module):
    def __init__(self, own: Any, lengths: Lengths, operations: Operations) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = own.qkv, own.proj, own.num_heads
        self.q_norm, self.k_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        self._lengths, self._operations = lengths, operations

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **others: Any,
    ) -> torch.Tensor:
        heads = self.heads(hidden_states)
        half = heads.shape[-1] // 2
        cos_sin = torch.cat([part[:, :half] for part in position_embeddings], dim=-1).float()
        turning = heads[:, :2].flatten(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            parts = [
                norm(heads[:, n].contiguous()) for n, norm in enumerate((self.q_norm, self.k_norm))
            ]
            turning = torch.cat(parts, dim=1)
        turned = rotate(turning, cos_sin[:, None]).to(heads.dtype)
        query, key = turned.chunk(2, dim=1)
        out = self._operations.bidirectional_attention(
            query, key, heads[:, 2], self._lengths.rows(cu_seqlens), heads.shape[-1] ** -0.5
        )
        projected: torch.Tensor = self.proj(out.flatten(1))
        return projected

    def heads(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values, [tokens, 3, num_heads, head_dim]; what turns together is
        half a head apart."""
        heads: torch.Tensor = self.qkv(hidden_states)
        return heads.view(len(hidden_states), 3, self.num_heads, -1)


class PackedPatches(nn.Module):
    """A convolution over whole patches."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.proj = own.proj

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight
        return F.linear(hidden_states.to(weight.dtype), weight.flatten(1), self.proj.bias)


class PackedNorm(nn.Module):
    def __init__(self, own: Any, operations: Operations) -> None:
        super().__init__()
        self.weight, self._eps, self._operations = own.weight, own.variance_epsilon, operations

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._operations.rms_norm(hidden_states, Norm(self.weight, self._eps))


def pack(
    tower: nn.Module,
    operations: Operations,
    attention: type[PackedAttention] = PackedAttention,
) -> None:
    """Put these parts in the place of a tower's own, which must be one of Qwen's kind."""
    lengths = Lengths()
    for parent in list(tower.modules()):
        for name, own in list(parent.named_children()):
            if isinstance(parent, PackedAttention):
                continue
            kind = type(own).__name__
            if kind.endswith("VisionAttention") and hasattr(own, "qkv"):
                setattr(parent, name, attention(own, lengths, operations))
            elif isinstance(getattr(own, "proj", None), nn.Conv3d):
                setattr(parent, name, PackedPatches(own))
            elif kind.endswith("RMSNorm"):
                setattr(parent, name, PackedNorm(own, operations))
