"""Routed experts: what a mixture's routers chose for each token, for whoever replays it."""

from __future__ import annotations

import msgspec
import numpy as np

NAME = "routed_experts"


class RoutedShape(msgspec.Struct, frozen=True):
    """What the worker keeps of each token."""

    num_layers: int
    """Those with a mixture, in order."""
    top_k: int
    num_experts: int
    """Of a layer, those that compute nothing included."""
    group: int
    """Number of the cache group that has a place for each token of a sequence."""

    @property
    def dtype(self) -> np.dtype:
        """Type of an expert's number: uint8, or uint16 where it is too small."""
        return np.dtype(np.uint8 if self.num_experts <= 1 << 8 else np.uint16)


class RoutedArray(msgspec.Struct, frozen=True):
    """The choices of a completion, as they are sent between processes."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: str

    @classmethod
    def of(cls, routed: np.ndarray | None) -> RoutedArray | None:
        """routed: [num_tokens, num_layers, top_k]"""
        if routed is None:
            return None
        tokens, layers, top_k = routed.shape
        return cls(routed.tobytes(), (tokens, layers, top_k), routed.dtype.name)

    def array(self) -> np.ndarray:
        """[num_tokens, num_layers, top_k]"""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class RoutedTokens(msgspec.Struct, frozen=True):
    """The choices of a step's tokens."""

    places: bytes
    """[num_tokens] int64: where their keys and values are, block * block_size + offset."""
    experts: bytes
    """[num_tokens, num_layers, top_k], of `RoutedShape.dtype`"""
