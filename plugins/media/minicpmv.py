"""MiniCPM-V 4.6: a picture, and its slices where it is large; pictures have numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class SlicesProcessor(ImageProcessor):
    """What stands for a picture, its slices, and its number."""

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._tokenize = self.tokenizer()
        self._around = self.token("<image>"), self.token("</image>")
        self._around_slice = self.token("<slice>"), self.token("</slice>")
        self._number_end = self.token("</image_id>")
        # Some tokenizers put a space before a text, but not behind a token.
        self._line_end = self._tokenize("</slice>\n<slice>")[1:-1]

    def of_slices(
        self, tensors: Mapping[str, np.ndarray], whole: int, slices: Sequence[int], columns: int
    ) -> ProcessedMedia:
        """Return a picture of so many rows, with slices of so many, in lines of `columns`."""
        tokens = self._part(whole, self._around)
        for number, count in enumerate(slices):
            if number and number % columns == 0:
                tokens += self._line_end
            tokens += self._part(count, self._around_slice)
        return ProcessedMedia(tensors, tokens, [token == self.placeholder_id for token in tokens])

    def _part(self, count: int, around: tuple[int, int]) -> list[int]:
        return [around[0], *self.repeated(count), around[1]]

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Put each picture's number before it, unless it is there."""
        if not self.images.use_image_id:
            return list(token_ids)
        tokens: list[int] = []
        number = 0
        for token in token_ids:
            if token == self.placeholder_id:
                if tokens[-1:] != [self._number_end]:
                    tokens += self._tokenize(f"<image_id>{number}</image_id>")
                number += 1
            tokens.append(token)
        return tokens


class MiniCPMVProcessor(SlicesProcessor):
    def image(self, image: Image) -> ProcessedMedia:
        made: Mapping[str, Any] = self.images(images=[image], return_tensors="np")
        sizes = np.asarray(made["target_sizes"])
        per_row = 4 if self.images.downsample_mode == "4x" else 16
        whole, *slices = (int(count) for count in sizes.prod(axis=-1) // per_row)
        tensors = {"pixel_values": np.asarray(made["pixel_values"]), "target_sizes": sizes}
        return self.of_slices(tensors, whole, slices, made["grids"][0][1])


class MiniCPMVEncoder(TransformersEncoder):
    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode pictures and slices of one size together, as one sequence of patches: transformers
        5.17 takes no others."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item in items:
            pixels, sizes = self.prepared(item)["pixel_values"], item["target_sizes"]
            lengths = (sizes.prod(dim=-1) * pixels.shape[2]).tolist()
            parts += zip(torch.split(pixels, lengths, dim=-1), sizes, strict=True)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (_, size) in enumerate(parts):
            alike.setdefault(tuple(size.tolist()), []).append(number)
        rows: dict[int, torch.Tensor] = {}
        for numbers in alike.values():
            pixels = torch.cat([parts[number][0] for number in numbers], dim=-1)
            sizes = torch.stack([parts[number][1] for number in numbers])
            rows |= zip(
                numbers, self.hf.get_image_features(pixels, sizes).pooler_output, strict=True
            )
        ordered = iter(rows[number] for number in range(len(parts)))
        return [torch.cat([next(ordered) for _ in item["target_sizes"]]) for item in items]


class MiniCPMV(Pictures):
    processor_class = MiniCPMVProcessor
    encoder_class = MiniCPMVEncoder
