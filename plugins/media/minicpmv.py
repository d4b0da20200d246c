"""MiniCPM-V 4.6: a picture, and its slices where it is large; pictures have numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class MiniCPMVProcessor(ImageProcessor):
    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        if setup.tokenize is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a picture of this model is text",
                param="skip_tokenizer_init",
            )
        self._tokenize = setup.tokenize
        self._around = self.token("<image>"), self.token("</image>")
        self._around_slice = self.token("<slice>"), self.token("</slice>")
        self._around_number = self.token("<image_id>"), self.token("</image_id>")
        self._per_token = 4 if self.images.downsample_mode == "4x" else 16

    def image(self, image: Image) -> ProcessedMedia:
        made: Mapping[str, Any] = self.images(images=[image], return_tensors="np")
        sizes = np.asarray(made["target_sizes"])
        first, *slices = (int(count) for count in sizes.prod(axis=-1) // self._per_token)
        tokens = self._part(first, self._around)
        _, columns = made["grids"][0]
        for number, count in enumerate(slices):
            if number and number % columns == 0:
                tokens += self._tokenize("\n")
            tokens += self._part(count, self._around_slice)
        return ProcessedMedia(
            {"pixel_values": np.asarray(made["pixel_values"]), "target_sizes": sizes},
            tokens,
            [token == self.placeholder_id for token in tokens],
        )

    def _part(self, count: int, around: tuple[int, int]) -> list[int]:
        return [around[0], *self.repeated(count), around[1]]

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Put each picture's number before it, unless it is there."""
        begin, end = self._around_number
        if not self.images.use_image_id:
            return list(token_ids)
        tokens: list[int] = []
        number = 0
        for token in token_ids:
            if token == self.placeholder_id:
                if tokens[-1:] != [end]:
                    tokens += [begin, *self._tokenize(str(number)), end]
                number += 1
            tokens.append(token)
        return tokens


class MiniCPMVEncoder(TransformersEncoder):
    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Encode pictures one behind the other, as one sequence of patches."""
        output = self.hf.get_image_features(
            torch.cat([item["pixel_values"] for item in items], dim=-1),
            torch.cat([item["target_sizes"] for item in items]),
        )
        parts = iter(output.pooler_output)
        return [torch.cat([next(parts) for _ in item["target_sizes"]]) for item in items]

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode pictures of any sizes together."""
        return self.encode_together([self.prepared(item) for item in items])


class MiniCPMV(Pictures):
    processor_class = MiniCPMVProcessor
    encoder_class = MiniCPMVEncoder
