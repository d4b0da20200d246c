"""CoreWeave's tensorizer files (`*.tensors`, package `tensorizer`), with checkpoint names.

The format has no pickles; files are opened here, so the package fetches nothing. Hashes are
verified by default: without that, the package accepts a truncated file.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import ConfigError, LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import ParameterFiller
from ...core.local_path import local_path
from .files import Bar, Layout, files_of

LAYOUT = Layout("model.tensors", "model.tensors.index.json", ("*.tensors",))
TENSORS_AT_ONCE = 8
"""Tensors that the package keeps in memory together."""
OF_VLLM = ("_vllm_marker", "vllm_tensorized_marker")
"""Names of vLLM's marker tensors."""


class TensorizerLoader:
    extra_config: ClassVar[tuple[str, ...]] = ("tensorizer_uri", "num_readers", "verify_hash")

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        try:
            self.tensorizer: Any = importlib.import_module("tensorizer")
        except ImportError as error:
            raise ConfigError(
                "load_format: tensorizer needs the package tensorizer (pip install tensorizer): "
                f"{error}",
                param="load_format",
            ) from error
        options = config.model_loader_extra_config or {}
        self.folder = model_config.path
        self.file = _path(options.get("tensorizer_uri"), self.folder)
        self.num_readers = options.get("num_readers")
        if self.num_readers is not None and (
            type(self.num_readers) is not int or not 1 <= self.num_readers <= 256
        ):
            raise _refusal("num_readers", f"must be from 1 to 256, got {self.num_readers!r}")
        self.verify_hash = options.get("verify_hash", True)
        if not isinstance(self.verify_hash, bool):
            raise _refusal("verify_hash", f"must be true or false, got {self.verify_hash!r}")

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Raises LoadError naming missing, unexpected or differently shaped tensors, and for
        damaged or encrypted files, or vLLM's own parameters.
        """
        filler = ParameterFiller(model, model.weight_map)  # type: ignore[arg-type]
        files = [self.file] if self.file else files_of(self.folder, LAYOUT, "serialize the tensors")
        with Bar.of(files) as bar, torch.no_grad():
            for file in files:
                try:
                    for name, tensor in self._tensors(file, device, filler.takes):
                        filler.fill(name, tensor)
                        bar.add(tensor.nbytes)
                except LoadError as error:
                    raise LoadError(f"{file.name}: {error.message}") from error
                except Exception as error:  # The package raises what reading stumbles over.
                    kind = type(error).__name__
                    reason = (
                        "it is encrypted, and encrypted files are not read here"
                        if kind == "CryptographyError"
                        else f"{kind}: {error}"
                    )
                    raise LoadError(
                        f"{file.name} cannot be read by tensorizer: {reason}"
                    ) from error
        filler.finish()

    def _tensors(
        self, file: Path, device: torch.device, takes: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the file's tensors that the model takes, a few at a time: the package keeps what it
        has read while the file is open.
        """
        with file.open("rb") as opened:
            names = list(self._open(opened, device).keys())
        for name in names:
            if not isinstance(name, str):
                raise LoadError(f"a tensor's name is {name!r}, which is no text")
        if names_of_vllm := set(OF_VLLM) & set(names):
            raise LoadError(
                f"vLLM wrote it of its own parameters ({names_of_vllm.pop()}); serialize the "
                "checkpoint's tensors by their own names"
            )
        waiting = filter(takes, names)
        while part := frozenset(itertools.islice(waiting, TENSORS_AT_ONCE)):
            with file.open("rb") as opened:
                reader = self._open(opened, device, filter_func=part.__contains__)
                for _, _, name, tensor in reader.read_tensors():
                    yield name, tensor.detach()

    def _open(self, opened: Any, device: torch.device, **options: Any) -> Any:
        return self.tensorizer.TensorDeserializer(
            opened, device=device, lazy_load=True, num_readers=self.num_readers,
            verify_hash=self.verify_hash, **options,
        )  # fmt: skip


def _path(given: Any, folder: Path) -> Path | None:
    """Return the option tensorizer_uri's file, or None. Raises ConfigError."""
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise _refusal("tensorizer_uri", f"must be a path, got {given!r}")
    if "://" in given:
        raise _refusal("tensorizer_uri", f"{given!r} is a URL; only local files are read")
    file = folder / local_path(given)
    if not file.is_file():
        raise _refusal("tensorizer_uri", f"there is no file {str(file)!r}")
    return file


def _refusal(option: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model_loader_extra_config: {option}: {reason}", param="model_loader_extra_config"
    )
