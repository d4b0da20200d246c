"""GGUF files (llama.cpp's) through the `gguf` package, dequantised as they load.

The folder holds config.json, the tokenizer's files and one *.gguf. No kernel reads these formats:
the model runs in its own type, or rounded by a quantization method.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import ConfigError, LoadError, listed
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller
from .files import Bar

logger = logging.getLogger("jackfield.loading")
NEIGHBOURS = ("llama", "granite")
"""Families whose files pair neighbouring channels of queries and keys."""

WHOLE_FACTORS = frozenset({"gemma", "gemma2", "gemma3"})
"""Families whose norms are stored plus one."""

ROTATIONS = "rope_"
"""Prefix of tensors that repeat config.json's rotations."""


class GgufLoader:
    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        try:
            self.gguf: Any = importlib.import_module("gguf")
        except ImportError as error:
            raise ConfigError(
                "load_format: gguf needs the package gguf (pip install gguf)", param="load_format"
            ) from error
        files = sorted(model_config.path.glob("*.gguf"))
        if len(files) != 1:
            raise ConfigError(
                f"load_format: gguf needs one *.gguf in {model_config.path}, which has "
                f"{len(files)}",
                param="load_format",
            )
        self.model_config = model_config
        self.file: Path = files[0]

    def load(self, model: nn.Module, device: torch.device) -> None:
        try:
            reader = self.gguf.GGUFReader(self.file)
        except Exception as error:  # The package raises what parsing stumbles over.
            raise LoadError(f"{self.file.name} is not a GGUF file: {error}") from error
        family = str(self._metadata(reader, "general.architecture"))
        blocks = self._metadata(reader, f"{family}.block_count")
        if blocks != self.model_config.num_layers:
            raise LoadError(
                f"{self.file.name} has {family}.block_count {blocks}, and config.json "
                f"num_hidden_layers {self.model_config.num_layers}"
            )
        families = {name: key for key, name in self.gguf.MODEL_ARCH_NAMES.items()}
        if family not in families:
            raise LoadError(f"{self.file.name}: the gguf package knows no architecture {family!r}")
        names = self.gguf.get_tensor_name_map(families[family], blocks)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        kinds: Counter[str] = Counter()
        unused = {name for name in stored if not name.startswith(ROTATIONS)}
        tensors = {
            name: tensor for name in sorted({*filler.wanted(), *filler.heads()})
            if (tensor := stored.get(_stored_name(names, name))) is not None
        }  # fmt: skip
        with Bar(sum(int(tensor.n_bytes) for tensor in tensors.values())) as bar:
            for name, tensor in tensors.items():
                stem = name.rpartition(".")[0]
                unused.discard(tensor.name)
                kinds[tensor.tensor_type.name] += 1
                whole = family in WHOLE_FACTORS and stem.endswith("norm")
                dense = self._dense(tensor, less=1.0 if whole else 0.0)
                if family in NEIGHBOURS:
                    dense = self._unturned(stem, dense)
                filler.fill(name, dense.to(device))
                bar.add(int(tensor.n_bytes))
        filler.finish()
        if unused and filler.takes_all:
            raise LoadError(
                f"{self.file.name} has tensors that the model has no place for: "
                f"{listed(sorted(unused))}"
            )
        listing = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        logger.info(
            "gguf: tensors are dequantised at load, and run as %s: %s",
            str(self.model_config.dtype).removeprefix("torch."),
            listing,
        )

    def _metadata(self, reader: Any, key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise LoadError(f"{self.file.name} has no {key}")
        return field.contents()

    def _dense(self, tensor: Any, *, less: float) -> torch.Tensor:
        """Convert to the model's type; `less` is subtracted before."""
        try:
            numbers = self.gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise LoadError(
                f"{self.file.name}: {tensor.name} is {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise"
            ) from error
        shape = tuple(int(size) for size in reversed(tensor.shape))
        # A copy: what is stored plain comes as a read-only view of the file.
        dense = torch.from_numpy(numbers.copy()).reshape(shape)
        return (dense - less if less else dense).to(self.model_config.dtype)

    def _unturned(self, stem: str, dense: torch.Tensor) -> torch.Tensor:
        """Reorder queries and keys of `NEIGHBOURS` from pairs to halves."""
        heads = {
            "q_proj": self.model_config.num_heads, "k_proj": self.model_config.num_kv_heads
        }.get(stem.rpartition(".")[2])  # fmt: skip
        if heads is None:
            return dense
        paired = dense.reshape(heads, dense.shape[0] // heads // 2, 2, *dense.shape[1:])
        return paired.swapaxes(1, 2).reshape(dense.shape)


def _stored_name(names: Any, name: str) -> str:
    """Return the file's name of a checkpoint's tensor."""
    stem, _, leaf = name.rpartition(".")
    return f"{names.get_name(stem)}.{leaf}"
