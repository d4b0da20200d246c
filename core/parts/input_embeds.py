"""Rows in the place of token embeddings: items of prompts, whose rows an encoder makes or a request
gives, and which are made with a plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..step import PartPlan
from .media import MediaItem, MediaTensor, PlacedItem

NAME = "input_embeds"


class RequestItems(msgspec.Struct, frozen=True, eq=False):
    """A request's items in the order of the prompt (`Request.parts`); `Request.late_extra` has
    their digests."""

    items: Sequence[MediaItem]


class SlotItems(msgspec.Struct, frozen=True, gc=False):
    """The items of a request that takes a slot, in order."""

    items: tuple[PlacedItem, ...]
    prompt_span: int = 0
    """Tokens of the prompt, if they see each other in both directions."""


class ItemToEncode(msgspec.Struct, frozen=True, gc=False):
    """An item to encode before any row of the plan."""

    digest: str
    num_rows: int
    tensors: dict[str, MediaTensor]


class InputEmbedsPlan(PartPlan, frozen=True):
    """What is encoded with a plan, and which outputs are kept no longer."""

    encode: tuple[ItemToEncode, ...] = ()
    drop: tuple[str, ...] = ()
    """Digests of outputs; before `encode`."""
    drop_all: bool = False
    """An earlier plan failed, so that what it should have encoded is not known to be there."""


def tokens_by_modality(own: RequestItems | None) -> dict[str, int]:
    """Return how many tokens of a prompt stand for items, by modality."""
    counts: dict[str, int] = {}
    for item in () if own is None else own.items:
        modality = item.content.modality
        counts[modality] = counts.get(modality, 0) + len(item.content.token_ids)
    return counts
