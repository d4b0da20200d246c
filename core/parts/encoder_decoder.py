"""Encoder-decoder models: sources (what the encoder reads) in plans."""

from __future__ import annotations

import msgspec

from ..step import PartPlan

NAME = "encoder_decoder"


class SourceStart(msgspec.Struct, frozen=True, gc=False):
    """The source of a request taking a slot; blocks are in `StepPlan.table_writes`."""

    num_tokens: int


class EncodeItem(msgspec.Struct, frozen=True, gc=False):
    """A source to encode: its keys and values go to blocks that slots have from this plan on."""

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    """[ceil(len(token_ids) / block_size)]"""


class EncodePlan(PartPlan, frozen=True):
    """Sources of rows of this plan or later ones, encoded before any row."""

    items: tuple[EncodeItem, ...]

    @property
    def num_more_tokens(self) -> int:
        """Tokens of the sources."""
        return sum(len(item.token_ids) for item in self.items)


class Source(msgspec.Struct, frozen=True, gc=False):
    """A request's source (`Request.parts`); `Request.cache_extra` has its digest."""

    token_ids: list[int]
