"""Files per rank (`model-rank-{rank}-part-{part}.safetensors`, as in vLLM), so that a rank reads
only its weights; written by `jackfield convert --to sharded_state`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import ConfigError, LoadError, listed
from ...core.loading.model_config import ModelConfig
from ...core.loading.state.rank_state import StateFiller
from ...core.loading.state.record import StateRecord, method_name, number
from ...core.parallel.ranks import ONE_RANK, Ranks
from .files import Bar

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
RECORD = "jackfield"
"""Key of the record in a file's header."""


class ShardedStateLoader:
    extra_config: ClassVar[tuple[str, ...]] = ("pattern",)
    per_rank: ClassVar[bool] = True

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, ranks: Ranks = ONE_RANK
    ) -> None:
        self.folder = model_config.path
        self.pattern = _pattern(config.model_loader_extra_config or {})
        self.architecture = model_config.architecture
        self.quantization = method_name(config.quantization, model_config)
        self.ranks, self.rank = ranks, number(ranks)

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Raises ConfigError for files of another engine, and LoadError naming missing, unexpected
        or differently shaped tensors.
        """
        files = self._files()
        filler = StateFiller(model)
        with Bar.of(files) as bar:
            for file in files:
                try:
                    with safe_open(file, framework="pt", device=str(device)) as tensors:
                        record = StateRecord.read(file.name, (tensors.metadata() or {}).get(RECORD))
                        self._check(record, file.name, len(files))
                        for name in tensors.keys():
                            tensor = tensors.get_tensor(name)
                            filler.fill(name, tensor)
                            bar.add(tensor.nbytes)
                except (SafetensorError, OSError) as error:
                    raise LoadError(f"{file.name} is not a safetensors file: {error}") from error
                except LoadError as error:
                    named = file.name in error.message
                    raise LoadError(error.message if named else f"{file.name}: {error}") from error
        filler.finish()

    def _check(self, record: StateRecord, file: str, num_files: int) -> None:
        record.check(file, self.architecture, self.quantization, self.ranks)
        if record.num_parts != num_files:
            raise LoadError(
                f"rank {self.rank} has {num_files} files in {self.folder}, and {file} says "
                f"{record.num_parts}"
            )

    def _files(self) -> list[Path]:
        parts = list(_matches(self.folder, self.pattern))
        own = {part: file for rank, part, file in parts if rank == self.rank}
        if not own:
            ranks = sorted({rank for rank, _, _ in parts})
            what = f"only of ranks {listed(map(str, ranks))}" if ranks else "and of no other"
            raise LoadError(
                f"no file of rank {self.rank} ({self.pattern}) in {self.folder}, {what}; write "
                "them with `jackfield convert --to sharded_state`"
            )
        missing = sorted(set(range(len(own))) - own.keys())
        if missing:
            raise LoadError(
                f"{self.pattern.format(rank=self.rank, part=missing[0])} is missing in "
                f"{self.folder}"
            )
        return [own[part] for part in sorted(own)]

    @classmethod
    def save(
        cls,
        state: Mapping[str, torch.Tensor],
        record: StateRecord,
        folder: Path,
        options: Mapping[str, Any],
        max_file_size: int,
    ) -> list[Path]:
        """Write one rank's files. Raises ConfigError for a pattern without a rank."""
        pattern = _pattern(options)
        parts = list(_parts(state, max_file_size))
        record = msgspec.structs.replace(record, num_parts=len(parts))
        metadata = {"format": "pt", RECORD: record.encode()}
        files = []
        for count, part in enumerate(parts):
            files.append(folder / pattern.format(rank=record.rank, part=count))
            save_file(part, files[-1], metadata)
        return files


def _parts(state: Mapping[str, torch.Tensor], max_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each file's tensors: at most `max_size` bytes, or one tensor."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if part and size + tensor.nbytes > max_size:
            yield part
            part, size = {}, 0
        # A copy of what is a view of another tensor: a file has each by itself.
        part[name] = tensor.contiguous().clone()
        size += tensor.nbytes
    yield part


def _matches(folder: Path, pattern: str) -> Iterator[tuple[int, int, Path]]:
    """Yield rank, part and path of a pattern's files."""
    expression = "".join(
        re.escape(text) + (rf"(?P<{field}>[0-9]+)" if field else "")
        for text, field, _, _ in Formatter().parse(pattern)
    )
    for file in sorted(folder.iterdir()):
        if match := re.fullmatch(expression, file.name):
            rank, part = int(match["rank"]), int(match["part"])
            if pattern.format(rank=rank, part=part) == file.name:
                yield rank, part, file


def _pattern(options: Mapping[str, Any]) -> str:
    pattern = options.get("pattern", PATTERN)
    try:
        if not isinstance(pattern, str):
            raise ValueError(f"must be text, got {pattern!r}")
        fields = sorted(field for _, field, _, _ in Formatter().parse(pattern) if field is not None)
        name = pattern.format(rank=0, part=0)
        if fields != ["part", "rank"] or Path(name).name != name:
            raise ValueError(
                "must be the name of a file in the checkpoint's folder, with {rank} and {part}, "
                f"got {pattern!r}"
            )
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"model_loader_extra_config: pattern: {error}", param="model_loader_extra_config"
        ) from error
    return pattern
