"""Safetensors files through the Run:ai Model Streamer (package `runai-model-streamer`), which reads
ahead on several threads.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import ConfigError, LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller
from .files import Bar
from .safetensors import checkpoint_files


class RunaiStreamerLoader:
    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        try:
            self.streamer: Any = importlib.import_module("runai_model_streamer")
        except ImportError as error:
            raise ConfigError(
                "load_format: runai_streamer needs the package runai-model-streamer (pip install "
                "runai-model-streamer)",
                param="load_format",
            ) from error
        self.folder = model_config.path

    def load(self, model: nn.Module, device: torch.device) -> None:
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        files = checkpoint_files(self.folder)
        with Bar.of(files) as bar:
            for file in files:
                try:
                    with self.streamer.SafetensorsStreamer() as streamer:
                        streamer.stream_file(str(file))
                        for name, tensor in streamer.get_tensors():
                            if filler.takes(name):
                                # The streamer uses its buffers again.
                                filler.fill(name, tensor.clone().to(device))
                            bar.add(tensor.nbytes)
                except LoadError as error:
                    raise LoadError(f"{file.name}: {error.message}") from error
                except Exception as error:  # The package raises what reading stumbles over.
                    raise LoadError(f"{file.name} is not a safetensors file: {error}") from error
        filler.finish()
