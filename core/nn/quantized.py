"""Base classes of layers whose weight a quantization method stores and applies.

A method's layer declares which tensors the checkpoint has for it (`tensors`), processes them when
they are loaded (`process`, once), and computes (`product`, or all of `forward` if a kernel can fuse
the norm before and the residual after).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn

from ..old_names import module_getattr, warn
from ..parallel.expert_share import ExpertShare
from ..parallel.sharding import Features, Sharding
from .layer_operations.experts import DenseRows, ExpertWeight
from .layer_operations.products import PositionRows, with_positions
from .norm import before_product
from .operations import Operations
from .quantized_weight import QuantizedWeight, dequantize

Axis: TypeAlias = tuple[Features, int]
"""Features that a dimension of a tensor runs over, and how many an element is for."""
Role = Literal["linear", "head", "embedding", "experts"]
PRODUCTS: tuple[Role, ...] = ("linear", "experts")
"""Roles that most formats store; they differ in embeddings and heads."""


@dataclass(frozen=True)
class LinearSpec:
    """A layer that a quantization method may replace."""

    prefix: str
    """The module's name, as in "model.layers.0.self_attn.qkv_proj"."""
    role: Role
    """"linear": a product. "head": the product that computes logits. "embedding": rows are looked
    up, and with tied embeddings it also computes the logits. "experts": one linear layer of all
    experts of a mixture, as shards; its replacement is a `QuantizedWeightLinear`, or has `rows`."""
    in_features: int
    shards: Mapping[str, int]
    """Shard name → its rows; the layer's weight stacks them in this order. A plain layer has one,
    named ""."""
    sources: Mapping[str, str]
    """Shard name → the layer's name in the checkpoint ("model.layers.0.self_attn.q_proj")."""
    gated: bool
    """The layer's result is silu(first half) * second half of its product."""
    device: torch.device
    dtype: torch.dtype
    """Type of inputs and outputs."""
    operations: Operations

    @property
    def out_features(self) -> int:
        """Rows of the weight, of all shards."""
        return sum(self.shards.values())


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a checkpoint has for a shard of a layer."""

    shape: tuple[int, ...] | None
    """Dimensions of size one are ignored; None: any, `process` checks it."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Empty: any floating-point type."""
    optional: bool = False
    """The checkpoint may lack it."""
    dummy: float | None = None
    """Value that `load_format=dummy` fills it with; None: small random numbers, or random bits for
    integers, and an optional tensor is left out."""
    axes: tuple[Axis | None, ...] | None = None
    """For its first dimensions, what each runs over: ("in", 8) has an element for every 8 input
    features, ("in", 0) cannot be divided by them, None is not by features. A tensor of one element
    is every rank's. None in place of all: ranks cannot divide such a layer."""
    alternative: TensorSpec | None = None
    """Alternative to this tensor: one that is already rounded, or not yet."""


class QuantizedLinear(nn.Module):
    """y = residual + norm(x) Wᵀ + b, in place of `Linear`, `MergedLinear`, `GatedLinear` or a head.

    Subclasses implement `tensors`, `process`, and `product` or `forward`. `process` stores tensors
    with `keep`, so that the weight's memory is counted.
    """

    bias: nn.Parameter | None
    batch_invariant: ClassVar[bool] = False
    """Whether it has no product but those of its operations, which may be batch-invariant."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec
        self.bias = None
        self.sharding: Sharding | None = None
        """What this rank holds of the layer's weight; None: all. `spec` is of that part."""
        self.shardings: dict[str, Sharding] = {}
        """As `Linear.shardings`, for the bias."""
        self.expert_share: ExpertShare | None = None
        """As `ExpertLinear.expert_share`."""
        self.processed = False
        self.shards: dict[str, slice] = {}
        """Rows of each shard, if there are several: used to fill a merged bias."""
        if len(spec.shards) > 1:
            start = 0
            for name, size in spec.shards.items():
                self.shards[name] = slice(start, start + size)
                start += size

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """Return the checkpoint's tensors of a shard with `out_features` rows: suffix → spec."""
        raise NotImplementedError

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Whether `process` can run with the tensors loaded so far, all but optional ones.

        Default: when no tensor is missing, not even an optional one; if some never come, `process`
        runs at the end of the checkpoint.
        """
        return all(
            name in shards.get(shard, {})
            for shard, rows in self.spec.shards.items()
            for name in self.tensors(rows)
        )

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Repack, join and `keep` the checkpoint's tensors of each shard; called once.

        shards: shard name → name's suffix → tensor, on the layer's device. Raises LoadError if they
        do not fit together.
        """
        raise NotImplementedError

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor that the layer needs from now on."""
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
        out = self.ungated(x, norm=norm)
        if self.spec.gated:
            out = self.spec.operations.silu_mul(out)
        return out if residual is None else residual + out

    def ungated(self, x: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """norm(x) Wᵀ + b, of a layer with gates too: [num_tokens, in_features] → [num_tokens,
        out_features]"""
        out = self.product(x if norm is None else norm(x))
        return out if self.bias is None else out + self.bias

    def logits(
        self, hidden: torch.Tensor, *, norm: nn.Module | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """Compute logits times `factor`, as a head: [num_rows, hidden_size] → [num_rows,
        vocab_size]"""
        out: torch.Tensor = self(hidden, norm=norm)
        return out if factor == 1.0 else out.mul_(factor)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight of an embedding, or of experts, in the type of inputs:
        [num_rows] → [num_rows, in_features]."""
        raise NotImplementedError

    def dense_weight(self) -> torch.Tensor:
        """Return the weight in the type of inputs: [out_features, in_features]."""
        size = self.spec.in_features
        unit = torch.eye(size, device=self.spec.device, dtype=self.spec.dtype)
        return self.product(unit).t().contiguous()

    @property
    def expert_weight(self) -> ExpertWeight:
        """Return the weight of experts that the operations multiply by. Kernels read a
        `QuantizedWeight`; for other weights the operations call `rows` for one expert at a time,
        chosen or not."""
        return DenseRows(self.spec.out_features, self.rows)

    @property
    def bank(self) -> ExpertWeight:
        """The old name of `expert_weight`."""
        warn("QuantizedLinear.bank", "expert_weight", stacklevel=3)
        return self.expert_weight


class QuantizedWeightLinear(QuantizedLinear):
    """A layer of one `QuantizedWeight`, which `pack` makes from the checkpoint's tensors."""

    weight: QuantizedWeight
    batch_invariant = True

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        """Return the layer's weight. Arguments and errors as for `process`."""
        raise NotImplementedError

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Keep the tensors of the weight that `pack` returns."""
        weight = self.pack(shards)
        kept: dict[str, Any] = {
            name: self.keep(name, tensor) for name, tensor in weight.tensors().items()
        }
        self.weight = weight._replace(**kept)

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; `residual` may be overwritten."""
        x, fused = before_product(x, norm)
        return self.spec.operations.quantized_linear(
            x,
            self.weight,
            self.bias,
            norm=fused,
            residual=residual,
            gated=self.spec.gated,
        )

    def ungated(self, x: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]"""
        x, fused = before_product(x, norm)
        return self.spec.operations.quantized_linear(x, self.weight, self.bias, norm=fused)

    def dense_weight(self) -> torch.Tensor:
        """[out_features, in_features]"""
        return dequantize(self.weight, self.spec.dtype)

    @property
    def expert_weight(self) -> ExpertWeight:
        """Return the weight, for experts."""
        return self.weight

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, in_features]"""
        return dequantize(self.weight.rows(indices), self.spec.dtype)


class QuantizedEmbedding(nn.Module):
    """Replaces `Embedding`: dequantises the rows it looks up; if tied, also a head."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        factor: float = 1.0,
        positions: PositionRows | None = None,
    ) -> torch.Tensor:
        """As `Embedding.forward`: [num_tokens] → [num_tokens, hidden_size]"""
        return with_positions(self.layer.rows(token_ids), factor, positions)

    def logits(
        self, hidden: torch.Tensor, *, norm: nn.Module | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        return self.layer.logits(hidden, norm=norm, factor=factor)


__getattr__ = module_getattr(
    __name__, {"PackedLinear": "jackfield.core.nn.quantized.QuantizedWeightLinear"}
)
