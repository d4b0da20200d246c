"""Safetensors checkpoints: one file or many, streamed straight to the device."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsLoader:
    """Fills a model from `*.safetensors`."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.folder = model_config.path

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Raises LoadError naming what is missing, unexpected, or of another shape."""
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        for file in checkpoint_files(self.folder):
            try:
                with safe_open(file, framework="pt", device=str(device)) as tensors:
                    for name in tensors.keys():
                        filler.fill(name, tensors.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise LoadError(f"{file.name} is not a safetensors file: {error}") from error
            except LoadError as error:
                raise LoadError(f"{file.name}: {error.message}") from error
        filler.finish()


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: what its index names; else `model.safetensors`; else all.

    Raises LoadError when there are none, or one lies elsewhere.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise LoadError(
                f"no *.safetensors in {folder}; convert the checkpoint, or use load_format=dummy"
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [Path(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from error
    files = []
    for name, path in zip(names, paths, strict=True):
        if path.name != name:
            raise LoadError(f"{INDEX} names {name!r}, which is not a file of its own folder")
        if not (folder / name).is_file():
            raise LoadError(f"{INDEX} names {name!r}, which is missing")
        files.append(folder / name)
    return files
