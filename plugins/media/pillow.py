"""What image processors of `transformers` do that take torchvision, by Pillow and numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...core.errors import ConfigError
from ...core.loading.json_file import read_object
from ...core.protocols.media import MediaSetup
from .derived import DerivedProcessor
from .processor import OPTION, ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

FILES = ("preprocessor_config.json", "processor_config.json")
COMMON: dict[str, Any] = {
    "resample": 2, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class PillowImages:
    """An image processor of a family, with its options as attributes."""

    defaults: ClassVar[Mapping[str, Any]]
    """Its own options."""
    do_rescale = do_normalize = True

    def __init__(self, setup: MediaSetup) -> None:
        """Raises ConfigError for options that it does not have, or that have other values."""
        defaults, given = COMMON | dict(self.defaults), setup.processor_kwargs
        if unknown := sorted(given.keys() - defaults.keys()):
            name = type(self).__name__
            raise ConfigError(f"{OPTION}: {name} has no option {', '.join(unknown)}", param=OPTION)
        stated = {**self.stated(setup), **given}
        self.options: dict[str, Any] = {}
        for name, default in defaults.items():
            value = stated.get(name)
            if value is not None and not alike(value, default):
                field, of = (OPTION, "") if name in given else ("model", "its image processor's ")
                raise ConfigError(
                    f"{field}: {of}{name} must be like {json.dumps(default)}, got {value!r}",
                    param=field,
                )
            self.options[name] = default if value is None else value
        vars(self).update(self.options)

    def stated(self, setup: MediaSetup) -> dict[str, Any]:
        """Return the options that the checkpoint states, and others."""
        stated: dict[str, Any] = {}
        for name in FILES:
            if (setup.folder / name).is_file():
                read = read_object(setup.folder / name)
                stated |= read.get("image_processor", read)
        return stated

    def to_dict(self) -> dict[str, Any]:
        return self.options

    def __call__(self, images: Sequence[Image], return_tensors: str) -> dict[str, Any]:
        [image] = images
        return self.tensors(image)

    def tensors(self, image: Image) -> dict[str, Any]:
        """Return a picture's tensors, with pixels in bytes."""
        raise NotImplementedError

    def resized(self, image: Image, height: int, width: int) -> np.ndarray:
        """Return a picture's pixels in another size, [height, width, 3]."""
        return np.asarray(image.resize((width, height), self.options["resample"]))


class PillowProcessor(ImageProcessor):
    in_bytes = True
    images_class: ClassVar[type[PillowImages]]

    def create_images(self, setup: MediaSetup) -> Any:
        return self.images_class(setup)


class DerivedPillowProcessor(PillowProcessor, DerivedProcessor):
    """The processor of `transformers` writes what stands for a picture."""

    text_options: ClassVar[Mapping[str, Any]] = {}

    def written(self, image: Image) -> tuple[Mapping[str, Any], str]:
        tensors = self.tensors(image)
        return tensors, self._writer.replace_image_token(tensors, 0, **self.text_options)


def alike(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default, with numbers above 0."""
    if isinstance(default, dict):
        return isinstance(value, dict) and all(
            alike(value.get(name), own) for name, own in default.items()
        )
    if isinstance(default, list):
        numbers = isinstance(value, list) and len(value) == len(default)
        return numbers and all(isinstance(n, (int, float)) and n >= 0 for n in value)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    kinds = int if isinstance(default, int) else (int, float)
    return isinstance(value, kinds) and value > 0


def cut(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the tiles of a picture, line by line: [height, width, 3] → [n, side, side, 3]."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    grid = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return grid.reshape(rows * columns, side, side, 3)


def grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return all (columns, rows) of so many tiles, the smallest first."""
    pairs = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    # Those of one size stay in the set's order, as in `transformers`.
    return sorted(pairs, key=lambda grid: grid[0] * grid[1])


def closest_grid(
    grids: Sequence[tuple[int, int]], width: int, height: int, side: int
) -> tuple[int, int]:
    """Return the (columns, rows) whose shape is closest to a picture's; of several the first one,
    or the last one of less than twice the picture's area."""
    best, least = (1, 1), float("inf")
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        larger = width * height > 0.5 * side * side * columns * rows
        if distance < least or (distance == least and larger):
            best, least = (columns, rows), distance
    return best
