"""All tensors that a model computes with, wherever its modules keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from ..errors import LoadError, listed

TORCHS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


@dataclasses.dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model as it was built, and the numbers beside them."""

    tensors: Mapping[str, torch.Tensor]
    """Path → parameter, buffer, or tensor in an attribute; tied ones stand under each path."""
    numbers: Mapping[str, float]
    """Path → floating-point attribute, such as a cache's scale."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Return those of a model that `build_model` has just made, before others add to it."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, float] = {}
        for path, value in _walk(model, "", set()):
            if isinstance(value, torch.Tensor):
                tensors[path] = value.data if isinstance(value, nn.Parameter) else value
            else:
                numbers[path] = value
        return cls(tensors, numbers)

    def without(self, others: ModelTensors) -> ModelTensors:
        """Return those whose memory is not also that of others."""
        shared = others.storages()
        own = {
            path: tensor
            for path, tensor in self.tensors.items()
            if tensor.untyped_storage().data_ptr() not in shared
        }
        return ModelTensors(own, self.numbers)

    def without_paths(self, paths: Iterable[str]) -> ModelTensors:
        """Return those with other paths."""
        left_out = set(paths)
        own = {path: tensor for path, tensor in self.tensors.items() if path not in left_out}
        return ModelTensors(own, self.numbers)

    def storages(self) -> dict[int, tuple[str, torch.UntypedStorage]]:
        """Return the memory of all tensors, each once: address → path of a tensor in it, memory."""
        storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for path, tensor in self.tensors.items():
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), (path, storage))
        return storages

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for _, storage in self.storages().values())

    def check_like(self, serving: ModelTensors) -> None:
        """Raise LoadError unless these can take the place of a serving model's."""
        if lost := sorted(self.tensors.keys() ^ serving.tensors.keys()):
            raise LoadError(
                f"the new weights make another model than the one that serves: {listed(lost)}"
            )
        for path, tensor in serving.tensors.items():
            new = self.tensors[path]
            if _layout(new) != _layout(tensor):
                raise LoadError(
                    f"{path} becomes {_described(new)}, and the serving model has "
                    f"{_described(tensor)}"
                )
        for path, number in serving.numbers.items():
            if (changed := self.numbers.get(path)) != number:
                raise LoadError(
                    f"{path} becomes {changed}, and steps are prepared with {number}: such a "
                    "checkpoint needs a new start"
                )

    def copy_from(self, new: ModelTensors) -> None:
        """Take over the numbers of tensors that are alike (`check_like`), in place."""
        for path, storage in self.storages().values():
            storage.copy_(new.tensors[path].untyped_storage())


def move_tensors(
    model: nn.Module,
    addresses: Set[int],
    place: Callable[[torch.UntypedStorage], torch.UntypedStorage],
) -> None:
    """Give those of a model's tensors whose memory is at `addresses` other memory: `place` takes
    the old one, and returns a copy. They stay the same objects, and share what they shared."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for _, value in _walk(model, "", set()):
        if isinstance(value, torch.Tensor):
            address = value.untyped_storage().data_ptr()
            if address in addresses:
                sharing.setdefault(address, []).append(value)
    for address in list(sharing):
        tensors = sharing.pop(address)
        new = place(tensors[0].untyped_storage())
        for tensor in tensors:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = empty.set_(new, *layout)


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor or float) of everything in a value, in a fixed order."""
    if isinstance(value, torch.Tensor | float):
        yield path, value
        return
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, nn.Module):
        items = _attributes(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    else:
        return
    if id(value) in seen:  # A module that several refer to, or a circle.
        return
    seen.add(id(value))
    for key, inner in items:
        yield from _walk(inner, f"{path}.{key}" if path else str(key), seen)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module has, submodules and registered tensors by their own names."""
    own = vars(module)
    for kind in ("_parameters", "_buffers", "_modules"):
        yield from own[kind].items()
    yield from ((name, value) for name, value in own.items() if name not in TORCHS)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    size = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset(), size


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
