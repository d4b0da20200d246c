"""Families whose pictures go through `transformers` alone: its processor writes what stands for a
picture, and its modules encode it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .family import Pictures
from .processor import ALONE, OPTION, ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


@functools.cache
def writer_class(model_type: str) -> Any:
    """Return a type's processor class, for pictures alone: what reads video or audio may be missing
    (it takes packages of its own). None if it does not say what stands for a picture."""
    import transformers
    from transformers.models.auto import processing_auto

    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    kind: Any = getattr(transformers, names.get(model_type) or "", None)
    if kind is None or getattr(kind, "is_dummy", False):
        return None
    base: Any = transformers.ProcessorMixin
    if getattr(kind, "replace_image_token", None) is getattr(base, "replace_image_token", None):
        return None
    changes = {
        "check_argument_for_proper_class": lambda self, name, argument: None,
        "__repr__": object.__repr__,  # Theirs is JSON, which an image processor of ours is not.
    }
    return type(kind.__name__, (kind,), changes)


class DerivedProcessor(ImageProcessor):
    def find_placeholder(self, setup: MediaSetup) -> int:
        import transformers
        from PIL import Image

        self._tokenize = self.tokenizer()
        create: Any = transformers.AutoTokenizer.from_pretrained  # Untyped.
        made = {"image_processor": self.images, "tokenizer": create(setup.folder)}
        kind = writer_class(setup.config.model_type)
        fields, _ = kind.get_processor_dict(setup.folder)
        names = kind.get_attributes()
        try:
            self._writer = kind.from_args_and_dict([made.get(name) for name in names], fields)
            sample = self.image(Image.new("RGB", (64, 64)))
        except Exception as error:
            param = OPTION if setup.processor_kwargs else "model"
            raise ConfigError(
                f"{param}: {kind.__name__}, with what {setup.folder.name} says of it, cannot "
                f"process a picture ({type(error).__name__}: {error}); {ALONE}",
                param=param,
            ) from error
        if setup.config.image_token_id not in sample.token_ids:
            raise ConfigError(
                f"model: {kind.__name__} writes no token {setup.config.image_token_id} for a "
                f"picture, which is image_token_id; {ALONE}",
                param="model",
            )
        self._alike = set(sample.token_ids) == {setup.config.image_token_id}
        return self.token(self._writer.image_token)

    def of_count(self, count: int) -> ProcessedMedia:
        """Where rows alone stand for a picture."""
        if not self._alike:
            return super().of_count(count)
        return ProcessedMedia({}, [self.config.image_token_id] * count)

    def written(self, image: Image) -> tuple[Mapping[str, Any], str]:
        """Return a picture's tensors, and the text that stands for it."""
        made, [text] = self._writer._process_images([image], **self._options)
        return made, text

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        merged = self._writer._merge_kwargs(
            self._writer.valid_processor_kwargs, tokenizer_init_kwargs={}, return_tensors="pt"
        )
        options: dict[str, Any] = merged["images_kwargs"]
        return options

    def image(self, image: Image) -> ProcessedMedia:
        made, text = self.written(image)
        tokens = self._tokenize(text)
        unused = self._writer.unused_input_names
        return ProcessedMedia(
            {name: np.asarray(value) for name, value in made.items() if name not in unused},
            tokens,
            [token == self.config.image_token_id for token in tokens],
        )


class Derived(Pictures):
    processor_class = DerivedProcessor

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if writer_class(setup.config.model_type) is None:
            return "the installed version of transformers does not say what stands for a picture"
        return None
