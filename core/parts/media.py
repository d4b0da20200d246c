"""Items of prompts: pictures, recordings, videos and embeddings, and what stands for them there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = "rows"
"""Name of the tensor of an item that is given as the rows that an encoder would return."""


class MediaTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of an item's processor."""

    dtype: str
    """Name of a numpy dtype."""
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> MediaTensor:
        return cls(str(array.dtype), array.shape, array.tobytes())


class MediaContent(msgspec.Struct, frozen=True, weakref=True, eq=False, kw_only=True):
    """An item as the model takes it, wherever it stands."""

    modality: str
    digest: str
    """Of all that the encoder's output depends on: pixels, their shape, the processor's options."""
    token_ids: tuple[int, ...]
    """What stands in the prompt in place of the placeholder."""
    runs: tuple[tuple[int, int], ...]
    """(offset in `token_ids`, tokens) where rows of the encoder's output stand, in order."""
    tensors: dict[str, MediaTensor]
    grid: tuple[int, ...] = ()
    """(frames, rows, columns) of units, for models that rotate by place; else empty."""
    frame_positions: tuple[int, ...] = ()
    """As in `ProcessedMedia`."""

    @property
    def num_rows(self) -> int:
        """Rows of the encoder's output."""
        return sum(count for _, count in self.runs)

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


class MediaItem(msgspec.Struct, frozen=True, eq=False):
    """An item in a prompt."""

    start: int
    """Position of its first token."""
    content: MediaContent

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.content.token_ids)


class PlacedItem(msgspec.Struct, frozen=True, gc=False):
    """Where an item stands in the prompt of a slot's request."""

    start: int
    num_tokens: int
    digest: str
    runs: tuple[tuple[int, int], ...]
    grid: tuple[int, ...] = ()
    frame_positions: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def prompt_extra(token_ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[int, str]:
    """Return what the keys of all blocks depend on where the tokens of a prompt see each other."""
    digest = blake2b(array("q", token_ids).tobytes(), digest_size=32)
    for item in items:
        digest.update(f"{item.start} {item.content.digest}\n".encode())
    return 0, digest.hexdigest()


def late_extras(items: Sequence[MediaItem]) -> tuple[tuple[int, str], ...]:
    """Return what the keys of blocks depend on, from which position on (`Request.late_extra`)."""
    return tuple((item.start, item.content.digest) for item in items)
