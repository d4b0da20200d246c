"""Tiles of products: measured choices in one shipped file per device, and rules without a file.

`jackfield bench tune` writes a file such as `tuned/NVIDIA_H200.json` on the device that it is for.
A device also reads files of devices with the same chip, for products that its own lacks. Nothing is
measured at start.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .linear.gemv import GemvConfig, gemv_config
from .linear.int4_gemv import Int4GemvConfig, int4_gemv_rule
from .linear.small_m_matmul import SmallMConfig

logger = logging.getLogger("jackfield.kernels")

FOLDER = Path(__file__).parent / "tuned"
RULE_ROWS = 32
INT4_RULE_ROWS = 128
CONFIGS = {
    "small_m_matmul": SmallMConfig,
    "gemv": GemvConfig,
    "int4_gemv": Int4GemvConfig,
    "int4_small_m": SmallMConfig,
}
"""Kernel, as files name it → the type of its tiles; int4_small_m: small_m_matmul by 4 bits."""


class Product(NamedTuple):
    outputs: int
    inputs: int
    gated: bool


class Chip(NamedTuple):
    major: int
    minor: int
    multi_processor_count: int


def chip_of(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(properties.major, properties.minor, properties.multi_processor_count)


def file_for(device_name: str) -> Path:
    return FOLDER / f"{device_name.replace(' ', '_')}.json"


def shipped_files(index: int) -> list[Path]:
    """Return the files that a CUDA device reads: those of devices with the same chip, then its own,
    whose choices go before theirs.

    Raises ValueError for another's file that is damaged, and OSError."""
    own = file_for(torch.cuda.get_device_name(index))
    chip = chip_of(index)._asdict()
    others = [path for path in sorted(FOLDER.glob("*.json")) if path != own]
    paths = []
    for path in others:
        try:
            if json.loads(path.read_text()).get("chip") == chip:
                paths.append(path)
        except (AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return [*paths, own] if own.exists() else paths


def read(path: Path, kernel: str) -> dict[Product, list[tuple[int, Any]]]:
    """Return tiles for each weight, by number of rows; None where the library is faster.

    Raises ValueError for a file that is damaged, and OSError."""
    choices: dict[Product, list[tuple[int, Any]]] = {}
    try:
        for entry in json.loads(path.read_text()).get(kernel, []):
            product = Product(entry["outputs"], entry["inputs"], entry["gated"])
            config = None if entry["config"] is None else CONFIGS[kernel](**entry["config"])
            if not all(type(size) is int and size > 0 for size in (*product[:2], entry["rows"])):
                raise ValueError(f"an entry of {kernel} has no sizes: {entry}")
            choices.setdefault(product, []).append((entry["rows"], config))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return {product: sorted(rows, key=lambda row: row[0]) for product, rows in choices.items()}


@functools.cache
def _choices(index: int, kernel: str) -> dict[Product, list[tuple[int, Any]]] | None:
    own = file_for(torch.cuda.get_device_name(index))
    try:
        paths = shipped_files(index)
        by_file = {path: read(path, kernel) for path in paths}
    except (OSError, ValueError) as error:
        logger.warning("tiles of %s are chosen without a file: %s", kernel, error)
        return None
    if not paths:
        return None
    measured = by_file.get(own, {})
    foreign = [path.name for path in paths if path != own and by_file[path].keys() - measured]
    if foreign:
        logger.info(
            "tiles of %s: %d products measured on this card, others on another card with this chip "
            "(%s); `jackfield bench tune` measures this one's", kernel, len(measured),
            ", ".join(foreign),
        )  # fmt: skip
    return {product: rows for path in paths for product, rows in by_file[path].items()}


def _measured(rows: list[tuple[int, Any]], num_rows: int) -> Any:
    """Return the measured choice for `num_rows`, or for the next larger number."""
    return next((config for most, config in rows if most >= num_rows), None)


@functools.cache
def small_m_config(product: Product, num_rows: int, device: torch.device) -> SmallMConfig | None:
    """Return the tiles for a dense weight; None: a library's product is faster.

    Without a file for the device, always None.
    """
    choices = _choices(device.index or 0, "small_m_matmul") if device.type == "cuda" else None
    if choices is None:
        return None
    if product not in choices:
        return small_m_rule(product, num_rows)
    config: SmallMConfig | None = _measured(choices[product], num_rows)
    return config


def small_m_rule(product: Product, num_rows: int) -> SmallMConfig | None:
    """Return the tiles for dense weights that were not measured."""
    if num_rows > RULE_ROWS or product.outputs > 32768:
        return None
    tiles = triton.cdiv(product.outputs, 64)
    small = product.inputs * product.outputs < 8 << 20
    return SmallMConfig(
        block_m=16 if num_rows <= 16 else 32,
        block_n=64,
        block_k=64 if small else 128,
        split_k=_split_for(tiles, 96),
        num_warps=4,
        num_stages=6 if small else 4,
        prefetch=4096 if small else 0,
        early=True,
    )


def _split_for(tiles: int, programs: int) -> int:
    """Return the smallest split, up to 4, that gives `programs` programs."""
    return next(n for n in (1, 2, 4) if n == 4 or tiles * n >= programs)


@functools.cache
def _measured_gemv(product: Product, device: torch.device) -> GemvConfig | None:
    choices = _choices(device.index or 0, "gemv") if device.type == "cuda" else None
    config: GemvConfig | None = _measured((choices or {}).get(product, []), 1)
    return config


def gemv_tiles(weight: torch.Tensor, gated: bool) -> GemvConfig:
    """Return the tiles of `gemv` for a dense weight, [outputs, inputs], gated [2 * outputs,
    inputs]."""
    outputs, inputs = weight.shape
    measured = None
    if weight.element_size() == 2:
        product = Product(outputs // 2 if gated else outputs, inputs, gated)
        measured = _measured_gemv(product, weight.device)
    return measured or gemv_config(weight, gated)


@functools.cache
def int4_gemv_config(product: Product, device: torch.device) -> Int4GemvConfig:
    """Return the tiles of `int4_gemv` for a weight."""
    choices = _choices(device.index or 0, "int4_gemv") if device.type == "cuda" else None
    config: Int4GemvConfig | None = _measured((choices or {}).get(product, []), 1)
    return config or int4_gemv_rule(product.inputs, product.gated)


@functools.cache
def int4_small_m_config(
    product: Product, num_rows: int, device: torch.device
) -> SmallMConfig | None:
    """Return the tiles for a 4-bit weight; None: dequantising it first is faster."""
    choices = _choices(device.index or 0, "int4_small_m") if device.type == "cuda" else None
    if choices and product in choices:
        config: SmallMConfig | None = _measured(choices[product], num_rows)
        return config
    return int4_small_m_rule(num_rows, product.outputs)


def int4_small_m_rule(num_rows: int, outputs: int) -> SmallMConfig | None:
    """Return the tiles for 4-bit weights that were not measured; None: dequantising is faster."""
    if num_rows > INT4_RULE_ROWS:
        return None
    block_m = max(triton.next_power_of_2(num_rows), 8)
    block_n, block_k, num_warps, num_stages = {
        8: (64, 64, 4, 3),
        16: (64, 64, 4, 3),
        32: (64, 32, 4, 4),
        64: (128, 32, 8, 3),
        128: (128, 32, 8, 2),
    }[block_m]
    split_k = _split_for(triton.cdiv(outputs, 64), 180)
    return SmallMConfig(block_m, block_n, block_k, split_k, num_warps, num_stages)
