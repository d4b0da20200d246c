"""Sizes of layers with a state."""

from __future__ import annotations

from typing import NamedTuple


class Mamba2Sizes(NamedTuple):
    """Sizes of a layer of Mamba 2."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    """Groups of heads that share their keys and queries (B and C), and of channels that are normed
    together."""
    kernel: int
    """Inputs that the convolution sees."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of the keys of all groups, and of the queries."""
        return self.num_groups * self.state_size

    @property
    def projection(self) -> tuple[int, int, int]:
        """Widths: gate; inputs, keys and queries; step sizes."""
        return self.inner, sum(self.convolved), self.num_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Widths: inputs; keys; queries."""
        return self.inner, self.keys, self.keys


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Inputs that the convolution sees."""

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values, and of the gate."""
        return self.num_value_heads * self.value_dim

    @property
    def projection(self) -> tuple[int, int, int, int]:
        """Widths: queries, keys and values; gate; logits of beta; step sizes."""
        heads = self.num_value_heads
        return 2 * self.keys + self.values, self.values, heads, heads
