"""Encoder-decoder models: sources (what the encoder reads) in plans."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ..step import PartPlan

NAME = "encoder_decoder"


class FeatureShape(NamedTuple):
    """The sources of a model whose encoder reads features of a signal, not tokens. All are alike:
    shorter ones are padded."""

    channels: int
    frames: int
    num_rows: int
    """States that the encoder makes of them: tokens of the source, as far as blocks go."""


class SourceFeatures(msgspec.Struct, frozen=True, gc=False):
    """What an encoder reads that is not tokens, such as a spectrogram."""

    data: bytes
    """[channels, frames] float32, in C order"""
    num_rows: int
    """As `FeatureShape` has it."""


class Source(msgspec.Struct, frozen=True, gc=False):
    """A request's source (`Request.parts`): tokens or features."""

    token_ids: list[int] = []
    features: SourceFeatures | None = None

    @property
    def num_tokens(self) -> int:
        """Return the states that the encoder makes of it."""
        return len(self.token_ids) if self.features is None else self.features.num_rows

    @property
    def digest(self) -> str:
        """Return what stands for it in the hashes of all blocks that depend on it."""
        data = array("q", self.token_ids).tobytes() if self.features is None else self.features.data
        return blake2b(data, digest_size=32).hexdigest()


class SourceStart(msgspec.Struct, frozen=True, gc=False):
    """The source of a request taking a slot; blocks are in `StepPlan.table_writes`."""

    num_tokens: int


class EncodeItem(msgspec.Struct, frozen=True, gc=False):
    """A source to encode: its keys and values go to blocks that slots have from this plan on."""

    source: Source
    block_ids: tuple[int, ...]
    """[ceil(source.num_tokens / block_size)]"""


class EncodePlan(PartPlan, frozen=True):
    """Sources of rows of this plan or later ones, encoded before any row."""

    items: tuple[EncodeItem, ...]

    @property
    def num_more_tokens(self) -> int:
        """Tokens of the sources."""
        return sum(item.source.num_tokens for item in self.items)
