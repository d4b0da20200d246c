"""What families share that take recordings: features of `transformers`' extractors, and encoders
of its modules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .processor import check_fields

OPTION = "mm_processor_kwargs"


class FeatureExtractor:
    """A family says which features its encoder takes, and how many rows it returns for them."""

    around = ("", "")
    max_samples: int | None = None
    options: ClassVar[Mapping[str, Any]] = {"return_attention_mask": True}
    """Arguments of the extractor."""

    def __init__(self, setup: MediaSetup) -> None:
        """Raises ConfigError."""
        if setup.processor_kwargs and not hasattr(setup.config, "vision_config"):
            raise ConfigError(
                f"{OPTION}: {', '.join(sorted(setup.processor_kwargs))}: the processor of "
                "recordings has no options; leave it out",
                param=OPTION,
            )
        self.config = setup.config
        self.extractor = self.load(setup)
        self.sampling_rate = int(self.extractor.sampling_rate)
        self.placeholder_id = self.find_placeholder(setup)
        own = self.extractor.to_dict()
        options = json.dumps([own, dict(self.options)], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(options.encode()).hexdigest()

    def load(self, setup: MediaSetup) -> Any:
        """Return the extractor. Raises ConfigError."""
        from transformers import AutoFeatureExtractor

        try:
            create: Any = AutoFeatureExtractor.from_pretrained  # Untyped.
            return create(setup.folder)
        except Exception as error:
            raise ConfigError(
                f"model: the feature extractor of {setup.folder.name} cannot be made "
                f"({type(error).__name__}: {error})",
                param="model",
            ) from error

    def find_placeholder(self, setup: MediaSetup) -> int:
        """Return the token by which prompts say where a recording stands."""
        config = setup.config
        return int(getattr(config, "audio_token_id", None) or config.audio_token_index)

    def audio(self, samples: np.ndarray) -> ProcessedMedia:
        tensors = self.tensors(samples)
        count = self.count(tensors)
        if count < 1:
            raise ValueError("it is too short")
        return ProcessedMedia(tensors, *self.written(count))

    def written(self, count: int) -> tuple[list[int], list[bool] | None]:
        """Return what stands for so many rows, and which tokens do (None: all)."""
        return [self.placeholder_id] * count, None

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        """See `protocols.media.TakesRows`."""
        check_fields(fields)
        return [ProcessedMedia({}, *self.written(count))]

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return what the encoder takes."""
        made = self.extracted(samples)
        return {"input_features": made["input_features"], self.mask_name: made["attention_mask"]}

    mask_name: ClassVar[str] = "input_features_mask"
    """What the encoder calls the mask of true frames."""

    def extracted(self, samples: Any) -> Mapping[str, np.ndarray]:
        """Return the extractor's tensors of samples, [n] float32, or of a list of these."""
        out = self.extractor(
            samples, sampling_rate=self.sampling_rate, return_tensors="np", **self.options
        )
        return {name: np.asarray(value) for name, value in out.items()}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        """Return the rows that the encoder returns for these."""
        raise NotImplementedError


class AudioEncoder(TransformersEncoder):
    """The parts of a model of `transformers` that read recordings."""

    class_name: ClassVar[str] = ""
    """Of `transformers`; "": the checkpoint's architecture."""

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        if "input_features" not in items[0]:
            return super().encode_together(items)
        return [self.encode_one(item) for item in items]

    def encode_one(self, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a recording's rows."""
        return self.heard(self.hf.get_audio_features(**item))

    def heard(self, output: Any) -> torch.Tensor:
        """Return the rows in the output for one recording."""
        rows: torch.Tensor = getattr(output, "pooler_output", output)
        return rows.reshape(-1, rows.shape[-1])

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        import transformers

        kind: Any = getattr(transformers, cls.class_name or config.architectures[0])
        whole = kind._from_config(config, dtype=dtype)
        inner = whole._modules.get("model")
        if hasattr(inner, "audio_tower") or hasattr(inner, "encoder"):
            return inner
        # In some versions, a part of its own is the text's.
        for name in ("model", "lm_head"):
            whole._modules.pop(name, None)
        return whole
