"""Families without a class of their own, on `transformers` alone: its processor writes what stands
for a picture, and `get_image_features` encodes it. Only where nothing else is done with pictures,
which `placement.py` sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.nn.context import BuildContext
from ...core.protocols.media import MediaSetup
from ..models.fallback.build import on_meta
from .derived import Derived
from .encoder import EncoderWeights, TransformersEncoder
from .placement import TEXT_PARTS, FeatureCall, NotPlacedError, feature_call


@dataclass(frozen=True)
class RenamedWeights(EncoderWeights):
    """Renames tensors as `transformers` does when it loads them."""

    renamings: Sequence[Any] = ()

    def own(self, name: str) -> str | None:
        renamed = name
        for renaming in self.renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        return super().own(renamed) or super().own(name)


class FallbackEncoder(TransformersEncoder):
    text_modules = TEXT_PARTS

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self._call: FeatureCall = self.hf.feature_call
        names = frozenset(name for name, _ in self.named_parameters())
        renamings, _ = conversions(self.hf)
        self.weight_map = RenamedWeights(found=names, renamings=renamings)

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        """Raises NotPlacedError, too."""
        whole = super().create(config, dtype)
        whole.feature_call = feature_call(whole, config)
        _, converted = conversions(whole)
        if converted:
            raise NotPlacedError(f"checkpoints have its tower's {converted[0]} in another form")
        return whole

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode items one by one: how rows of several are joined differs."""
        return [self._rows(self.prepared(item)) for item in items]

    def _rows(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = self.hf.get_image_features(**self._call.arguments(tensors)).pooler_output
        parts = [rows] if isinstance(rows, torch.Tensor) else rows
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def conversions(whole: Any) -> tuple[list[Any], list[str]]:
    """Return how `transformers` renames tensors of checkpoints, and which parameters it computes
    from others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    own = [name for name, _ in whole.named_parameters()]
    renamings, converted = [], []
    for each in get_model_conversion_mapping(whole):
        if not isinstance(each, WeightConverter):
            renamings.append(each)
            continue
        targets = [target for target in each.target_patterns if any(target in n for n in own)]
        converted += targets
    return renamings, converted


class Fallback(Derived):
    encoder_class = FallbackEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if (reason := super().refusal(setup)) is not None:
            return reason
        try:
            with on_meta():
                FallbackEncoder.create(setup.config, torch.float32)
        except NotPlacedError as error:
            return str(error)
        except Exception as error:  # Of any class of theirs.
            return f"transformers cannot build its tower ({' '.join(str(error).split())[:200]})"
        return None
