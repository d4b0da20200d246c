"""Decodes pictures within bounds."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequest, shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "MPO", "AVIF", "TIFF")
"""Pillow's formats that are read. Others have decoders that are seldom used and seldom tested."""
MAX_PIXELS = 1 << 26
"""Most pixels of a picture, from its header: 192 MiB decoded."""
MAX_RATIO = 200
"""Most times that one side may be longer than the other."""


def decode_image(data: bytes, field: str) -> Image:
    """Return a picture in RGB, turned as its EXIF says. Raises InvalidRequest."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bound, of which this is a stricter one.
            image = Image.open(io.BytesIO(data), formats=formats)
            _check(image, field)
            image.load()
    except InvalidRequest:
        raise
    except Image.DecompressionBombError:
        raise InvalidRequest(
            f"{field}: the picture has more pixels than the {MAX_PIXELS} that are decoded; send a "
            "smaller one",
            param=field,
        ) from None
    except UnidentifiedImageError:
        raise InvalidRequest(
            f"{field}: is no picture in one of the formats {', '.join(formats)}", param=field
        ) from None
    except Exception as error:  # Decoders raise anything, from struct.error to SyntaxError.
        raise InvalidRequest(
            f"{field}: the picture cannot be decoded ({type(error).__name__}: {error})", param=field
        ) from None
    return converted(image, field)


def converted(image: Any, field: str) -> Image:
    """Return a picture of Pillow in RGB, on white where it is transparent. Raises
    InvalidRequest."""
    from PIL import Image, ImageOps

    _check(image, field)
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            over = image.convert("RGBA")
            image = Image.new("RGBA", over.size, "white")
            image.alpha_composite(over)
        if image.mode.startswith("I;16"):
            # Pillow would cut what is above 255.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        result: Image.Image = image.convert("RGB")
    except Exception as error:
        raise InvalidRequest(
            f"{field}: the picture cannot be converted to RGB ({error})", param=field
        ) from None
    return result


def from_array(array: Any, field: str) -> Image:
    """Return the picture of an array [height, width, 3] or [height, width] of uint8. Raises
    InvalidRequest."""
    from PIL import Image

    array = np.asarray(array)
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)):
        raise InvalidRequest(
            f"{field}: an array must be uint8 of [height, width, 3], got {array.dtype} of "
            f"{list(array.shape)}",
            param=field,
        )
    return converted(Image.fromarray(np.ascontiguousarray(array)), field)


def _check(image: Any, field: str) -> None:
    """Raise InvalidRequest by what the header says."""
    width, height = image.size
    if min(width, height) < 1:
        raise InvalidRequest(f"{field}: the picture has no pixels", param=field)
    if width * height > MAX_PIXELS:
        raise InvalidRequest(
            f"{field}: the picture has {width} x {height} pixels, at most {MAX_PIXELS} are "
            "decoded; send a smaller one",
            param=field,
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidRequest(
            f"{field}: a picture of {width} x {height} pixels is too narrow (at most "
            f"{MAX_RATIO} : 1)",
            param=field,
        )
    frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
    if frames > 1:
        raise InvalidRequest(
            f"{field}: the picture is animated ({shown(frames)} frames); send one frame",
            param=field,
        )
