"""Processes pictures with `transformers`' image processors, in their Pillow form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup, ProcessedMedia

if TYPE_CHECKING:
    from PIL.Image import Image

OPTION = "mm_processor_kwargs"
ALONE = "without pictures it is served with language_model_only"
"""What an error at start says in the end."""
LOWERABLE = (
    "max_pixels", "max_patches", "max_soft_tokens", "max_image_tokens", "max_tiles",
    "max_slice_nums", "max_dynamic_patch",
)  # fmt: skip
"""Options that bound what a picture takes."""
NORMALISATION = "normalisation"
"""Name of a tensor [3, 3] beside pixels in bytes: by what the encoder multiplies them, what it
subtracts then, and by what it divides, of each channel."""


class ImageProcessor:
    """A family says what stands for a picture, and which tensors its encoder takes."""

    around = ("", "")
    in_bytes = False
    """Pixels go to the encoder in bytes, a fourth of the size, and are normalised there. Only
    where nothing is done to them after that."""

    def __init__(self, setup: MediaSetup) -> None:
        """Raises ConfigError for options that the processor does not have."""
        self.setup = setup
        own = self.create_images(setup)
        self.images, self.config, self._tokens = own, setup.config, setup.tokenize
        options = json.dumps(own.to_dict(), sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(f"{type(own).__name__} {options}".encode()).hexdigest()
        self._normalisation: np.ndarray | None = None
        if self.in_bytes and own.do_rescale and own.do_normalize:
            rows = [[own.rescale_factor] * 3, own.image_mean, own.image_std]
            self._normalisation = np.asarray(rows, dtype=np.float32)
            own.do_rescale = own.do_normalize = False
        self.placeholder_id: int = self.find_placeholder(setup)

    def create_images(self, setup: MediaSetup) -> Any:
        """Return the image processor. Raises ConfigError as the constructor."""
        # Elsewhere, older versions name a class here that refuses to work without torchvision.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        given = dict(setup.processor_kwargs)
        try:
            create: Any = AutoImageProcessor.from_pretrained  # Untyped.
            own: Any = create(setup.folder, backend="pil", **given)
        except Exception as error:
            param = OPTION if given else "model"
            raise ConfigError(
                f"{param}: the image processor of {setup.folder.name} cannot be made "
                f"({type(error).__name__}: {error}); {ALONE}",
                param=param,
            ) from error
        if unknown := sorted(given.keys() - own.valid_kwargs.__annotations__.keys()):
            raise ConfigError(
                f"{OPTION}: {type(own).__name__} has no option {', '.join(unknown)}", param=OPTION
            )
        return own

    def lowered(self, options: Mapping[str, Any]) -> ImageProcessor:
        for name, value in options.items():
            own = self.most(name)
            if own is None:
                raise ValueError(f"{name}: is no option of this model that a request may lower")
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= own:
                raise ValueError(f"{name}: must be a whole number from 1 to {own}, got {value!r}")
        given = {**self.setup.processor_kwargs, **options}
        return type(self)(dataclasses.replace(self.setup, processor_kwargs=given))

    def most(self, name: str) -> int | None:
        """Return the server's value of an option that requests may lower."""
        own = getattr(self.images, name, None) if name in LOWERABLE else None
        if own is None and name == "max_pixels":
            own = getattr(getattr(self.images, "size", None), "longest_edge", None)
        return own if isinstance(own, int) else None

    def find_placeholder(self, setup: MediaSetup) -> int:
        """Return the token by which prompts say where a picture stands."""
        return int(setup.config.image_token_id)

    def tokenizer(self) -> Callable[[str], list[int]]:
        """Return what makes tokens of what is written for a picture. Raises ConfigError without."""
        if self._tokens is None:
            raise ConfigError(
                "skip_tokenizer_init: what stands for a picture of this model is text",
                param="skip_tokenizer_init",
            )
        return self._tokens

    def token(self, text: str) -> int:
        """Return the id of a token. Raises ConfigError for a text that is none."""
        if self._tokens is None:
            raise ConfigError(
                f"skip_tokenizer_init: pictures of this model take the token {text!r}",
                param="skip_tokenizer_init",
            )
        ids = self._tokens(text)
        if len(ids) != 1:
            raise ConfigError(f"model: its tokenizer has no token {text!r}", param="model")
        return ids[0]

    def image(self, image: Image) -> ProcessedMedia:
        return self.processed(self.tensors(image))

    def tensors(self, image: Image, **options: Any) -> dict[str, np.ndarray]:
        """Return the image processor's tensors, with pixels in bytes if so declared."""
        made = self.images(images=[image], return_tensors="np", **options)
        tensors = {name: np.asarray(value) for name, value in made.items()}
        if self._normalisation is not None:
            tensors["pixel_values"] = self.bytes_of(tensors["pixel_values"])
            tensors[NORMALISATION] = self._normalisation
        return tensors

    def bytes_of(self, pixels: np.ndarray) -> np.ndarray:
        return pixels.astype(np.uint8)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        """Return what stands for a picture, of which these are the processor's tensors."""
        raise NotImplementedError

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        """See `protocols.media.TakesRows`. By default, one picture of which the number of rows
        says all."""
        check_fields(fields)
        return [self.of_count(count)]

    def of_count(self, count: int) -> ProcessedMedia:
        """Return what stands for a picture of so many rows, without tensors. Raises ValueError if
        that takes more than their number."""
        raise ValueError("pictures of this model's family are not taken as embeddings")

    def repeated(self, count: int) -> Sequence[int]:
        """Return so many placeholders."""
        return [self.placeholder_id] * int(count)


def check_fields(fields: Mapping[str, np.ndarray], *names: str) -> None:
    """Raise ValueError unless these sizes alone are there beside rows."""
    if missing := [name for name in names if name not in fields]:
        raise ValueError(f"{missing[0]} is missing, which says how large the items are")
    if unknown := sorted(fields.keys() - set(names)):
        raise ValueError(f"{unknown[0]}: is not taken here")


def sizes_of(fields: Mapping[str, np.ndarray], name: str, width: int) -> list[list[int]]:
    """Return a field's sizes, [items, width], all of them from 1. Raises ValueError."""
    sizes = fields[name].reshape(1, -1) if fields[name].ndim == 1 else fields[name]
    if sizes.ndim != 2 or sizes.shape[1] != width or sizes.dtype.kind not in "iu":
        shape, kind = list(sizes.shape), sizes.dtype
        raise ValueError(f"{name}: must be whole numbers of [items, {width}], got {kind} {shape}")
    if not len(sizes) or sizes.min() < 1:
        raise ValueError(f"{name}: sizes begin with 1")
    own: list[list[int]] = sizes.tolist()
    return own


def check_count(count: int, counts: Sequence[int], name: str) -> None:
    """Raise ValueError unless items of so many rows have `count` together."""
    if sum(counts) != count:
        raise ValueError(f"{name}: says {sum(counts)} rows, and there are {count}")
