"""Encodes items with `transformers`' modules."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.parts.media import PlacedItem
from ...core.protocols.media import MediaSetup, RopeSections
from ..models.fallback.build import allocate, on_meta
from .processor import NORMALISATION

PREFIXES = ("model.", "thinker.model.", "thinker.", "vlm.model.", "vlm.", "")
"""What checkpoints write before the names of a model's parts."""


@dataclass(frozen=True)
class EncoderWeights(WeightMap):
    """Finds an encoder's tensors by their names in `transformers`."""

    found: frozenset[str] = frozenset()
    """Names of parameters."""
    renamed_parts: Mapping[str, str] = field(default_factory=dict)
    """Part of a name in some checkpoints → part here."""
    original_names: Sequence[tuple[str, str]] = ()
    """Patterns in the names of checkpoints in the form in which they were published, and what
    stands there here: one after the other."""

    def own(self, name: str) -> str | None:
        for prefix in PREFIXES:
            if not name.startswith(prefix):
                continue
            own = name.removeprefix(prefix)
            renamed = own
            for pattern, replacement in self.original_names:
                renamed = re.sub(pattern, replacement, renamed)
            parts = (own.replace(o, n) for o, n in self.renamed_parts.items())
            for changed in (own, *parts, renamed):
                if f"hf.{changed}" in self.found:
                    return f"hf.{changed}"
        return None


class TransformersEncoder(nn.Module):
    """The parts of a model of `transformers` that read media, used as it uses them itself."""

    num_levels = 0
    rope: RopeSections | None = None
    text_modules: ClassVar[tuple[str, ...]] = ("language_model", "text_model")
    """Parts of the whole model that are not used."""
    renamed_parts: ClassVar[Mapping[str, str]] = {".vision_model.": "."}
    original_names: ClassVar[Sequence[tuple[str, str]]] = ()
    channels: ClassVar[tuple[int, ...]] = (3, 1, 1)
    """What pixels' last dimensions are, with 1 for all but that of the channels."""

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__()
        from transformers import PreTrainedModel

        config = copy.deepcopy(setup.config)
        config.quantization_config = None
        with on_meta():
            whole = self.create(config, build.dtype)
        for name in self.text_modules:
            if name in whole._modules:
                delattr(whole, name)
        whole.eval()
        for module in whole.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.num_batches_tracked = None  # Only training counts.
        # Each model inside, the innermost first, knows the buffers of its own modules.
        for module in reversed(list(whole.modules())):
            if isinstance(module, PreTrainedModel) or module is whole:
                allocate(module, build)
        self.hf = whole
        names = frozenset(name for name, _ in self.named_parameters())
        self.weight_map: WeightMap = EncoderWeights(
            found=names, renamed_parts=self.renamed_parts, original_names=self.original_names
        )
        self.dtype = build.dtype

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        """Return the whole model, without its head."""
        from transformers import AutoModel

        create: Any = AutoModel.from_config  # Untyped.
        return create(config, dtype=dtype)

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode items of one shape together."""
        prepared = [self.prepared(item) for item in items]
        groups: dict[Any, list[int]] = {}
        for number, tensors in enumerate(prepared):
            shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
            groups.setdefault(shapes, []).append(number)
        rows: dict[int, torch.Tensor] = {}
        for numbers in groups.values():
            own = [prepared[number] for number in numbers]
            rows |= zip(numbers, self.encode_together(own), strict=True)
        return [rows[number] for number in range(len(items))]

    def prepared(self, item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that the model takes."""
        tensors = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in item.items()
            if name != NORMALISATION
        }
        if (parameters := item.get(NORMALISATION)) is not None:
            tensors["pixel_values"] = self.normalised(item["pixel_values"], parameters)
        return tensors

    def normalised(self, pixels: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """Return pixels as the image processor would have."""
        factor, mean, deviation = parameters.view(3, *self.channels)
        pixels = (pixels.float() * factor - mean) / deviation
        return pixels.to(self.dtype)

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Return the rows of pictures; by default they have one shape."""
        tensors = {name: torch.cat([item[name] for item in items]) for name in items[0]}
        return self.rows(self.hf.get_image_features(**tensors), len(items))

    def rows(self, output: Any, count: int) -> Sequence[torch.Tensor]:
        """Return the rows in the output for so many pictures."""
        rows = output.pooler_output
        if isinstance(rows, torch.Tensor):
            return list(rows.reshape(count, -1, rows.shape[-1]))
        parts = [part.reshape(-1, part.shape[-1]) for part in rows]
        each = len(parts) // count
        return [torch.cat(parts[first : first + each]) for first in range(0, len(parts), each)]

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        raise NotImplementedError("only with `rope`")
