"""Divides a checkpoint's weights among ranks, in another format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import torch

from ...config import EngineConfig
from ...errors import ConfigError, PluginError
from ...nn.operations import Operations
from ...parallel.ranks import OneRank, Pipeline, Ranks
from ...registry import Plugins
from ..build import check_extra_config, load_model
from ..model_config import ModelConfig, resolve_model_config
from ..quantize import choose_method
from .rank_state import UnprocessedMethod, rank_state
from .record import StateRecord, method_name, number

CPU = torch.device("cpu")
Saver: TypeAlias = Callable[[Mapping[str, torch.Tensor], StateRecord, Path], list[Path]]
"""Writes a rank's weights into a folder; returns the files."""
WEIGHTS = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".h5", ".msgpack", ".onnx", ".ot",
})  # fmt: skip
"""Suffixes of files that are not copied."""


def make_saver(
    plugins: Plugins, name: str, options: Mapping[str, Any], max_file_size: int
) -> Saver:
    """Return a weight loader's writer. options: `model_loader_extra_config`. max_file_size: in
    bytes. Raises ConfigError if it cannot write.
    """
    registry = plugins["weight_loader"]
    try:
        loader = registry.load(name)
    except PluginError as error:
        raise ConfigError(f"--to: {error}") from error
    if not hasattr(loader, "save"):
        raise ConfigError(f"--to: the loader {name} only reads its format")
    check_extra_config(name, loader, options, "--to-extra-config")

    def save(state: Mapping[str, torch.Tensor], record: StateRecord, folder: Path) -> list[Path]:
        with registry.calling(name, "save"):
            files: list[Path] = loader.save(state, record, folder, options, max_file_size)
            return files

    return save


def convert(
    config: EngineConfig, plugins: Plugins, saver: Saver, folder: Path
) -> Iterator[dict[str, int]]:
    """Write a checkpoint for an engine's ranks; yields each rank's files with sizes.

    config: checkpoint, loader, ranks, stages, and layers' options (`quantization`, `dtype`,
    `hf_overrides`). Weights have a GPU engine's type, one rank in memory at a time, without a
    device: quantized tensors are repacked when loaded. `folder` appears when complete. Raises
    ConfigError, LoadError, OSError.
    """
    if folder.exists():
        raise ConfigError(f"output: {str(folder)!r} exists already; give a new folder")
    model_config = resolve_model_config(config, plugins)
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True)
    try:
        for ranks in _all_ranks(config):
            state = _state(config, plugins, model_config, ranks)
            record = StateRecord(
                architecture=model_config.architecture,
                quantization=method_name(config.quantization, model_config),
                tensor_parallel_size=ranks.tensor.size,
                pipeline_parallel_size=ranks.pipeline.size,
                pipeline_layer_partition=ranks.pipeline.partition,
                rank=number(ranks),
                expert_parallel=ranks.experts.size > 1,
            )
            files = saver(state, record, partial)
            yield {file.name: file.stat().st_size for file in files}
        _copy_others(model_config.path, partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _all_ranks(config: EngineConfig) -> Iterator[Ranks]:
    """Yield an engine's ranks by number, which counts stages backwards."""
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    for stage in reversed(range(stages)):
        for rank in range(size):
            tensor = OneRank(rank, size)
            experts = tensor if config.enable_expert_parallel else OneRank()
            pipeline = Pipeline(stage, stages, size, None, config.pipeline_layer_partition)
            yield Ranks(tensor=tensor, experts=experts, pipeline=pipeline)


def _state(
    config: EngineConfig, plugins: Plugins, model_config: ModelConfig, ranks: Ranks
) -> dict[str, torch.Tensor]:
    method = choose_method(plugins, config, model_config, CPU)
    unprocessed: Any = None if method is None else UnprocessedMethod(method)
    return rank_state(
        load_model(plugins, config, model_config, CPU, Operations(), ranks, unprocessed)
    )


def _copy_others(source: Path, target: Path) -> None:
    """Copy files other than weights: configuration, tokenizer, templates, and
    sentence-transformers' module folders.
    """
    for file in source.iterdir():
        if file.is_file() and not _is_weights(file):
            shutil.copyfile(file, target / file.name)
    for name in _modules(source):
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def _is_weights(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.name.endswith(".index.json")


def _modules(source: Path) -> Iterator[str]:
    """Yield modules.json's folders."""
    file = source / "modules.json"
    listed: Any = json.loads(file.read_text()) if file.is_file() else []
    for entry in listed if isinstance(listed, list) else []:
        name = str(entry.get("path") or "") if isinstance(entry, dict) else ""
        path = PurePosixPath(name)
        if name and not path.is_absolute() and ".." not in path.parts and (source / name).is_dir():
            yield name
