"""How kernels cut their work: measured choices, shipped a file a device, and rules where none is.

`tuned/NVIDIA_H200.json` and its like are made by `jackfield bench tune` on the device that they are
for. Nothing is measured at start.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .nibble_gemv import NibbleGemvShape, nibble_gemv_rule
from .nibble_skinny import NibbleSkinnyShape, nibble_skinny_rule
from .skinny import SkinnyShape

FOLDER = Path(__file__).parent / "tuned"
RULED_ROWS = 32
"""Up to so many rows `skinny_rule` speaks for weights that were not measured."""


SHAPES = {
    "skinny": SkinnyShape,
    "nibble_gemv": NibbleGemvShape,
    "nibble_skinny": NibbleSkinnyShape,
}
"""Kernel, as files name it → the type of its cuts."""


class Product(NamedTuple):
    """A linear layer's weight, [outputs, inputs]; gated: [2 * outputs, inputs]."""

    outputs: int
    inputs: int
    gated: bool


def file_for(device_name: str) -> Path:
    """Where the choices for a device are."""
    return FOLDER / f"{device_name.replace(' ', '_')}.json"


def read(path: Path, kernel: str = "skinny") -> dict[Product, list[tuple[int, Any]]]:
    """→ for each weight, by number of rows: a shape, or None where the library is faster."""
    choices: dict[Product, list[tuple[int, Any]]] = {}
    for entry in json.loads(path.read_text()).get(kernel, []):
        product = Product(entry["outputs"], entry["inputs"], entry["gated"])
        shape = entry["shape"]
        choices.setdefault(product, []).append(
            (entry["rows"], None if shape is None else SHAPES[kernel](**shape))
        )
    return {product: sorted(rows, key=lambda row: row[0]) for product, rows in choices.items()}


@functools.cache
def _choices(index: int, kernel: str = "skinny") -> dict[Product, list[tuple[int, Any]]] | None:
    path = file_for(torch.cuda.get_device_name(index))
    return read(path, kernel) if path.exists() else None


def _chosen(rows: list[tuple[int, Any]], num_rows: int) -> Any:
    """What was measured for so many rows, or for the next larger number."""
    return next((shape for most, shape in rows if most >= num_rows), None)


@functools.cache
def skinny_shape(product: Product, num_rows: int, device: torch.device) -> SkinnyShape | None:
    """How `skinny` multiplies this weight with so many rows; None: the library is to do it.

    A device without a file leaves everything to the library.
    """
    choices = _choices(device.index or 0) if device.type == "cuda" else None
    if choices is None:
        return None
    if product not in choices:
        return skinny_rule(product, num_rows)
    found: SkinnyShape | None = _chosen(choices[product], num_rows)
    return found


def skinny_rule(product: Product, num_rows: int) -> SkinnyShape | None:
    """For weights that were not measured; from those of Qwen3-0.6B and 8B on an H200.

    Some hundred programs, each with 64 outputs; enough shares that narrow layers have as many.
    """
    if num_rows > RULED_ROWS or product.outputs > 32768:
        return None
    bands = -(-product.outputs // 64)
    split = next(n for n in (1, 2, 4) if n == 4 or bands * n >= 96)
    small = product.inputs * product.outputs < 8 << 20
    return SkinnyShape(
        block_m=16 if num_rows <= 16 else 32,
        block_n=64,
        block_k=64 if small else 128,
        split=split,
        num_warps=4,
        num_stages=6 if small else 4,
        prefetch=4096 if small else 0,
        early=True,
    )


@functools.cache
def nibble_gemv_shape(product: Product, device: torch.device) -> NibbleGemvShape:
    """How `nibble_gemv` multiplies a 4-bit weight."""
    choices = _choices(device.index or 0, "nibble_gemv") if device.type == "cuda" else None
    shape: NibbleGemvShape | None = _chosen((choices or {}).get(product, []), 1)
    return shape or nibble_gemv_rule(product.inputs, product.gated)


@functools.cache
def nibble_skinny_shape(
    product: Product, num_rows: int, device: torch.device
) -> NibbleSkinnyShape | None:
    """How `nibble_skinny` multiplies a 4-bit weight with so many rows; None: not at all."""
    choices = _choices(device.index or 0, "nibble_skinny") if device.type == "cuda" else None
    if choices and product in choices:
        found: NibbleSkinnyShape | None = _chosen(choices[product], num_rows)
        return found
    return nibble_skinny_rule(num_rows, product.outputs)
