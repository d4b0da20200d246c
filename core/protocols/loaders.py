"""The contracts of weight loaders, and of checkpoint formats: what reads a checkpoint's files."""

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
    from ..text.tokenizer import Tokenizer


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


class CheckpointFormat(Protocol):
    """Reads the configuration and the tokenizer from files of its own, of a checkpoint without
    config.json and tokenizer.json."""

    config_file: ClassVar[str]
    """Name of the file with the configuration. A folder with it, and without config.json, is of
    this format where `EngineConfig.config_format` is auto."""
    tokenizer_file: ClassVar[str]
    """Name of the file with the tokenizer. A folder with it, and without tokenizer.json, has this
    tokenizer where `EngineConfig.tokenizer_mode` is auto."""
    load_format: ClassVar[str]
    """The weight loader that `EngineConfig.load_format` auto means for such a checkpoint."""

    @staticmethod
    def read_config(folder: Path) -> dict[str, Any]:
        """Return what a config.json of this checkpoint would contain.

        Raises ConfigError, with the file's and the field's name, for a value that is of another
        kind or not supported, and LoadError for a file that cannot be read.
        """

    @staticmethod
    def read_chat_templates(folder: Path) -> Mapping[str, str]:
        """Return the chat templates: name → Jinja text. Asked where the checkpoint has no template
        in files of the usual names. Raises LoadError."""

    @staticmethod
    def read_tokenizer(folder: Path, chat_templates: Mapping[str, str]) -> Tokenizer:
        """Return the tokenizer, with these chat templates. Raises LoadError for a file that is
        damaged, or of a version that is not supported."""
