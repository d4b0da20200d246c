"""Decoders that run all layers several times over each token."""

from __future__ import annotations

from typing import ClassVar

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from .blocks import MakeMLP, SelfAttention
from .decoder import Decoder


class LoopedDecoder(Decoder):
    """Counts the loops; a family's `forward` connects them."""

    loops_field: ClassVar[str]
    """Field of config.json with the number of loops."""

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__(config, build, attention, mlp)
        self.num_loops = int(getattr(config.hf_config, self.loops_field))
