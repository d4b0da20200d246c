"""A second model, filled beside the one that serves, and then copied into it.

It is made by what makes a model at the start, so every layout, quantization and derived tensor is
that of a fresh engine with these weights. It takes as much memory as the first one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from ..config import EngineConfig
from ..errors import LoadError, listed, shown
from ..live.worker_jobs import TensorPart, WeightCount
from ..local_path import is_folder, local_path
from ..nn.operations import Operations
from ..parallel.ranks import Ranks
from ..registry import Plugins
from .build import construct_model, finish_model, load_weights, untied
from .model_config import ModelConfig
from .model_tensors import ModelTensors
from .quantize import choose_method
from .weight_map import ParameterFiller, WeightMap

logger = logging.getLogger("jackfield.loading")
DRAFT_PREFIX = "draft_model."
"""Before the names of tensors of a draft model that has a checkpoint of its own."""


@dataclasses.dataclass(frozen=True)
class ModelBeside:
    """A model that serves beside the engine's, as a draft model does."""

    config: EngineConfig
    model_config: ModelConfig
    ranks: Ranks
    architecture: Any
    """These: what it was built from, as `build_model` takes it."""
    tensors: ModelTensors
    """Its own: not those that it shares with the engine's model."""
    in_checkpoint: bool
    """Whether it is in the checkpoint of the engine's model, so that updates bring its tensors."""


class SecondModel:
    """Takes each tensor of a checkpoint once."""

    def __init__(
        self,
        plugins: Plugins,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
        operations: Operations,
        ranks: Ranks,
        serving: ModelTensors,
        *,
        architecture: Any = None,
        beside: Sequence[ModelBeside] = (),
    ) -> None:
        """serving: the first model's tensors, as `build_model` made it from `architecture`; beside:
        models that serve beside it."""
        self._plugins, self._config, self._device, self._ranks = plugins, config, device, ranks
        self._serving = serving
        self._model_config, self._architecture = model_config, architecture

        def second(each: ModelBeside) -> SecondModel:
            return SecondModel(
                plugins, each.config, each.model_config, device, operations, each.ranks,
                each.tensors, architecture=each.architecture,
            )  # fmt: skip

        self._beside = [second(each) for each in beside if each.in_checkpoint]
        self._separate = [partial(second, each) for each in beside if not each.in_checkpoint]
        self._drafts: list[SecondModel] = []
        """Made of `_separate` with their first tensor: most updates have none."""
        self._drafts_elsewhere = config.speculative_config is not None and not ranks.pipeline.last
        self._model = self._constructed(operations)
        if self._lacks_head():
            self._model_config = untied(model_config)
            self._model = self._constructed(operations)
        self._filler: ParameterFiller | None = None
        """Set with the first tensor; a checkpoint's loader has its own."""
        self._names: set[str] = set()
        self._parts: dict[str, tuple[torch.Tensor, int]] = {}
        """Tensors that came in part: [nbytes] uint8, and how many bytes are there."""
        self._read = False
        self.tensors: ModelTensors | None = None
        """Set by `finish`, unless the update is of draft models alone."""
        self._finished = False

    def _constructed(self, operations: Operations) -> nn.Module:
        config, model_config = self._config, self._model_config
        method = choose_method(self._plugins, config, model_config, self._device)
        return construct_model(
            self._plugins, config, model_config, self._device, operations, self._ranks, method,
            self._architecture,
        )  # fmt: skip

    def _lacks_head(self) -> bool:
        """Whether the serving model has a head of its own, despite its configuration."""
        weight_map: WeightMap = self._model.weight_map  # type: ignore[assignment]
        modules = dict(self._model.named_modules())
        heads = [name.rpartition(".")[0] for name in weight_map.tied]
        return any(
            head not in modules
            and any(path.startswith(f"{head}.") for path in self._serving.tensors)
            for head in heads
        )

    # ------------------------------------------------------------ filling

    def read(self, path: str, load_format: str) -> None:
        """Fill all of it from a checkpoint's files. Raises LoadError."""
        self._check_open()
        if self._read or self._names or self._parts:
            raise LoadError("an update is either read from files, once, or sent as tensors")
        folder = local_path(path)
        if not path or not is_folder(folder):
            raise LoadError(f"model_path: {shown(path)} is no folder on the engine's machine")
        config = self._config
        load_format = load_format or ("auto" if config.load_format == "dummy" else "")
        if load_format:
            config = msgspec.structs.replace(config, load_format=load_format)
        model_config = dataclasses.replace(self._model_config, path=folder)
        load_weights(self._plugins, config, model_config, self._model, self._device, self._ranks)
        self._read = True
        for each in self._beside:
            each.read(path, load_format)

    def put(self, parts: tuple[TensorPart, ...], data: bytes | memoryview) -> None:
        """Fill it from the bytes of tensors. Raises LoadError."""
        view, begin = memoryview(data), 0
        for part in parts:
            dtype = dtype_named(part)
            size = tensor_bytes(part, dtype)
            length = size - part.start if part.nbytes is None else part.nbytes
            if not (0 <= part.start and 0 < length and part.start + length <= size) and size:
                raise LoadError(
                    f"tensor {part.name!r} has {size} bytes, and {length} from number "
                    f"{part.start} on were sent"
                )
            piece, begin = view[begin : begin + length], begin + length
            if len(piece) < length:
                raise LoadError(
                    f"the bucket ends within tensor {part.name!r}: {len(view)} bytes came, and its "
                    f"list of tensors has {begin} by there"
                )
            received = torch.frombuffer(bytearray(piece), dtype=torch.uint8) if length else EMPTY
            if length < size:
                whole = self._joined(part, received, size)
                if whole is None:
                    continue
                received = whole
            self.add(part.name, received.view(dtype).view(part.shape))
        if begin < len(view):
            raise LoadError(f"the bucket has {len(view) - begin} bytes more than its list says")

    def _joined(self, part: TensorPart, received: torch.Tensor, size: int) -> torch.Tensor | None:
        """Return a tensor that came in parts, in order; None: not all of it is there."""
        whole, there = self._parts.pop(part.name, (None, 0))
        if whole is None:
            self._check_new(part.name)
            whole = torch.empty(size, dtype=torch.uint8)
        if part.start != there or len(whole) != size:
            raise LoadError(
                f"tensor {part.name!r} came in part, up to byte {there}; its next part begins at "
                f"{part.start}"
            )
        whole[there : there + len(received)] = received
        there += len(received)
        if there == size:
            return whole
        self._parts[part.name] = whole, there
        return None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Fill it with one tensor of a checkpoint. Raises LoadError."""
        self._check_open()
        if self._read:
            raise LoadError(f"tensor {name!r} came after the update was read from files")
        self._check_new(name)
        self._names.add(name)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise LoadError(f"tensor {name!r} has values that are no numbers (NaN or infinite)")
        if name.startswith(DRAFT_PREFIX):
            self._add_to_draft(name.removeprefix(DRAFT_PREFIX), tensor)
            return
        if self._filler is None:
            self._filler = ParameterFiller(self._model, self._model.weight_map)  # type: ignore[arg-type]
        self._filler.fill(name, tensor.to(self._device))
        for each in self._beside:
            if each.has_place_for(name):
                each.add(name, tensor)

    def _add_to_draft(self, name: str, tensor: torch.Tensor) -> None:
        if self._drafts_elsewhere:
            return
        if not self._separate:
            raise LoadError(
                f"tensor {DRAFT_PREFIX + name!r}: no draft model with a checkpoint of its own "
                "serves here; drafting layers of the served checkpoint have their names in it"
            )
        self._drafts = self._drafts or [make() for make in self._separate]
        fitting = (each for each in self._drafts if each.has_place_for(name))
        next(fitting, self._drafts[0]).add(name, tensor)

    def has_place_for(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is of this model, of those that are in it."""
        weight_map: WeightMap = self._model.weight_map  # type: ignore[assignment]
        return weight_map.own(name) is not None

    def _check_new(self, name: str) -> None:
        if name in self._names or name in self._parts:
            raise LoadError(f"tensor {name!r} came twice")

    def _check_open(self) -> None:
        if self._finished:
            raise LoadError("the update is complete; begin another one")

    # ------------------------------------------------------------ the end

    def finish(self) -> WeightCount:
        """Check that all of it is there, derive what the model computes with, and compare it with
        the serving model. Raises LoadError."""
        self._check_open()
        if self._parts:
            raise LoadError(f"tensors of which a part is missing: {listed(sorted(self._parts))}")
        if not self._read and not self._names:
            raise LoadError("the update has no tensors")
        count = WeightCount(len(self._names), 0)
        for each in self._drafts:
            count = WeightCount(count.num_tensors, count.nbytes + each.finish().nbytes)
        if self._read or self._filler is not None:
            count = WeightCount(count.num_tensors, count.nbytes + self._finish_own())
        self._finished = True
        return count

    def _finish_own(self) -> int:
        """Finish the model, and those in its checkpoint; return their bytes."""
        if self._filler is not None:
            self._filler.finish()
        finish_model(
            self._plugins, self._config, self._model_config, self._model, self._architecture
        )
        # Where a checkpoint has none, the serving model has the engine's.
        absent: Collection[str] = getattr(self._model, "absent", ())
        tensors = ModelTensors.of(self._model).without_paths(
            path for path in absent if path not in self._serving.tensors
        )
        tensors.check_like(self._serving)
        nbytes = tensors.nbytes
        for each in self._beside:
            if each._read or each._names:
                nbytes += each.finish().nbytes
            else:
                logger.warning(
                    "the update has no tensors of the drafting layers, which stay as they are: "
                    "fewer drafts may be accepted"
                )
        self.tensors = tensors
        return nbytes

    def apply(self) -> None:
        """Copy it into the serving model."""
        assert self._finished, "finish() comes first"
        if self.tensors is not None:
            self._serving.copy_from(self.tensors)
        for each in (*self._beside, *self._drafts):
            if each._finished:
                each.apply()


EMPTY = torch.empty(0, dtype=torch.uint8)


def dtype_named(part: TensorPart) -> torch.dtype:
    """Return a part's type. Raises LoadError."""
    dtype = getattr(torch, part.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"tensor {part.name!r} is of an unknown type: {part.dtype!r}")
    return dtype


def tensor_bytes(part: TensorPart, dtype: torch.dtype) -> int:
    """Return a whole tensor's size. Raises LoadError."""
    size = dtype.itemsize
    for length in part.shape:
        if length < 0:
            raise LoadError(f"tensor {part.name!r} has a negative size: {part.shape}")
        size *= length
    return size
