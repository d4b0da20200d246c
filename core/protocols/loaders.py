"""The contract of weight loaders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import EngineConfig
    from ..loading.model_config import ModelConfig
    from ..loading.state.record import StateRecord


class WeightLoader(Protocol):
    """Fills a model from a checkpoint, which it does not modify."""

    extra_config: ClassVar[tuple[str, ...]]
    """Keys of `EngineConfig.model_loader_extra_config` that it takes; others are refused before it
    is called. Optional: none."""
    per_rank: ClassVar[bool]
    """Whether its constructor takes the rank, too, as a third argument: a `core.parallel.ranks.
    Ranks`. Optional: it does not."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None: ...

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Fill every parameter of `model`, and process each of its quantized layers
        (`core.loading.weight_map.ParameterFiller` does both, from named tensors).

        In place, in each parameter's type; the same checkpoint gives the same numbers each time.
        Raises LoadError naming the tensor that is missing, unknown or of another shape, and for
        files that are damaged or missing.
        """

    @classmethod
    def save(
        cls,
        state: Mapping[str, torch.Tensor],
        record: StateRecord,
        folder: Path,
        options: Mapping[str, Any],
        max_file_size: int,
    ) -> list[Path]:
        """Write one rank's weights (`core.loading.state.rank_state`), and return the files.

        Called by `jackfield convert` for each rank, with a folder that is new. `options`: the keys
        of `extra_config` that are given. `record` goes into
        the files, for `StateRecord.check` when they are loaded. `max_file_size`: in bytes, of a
        file, or of one tensor where that is larger. Optional: the format cannot be written.
        """
