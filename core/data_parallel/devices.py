"""Which devices each member has."""

from __future__ import annotations

import os

import torch

from ..config import EngineConfig
from ..engine.resolve_config import resolve_device
from ..errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def member_environments(config: EngineConfig) -> list[dict[str, str]]:
    """Return variables that give each member its ranks' devices.

    Blocks. Raises ConfigError for too few devices.
    """
    size, each = config.data_parallel_size, config.num_ranks
    if resolve_device(config) != "cuda":
        return [{} for _ in range(size)]
    return slices(size, each, torch.cuda.device_count(), os.environ.get(VISIBLE))


def slices(size: int, each: int, count: int, visible: str | None) -> list[dict[str, str]]:
    """Return VISIBLE for `size` members of `each` devices, of torch's `count`. visible: this
    process's. Raises ConfigError.
    """
    if size * each > count:
        needed = f"{size} members" if each == 1 else f"{size} members of {each} ranks"
        raise ConfigError(
            f"data_parallel_size: {needed} need {size * each} GPUs, and torch finds {count} here",
            param="data_parallel_size",
        )
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")
    return [
        {VISIBLE: ",".join(name.strip() for name in names[first : first + each])}
        for first in range(0, size * each, each)
    ]
