"""Torch files (`pytorch_model.bin`, `*.pt`), read as tensors only, never as pickled objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller
from .files import Bar, Layout, files_of

LAYOUT = Layout(
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    ("*.bin", "*.pt", "*.pth"),
    ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"),
)


class PtLoader:
    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.folder = model_config.path

    def load(self, model: nn.Module, device: torch.device) -> None:
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        files = files_of(self.folder, LAYOUT, "use load_format=auto for safetensors")
        with Bar.of(files) as bar:
            for file in files:
                tensors = read_tensors(file)
                try:
                    for name, tensor in tensors.items():
                        if filler.takes(name):
                            filler.fill(name, tensor.to(device))
                        bar.add(tensor.nbytes)
                except LoadError as error:
                    raise LoadError(f"{file.name}: {error.message}") from error
        filler.finish()


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors. Raises LoadError for other content."""
    try:
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # The unpickler stumbles over damaged files in many ways.
        reason = str(error).split("\n", 1)[0]
        raise LoadError(
            f"{file.name} cannot be read as tensors alone ({type(error).__name__}: {reason}); "
            "convert it to safetensors where you trust it"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(part, torch.Tensor) for name, part in tensors.items()
    ):
        raise LoadError(f"{file.name} is not a mapping from names to tensors")
    return tensors
