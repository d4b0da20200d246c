"""Idefics 2: pictures of about their own size, of which a number of queries is all that is read; in
four parts and the whole, if the checkpoint says so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .idefics3 import AROUND, PATCHES, in_patches
from .processor import ImageProcessor
from .text_runs import TextRuns

if TYPE_CHECKING:
    from PIL.Image import Image


class Idefics2Processor(ImageProcessor):
    """A mark is before each run of rows, and behind the last one of pictures side by side."""

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._mark = self.token(AROUND)
        self._runs = TextRuns(setup.folder, self.tokenizer(), AROUND)

    def image(self, image: Image) -> ProcessedMedia:
        # Of parts that differ in size, the smaller ones are filled up.
        return self.processed(self.tensors(image, do_pad=True))

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        [pixels], [mask] = tensors["pixel_values"], tensors["pixel_attention_mask"]
        patches = np.asarray(in_patches(mask, self.config.vision_config.patch_size).all((2, 4)))
        run = [self._mark, *self.repeated(self.config.perceiver_config.resampler_n_latents)]
        tokens = run * len(pixels)
        embedded = [token == self.placeholder_id for token in tokens]
        return ProcessedMedia({"pixel_values": pixels, PATCHES: patches}, tokens, embedded)

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Put the mark behind pictures, and a space before a word that follows."""
        tokens: list[int] = []
        marks, behind = (self.placeholder_id, self._mark), False
        for of_pictures, run in itertools.groupby(token_ids, marks.__contains__):
            own = list(run)
            if count := own.count(self.placeholder_id):
                own = [*self.repeated(count), self._mark]
            elif behind and not of_pictures:
                own = self._spaced(own)
            behind = count > 0
            tokens += own
        return tokens

    def _spaced(self, tokens: list[int]) -> list[int]:
        """Return a text's tokens with a space before a word, unless the tokenizer itself takes what
        is behind a mark for the beginning of one."""
        runs = self._runs
        own = list(itertools.takewhile(lambda token: token not in runs.added, tokens))
        text = None if runs.begins_words else runs.text(own)
        if not text or text[0].isspace() or text[0] == "<":
            return tokens
        return runs.tokens(f" {text}") + tokens[len(own) :]


class Idefics2Encoder(TransformersEncoder):
    """Encodes all parts: theirs looks at the pixels for parts that pad a batch, and there are
    none."""

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        tensors = {name: torch.cat([item[name] for item in items]) for name in items[0]}
        states = self.hf.vision_model(**tensors).last_hidden_state
        rows = self.hf.connector(states, attention_mask=tensors[PATCHES].flatten(1))
        return list(rows.reshape(len(items), -1, rows.shape[-1]))


class Idefics2(Pictures):
    processor_class = Idefics2Processor
    encoder_class = Idefics2Encoder
