"""The contract of KV compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .attention import AttentionSpec


class KVCompressor(ABC):
    """Says which cached tokens matter most, so that the others can be dropped. Subclass it.

    A request's cache is compacted once, when its prompt is computed: the tokens with the highest
    scores stay, the same number in every layer and KV head, but each head keeps its own. To test a
    compressor: `jackfield.plugins.conformance.kv_compressors`.
    """

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Return why it cannot serve a layer, in one clause; None (the default) if it can."""
        return None

    @abstractmethod
    def scores(self, spec: AttentionSpec, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the scores of one request's tokens in one layer.

        keys, values: [num_tokens, num_kv_heads, head_dim] as cached (keys normed and rotated),
        token i at position i of the sequence; not to be changed. → [num_tokens, num_kv_heads], any
        real type, finite or +-inf; they depend on nothing else. Among equal scores, earlier tokens
        stay. Runs between steps on the device: no copies to the host, which would wait for it.
        """
