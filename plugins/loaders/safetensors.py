"""Safetensors checkpoints: one file or many, streamed straight to the device."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller
from .files import Bar, Layout, files_of

OTHERS = {"*.gguf": "gguf", "*.tensors": "tensorizer", "*.bin": "pt", "*.pt": "pt", "*.pth": "pt"}
"""Pattern of another format → its loader."""
LAYOUT = Layout("model.safetensors", "model.safetensors.index.json", ("*.safetensors",))


class SafetensorsLoader:
    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.folder = model_config.path

    def load(self, model: nn.Module, device: torch.device) -> None:
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        files = checkpoint_files(self.folder)
        with Bar.of(files) as bar:
            for file in files:
                try:
                    with safe_open(file, framework="pt", device=str(device)) as tensors:
                        names = list(tensors.keys())
                        for name in names:
                            filler.fill_from(tensors, name)
                            bar.add(file.stat().st_size // len(names))
                except (SafetensorError, OSError) as error:
                    raise LoadError(f"{file.name} is not a safetensors file: {error}") from error
                except LoadError as error:
                    raise LoadError(f"{file.name}: {error.message}") from error
        filler.finish()


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint. Raises LoadError for missing or outside files."""
    other = next((name for pattern, name in OTHERS.items() if any(folder.glob(pattern))), None)
    own = "" if other is None else f"use load_format={other}, which reads what is there, "
    return files_of(folder, LAYOUT, f"{own}convert the checkpoint, or use load_format=dummy")
