"""A layer whose weight a quantization method stores and applies: what such plugins subclass.

A method's layer says which tensors the checkpoint has for it (`tensors`), takes them when they are
there (`process`, once), and computes (`product`, or `forward` whole where a kernel can do the norm
before and the residual after in the same pass).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .norm import before_product
from .operations import DenseRows, ExpertWeight, Operations
from .packed import PackedWeight, dequantize

Role = Literal["linear", "head", "embedding", "experts"]
PRODUCTS: tuple[Role, ...] = ("linear", "experts")
"""What most formats store, whatever they do with embeddings and heads."""


@dataclass(frozen=True)
class LinearSpec:
    """A layer that a quantization method may take over."""

    prefix: str
    """The module's name, as in "model.layers.0.self_attn.qkv_proj"."""
    role: Role
    """"linear": a product. "head": the product that makes logits. "embedding": rows are looked up,
    and with tied embeddings it makes the logits, too. "experts": one linear layer of all experts of
    a mixture, each of them shards; what takes its place is a `PackedLinear`, or has `rows`."""
    in_features: int
    shards: Mapping[str, int]
    """Shard name → its rows; the layer's weight stacks them in this order. A plain layer has one,
    named ""."""
    sources: Mapping[str, str]
    """Shard name → what the checkpoint calls that layer ("model.layers.0.self_attn.q_proj")."""
    gated: bool
    """The layer's result is silu(first half) * second half of its product."""
    device: torch.device
    dtype: torch.dtype
    """Of inputs and outputs."""
    operations: Operations

    @property
    def out_features(self) -> int:
        """Rows of the weight, all shards."""
        return sum(self.shards.values())


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a checkpoint has for a shard of a layer."""

    shape: tuple[int, ...] | None
    """Dimensions of size one do not count; None: any, `process` looks at it."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Empty: any floating-point type."""
    optional: bool = False
    """The checkpoint may do without."""
    dummy: float | None = None
    """What `load_format=dummy` fills it with; None: small random numbers, or of integers random
    bits, and an optional tensor is left out."""
    alternative: TensorSpec | None = None
    """What it may be instead: rounded already, or not yet."""


class QuantizedLinear(nn.Module):
    """y = residual + norm(x) Wᵀ + b, in place of `Linear`, `MergedLinear`, `GatedLinear` or a head.

    Subclasses implement `tensors`, `process`, and `product` or `forward`. What `process` keeps it
    keeps with `keep`, so that the weight's memory is counted.
    """

    bias: nn.Parameter | None

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec
        self.bias = None
        self.processed = False
        self.shards: dict[str, slice] = {}
        """Rows of each shard, where there are several: how a merged bias is filled."""
        if len(spec.shards) > 1:
            start = 0
            for name, size in spec.shards.items():
                self.shards[name] = slice(start, start + size)
                start += size

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The checkpoint's tensors for a shard of so many rows: name behind the prefix → spec."""
        raise NotImplementedError

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Whether `process` can run with what has come so far, all but optional tensors.

        By default when nothing is missing, optional tensors included; where some never come, it
        runs when the checkpoint ends.
        """
        return all(
            name in shards.get(shard, {})
            for shard, rows in self.spec.shards.items()
            for name in self.tensors(rows)
        )

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Once, with the checkpoint's tensors of each shard: repack, join, `keep`.

        shards: shard name → name behind the prefix → tensor, on the layer's device. Raises
        LoadError when they do not fit together.
        """
        raise NotImplementedError

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Register what the layer needs from now on."""
        parameter = nn.Parameter(tensor.to(self.spec.device), requires_grad=False)
        self.register_parameter(name, parameter)
        return parameter

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] → x Wᵀ, [num_tokens, out_features], of x's type."""
        raise NotImplementedError

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; `residual` may be overwritten."""
        out = self.product(x if norm is None else norm(x))
        if self.bias is not None:
            out = out + self.bias
        if self.spec.gated:
            out = self.spec.operations.silu_mul(out)
        return out if residual is None else residual + out

    def logits(self, hidden: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """As a head: [num_rows, hidden_size] → [num_rows, vocab_size]"""
        out: torch.Tensor = self(hidden, norm=norm)
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Of an embedding, or of experts: [num_rows] → those rows of the weight, in the type of
        inputs, [num_rows, in_features]."""
        raise NotImplementedError

    @property
    def bank(self) -> ExpertWeight:
        """Of experts: what the operations multiply by. Kernels read a `PackedWeight`; of others
        they ask for `rows`, an expert's at a time, whether it was chosen or not."""
        return DenseRows(self.spec.out_features, self.rows)


class PackedLinear(QuantizedLinear):
    """A layer of one `PackedWeight`: subclasses make it from the checkpoint's tensors (`pack`)."""

    weight: PackedWeight

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> PackedWeight:
        """As `process`; what is returned is the layer's weight."""
        raise NotImplementedError

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Keep the packed weight's tensors."""
        packed = self.pack(shards)
        kept: dict[str, Any] = {
            name: self.keep(name, part) for name, part in packed.tensors().items()
        }
        self.weight = packed._replace(**kept)

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; `residual` may be overwritten."""
        x, fused = before_product(x, norm)
        return self.spec.operations.packed_linear(
            x,
            self.weight,
            self.bias,
            norm=fused,
            residual=residual,
            gated=self.spec.gated,
        )

    @property
    def bank(self) -> ExpertWeight:
        """Of experts: the weight."""
        return self.weight

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, in_features]"""
        return dequantize(self.weight.rows(indices), self.spec.dtype)


class QuantizedEmbedding(nn.Module):
    """In place of `Embedding`: rows dequantised as they are looked up; when tied, a head, too."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]"""
        return self.layer.rows(token_ids)

    def logits(self, hidden: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        return self.layer.logits(hidden, norm=norm)
