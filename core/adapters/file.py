"""What an adapter's files say, whatever their format.

Names are those of the base model's checkpoint, without a trainer's prefixes. Tensors are read when
they are asked for, in the type of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

ReadTensor: TypeAlias = Callable[[], torch.Tensor]
"""Reads a tensor from the adapter's file; may be called more than once, on any thread."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are numbers. In one pass, which `torch.isfinite` is not."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())  # A NaN is both ends.


@dataclass(frozen=True)
class LowRank:
    """A change of one linear layer or embedding: W + scale · B A."""

    name: str
    """The layer, such as "model.layers.0.self_attn.q_proj"."""
    rank: int
    in_features: int
    """Columns of A; of an embedding, its tokens."""
    out_features: int
    """Rows of B; of an embedding, its width."""
    scale: float
    a: ReadTensor
    """[rank, in_features]"""
    b: ReadTensor
    """[out_features, rank]"""
    bias: ReadTensor | None = None
    """[out_features], PEFT's `lora_bias`: the layer's result gets scale · bias more."""
    magnitude: ReadTensor | None = None
    """[out_features], DoRA (arXiv 2402.09353): the length of each row of the changed weight. The
    layer's own bias is not scaled."""
    embedding: bool = False
    """Whether the layer is looked up by token."""
    pairs: bool = False
    """Whether B's rows have, within each head, the two channels of a rotation side by side, as GGUF
    files have them of some families; otherwise they are half a head apart."""


@dataclass(frozen=True)
class ExpertsLowRank:
    """A change of one tensor of all E experts of a mixture, each expert's of its own."""

    name: str
    """The tensor, such as "model.layers.0.mlp.experts.gate_up_proj"."""
    num_experts: int
    rank: int
    """Rank of each expert."""
    in_features: int
    out_features: int
    scale: float
    a: ReadTensor
    """[num_experts, rank, in_features], whatever the order of the checkpoint's dimensions"""
    b: ReadTensor
    """[num_experts, out_features, rank], rows in the checkpoint's order"""


@dataclass(frozen=True)
class TokenRows:
    """New rows of an embedding, in place of the base model's."""

    name: str
    """The embedding, such as "model.embed_tokens"."""
    token_ids: tuple[int, ...]
    rows: ReadTensor
    """[len(token_ids), hidden_size]"""


@dataclass(frozen=True)
class AdapterFile:
    """All that an adapter changes."""

    digest: str
    """Digest of the content: equal for equal tensors and settings, whatever the path."""
    low_rank: tuple[LowRank, ...] = ()
    experts: tuple[ExpertsLowRank, ...] = ()
    replaced: Mapping[str, ReadTensor] = field(default_factory=dict)
    """Tensor of the checkpoint, such as "lm_head.weight" → what takes its place (PEFT's
    `modules_to_save`, trained biases)."""
    token_rows: tuple[TokenRows, ...] = ()
    """A head that the model ties to the embeddings gets theirs too, unless it has rows of its own
    here."""
    invocation_tokens: tuple[int, ...] = ()
    """aLoRA (arXiv 2504.12397): it acts from the first token of their last occurrence in the
    prompt on, and not at all without one. Empty: it acts everywhere."""
    base_model: str = ""
    """What the file says; a path of the trainer's machine, often."""
    notes: tuple[str, ...] = ()
    """What was ignored because it does not change results, for logs and `jackfield lora`."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        ranks = [each.rank for each in self.low_rank]
        return max([*ranks, *(each.rank for each in self.experts)], default=0)

    @property
    def plain(self) -> bool:
        """Whether all that it changes are linear layers, by low-rank products alone."""
        return not (self.experts or self.replaced or self.token_rows) and not any(
            each.embedding or each.bias or each.magnitude for each in self.low_rank
        )
