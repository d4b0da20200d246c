"""Decoders that run all layers several times over each token."""

from __future__ import annotations

from typing import ClassVar

from .blocks import BlockParts
from .decoder import Decoder


class LoopedDecoder(Decoder):
    """Counts the loops; a family's `forward` connects them."""

    loops_field: ClassVar[str]
    """Field of config.json with the number of loops."""

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        self.num_loops = int(getattr(parts.config.hf_config, self.loops_field))
