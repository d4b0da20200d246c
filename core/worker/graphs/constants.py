"""What work on a device takes from the host, found out once, so that the work can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset({
    "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "is_nonzero", "item",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
})  # fmt: skip
"""Operations that wait for the device: their results are numbers, or have shapes that depend on
numbers."""
INDEXED = frozenset({"index", "index_put", "index_put_"})
"""Operations that do so for masks among their indices."""
UNWRITTEN = frozenset({"empty", "empty_strided"})
"""Operations that make what kernels may fill unseen, on a device."""
FROM_LISTS = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})


class DependsOnContents(RuntimeError):
    """What is launched depends on the numbers that are worked on."""


class HostConstants:
    """Results within a function, called twice, that cannot be recorded: what it reads from the
    device, and tensors that come from the host. They must not depend on the contents that it works
    on.
    """

    def __init__(self, contents: Iterable[torch.Tensor]) -> None:
        self._contents = tuple(contents)
        self._results: list[Any] = []
        self._read: dict[int, torch.UntypedStorage] = {}
        """What recorded work reads, and has not made itself: it must stay."""

    def find(self, function: Callable[[], None]) -> None:
        """Call it, and keep these results. Raises DependsOnContents."""
        self._results = []
        mode = _Finding(self._contents, self._results)
        with _FromLists(mode), mode:
            function()

    def use(self, function: Callable[[], None]) -> None:
        """Call it again, with these results: it neither waits for the device nor brings anything
        to it."""
        mode = _Using(iter(self._results), self._read)
        with _FromLists(mode), mode:
            function()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, and hands on those whose results are constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in WAITS:
            with self:  # In inference mode, operations come as they were called.
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if name in INDEXED:
            tensor, indices, *others = args
            args = (tensor, self._numbered(tensor, indices), *others)
        if name == "copy_" and args[0].device != args[1].device:
            target, source, *others = args
            args = (target, self._moved(source, target.device), *others)
        if name in WAITS or (name == "_to_copy" and _moves(args[0], kwargs.get("device"))):
            return self.constant(lambda: func(*args, **kwargs), (args, kwargs))
        return self.done(name, func(*args, **kwargs), (args, kwargs))

    def _numbered(self, tensor: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
        """Return indices with numbers in the place of masks, where the tensor is."""
        numbers: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                places = self.constant(index.nonzero, index)
                numbers.extend(self._moved(each, tensor.device) for each in places.unbind(1))
            else:
                numbers.append(None if index is None else self._moved(index, tensor.device))
        return numbers

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        moved: torch.Tensor = self.constant(lambda: tensor.to(device), tensor)
        return moved

    def constant(self, work: Callable[[], Any], inputs: Any) -> Any:
        """Return the result of an operation that cannot be recorded."""
        raise NotImplementedError

    def done(self, name: str, out: Any, inputs: Any) -> Any:
        """Return the result of another."""
        raise NotImplementedError


class _FromLists(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Sees tensors that are made of numbers of the host: no operation says so."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        data = args[1:] if func is torch.Tensor.new_tensor else args
        if func not in FROM_LISTS or not data or _tensors(data):
            return func(*args, **kwargs)
        return self._mode.constant(lambda: func(*args, **kwargs), ())


class _Finding(_Mode):
    def __init__(self, contents: Iterable[torch.Tensor], results: list[Any]) -> None:
        super().__init__()
        self._results = results
        self._dependent = _Storages()
        """Those whose numbers depend on contents."""
        self._dependent.add(contents)
        self._within = False
        """A constant is made, by several operations."""

    def constant(self, work: Callable[[], Any], inputs: Any) -> Any:
        if self._within:
            return work()
        if self._depends(inputs):
            raise DependsOnContents("what is launched depends on the numbers of an item")
        self._within = True
        try:
            result = work()
        finally:
            self._within = False
        self._results.append(_copied(result))
        return self._noted(result, dependent=False)

    def done(self, name: str, out: Any, inputs: Any) -> Any:
        unwritten = name in UNWRITTEN and out.device.type != "cpu"
        return self._noted(out, dependent=unwritten or self._depends(inputs))

    def _depends(self, inputs: Any) -> bool:
        return any(each in self._dependent for each in _tensors(inputs))

    def _noted(self, out: Any, *, dependent: bool) -> Any:
        if dependent:
            self._dependent.add(_tensors(out))
        return out


class _Using(_Mode):
    def __init__(self, results: Iterator[Any], read: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._results, self._read = results, read
        self._own = _Storages()
        """What it has made itself."""

    def constant(self, work: Callable[[], Any], inputs: Any) -> Any:
        kept = next(self._results)
        self._keep(kept)
        result = _copied(kept)  # What follows may write to it.
        self._own.add(_tensors(result))
        return result

    def done(self, name: str, out: Any, inputs: Any) -> Any:
        self._keep(inputs)
        self._own.add(each for each in _tensors(out) if _address(each) not in self._read)
        return out

    def _keep(self, tree: Any) -> None:
        for each in _tensors(tree):
            if each not in self._own:
                self._read[_address(each)] = each.untyped_storage()


class _Storages:
    """A set of storages, of which some may be gone: no other gets the address of one that is
    weakly referred to."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (address := _address(tensor)) not in self._known:
                self._known[address] = StorageWeakRef(tensor.untyped_storage())

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._known


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _moves(tensor: torch.Tensor, device: Any) -> bool:
    return device is not None and torch.device(device).type != tensor.device.type


def _copied(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.clone()
    if isinstance(result, tuple | list):
        return type(result)(map(_copied, result))
    return result
