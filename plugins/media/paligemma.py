"""PaliGemma: pictures of one size before the text, in a prompt whose tokens see each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia, Spans
from .family import Pictures
from .processor import ImageProcessor


class PaliGemmaProcessor(ImageProcessor):
    in_bytes = True

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        vision = self.config.vision_config
        self._count = (vision.image_size // vision.patch_size) ** 2
        self._begin, self._newline = self.token("<bos>"), self.token("\n")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        return ProcessedMedia(tensors, self.repeated(self._count))

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Put the token that begins texts behind the last picture, and a line's end last."""
        if self.placeholder_id not in token_ids:
            return list(token_ids)
        begin, newline = self._begin, self._newline
        tokens = list(token_ids[1:] if token_ids[0] == begin else token_ids)
        text = max(place for place, t in enumerate(tokens) if t == self.placeholder_id) + 1
        if tokens[text : text + 1] != [begin]:
            tokens.insert(text, begin)
        return tokens if tokens[-1] == newline else [*tokens, newline]


class PaliGemma(Pictures):
    processor_class = PaliGemmaProcessor

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans:
        return Spans.PROMPT
