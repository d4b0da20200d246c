"""What CUDA graphs do, where there are none: work is noted once, and done again on the same memory
without the code that launched it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

try:
    from triton.runtime.interpreter import GridExecutor
except ImportError:  # Then there are no kernels to note, either.
    GridExecutor = None

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique")
"""Operations that wait for the device, as their results are numbers or shapes."""
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of torch and Triton's interpreter, then plays them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._paused = False
        self._run = None if GridExecutor is None else GridExecutor.__call__

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        if (run := self._run) is None:
            return self

        def launch(executor: Any, *args: Any, **options: Any) -> None:
            self._paused = True  # The interpreter itself uses torch.
            run(executor, *args, **options)
            self._paused = False
            self._calls.append((lambda *a, **o: run(executor, *a, **o), args, options, None))

        GridExecutor.__call__ = launch
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._run is not None:
            GridExecutor.__call__ = self._run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS and not self._paused:
            raise RuntimeError(f"{name} waits for the device, which cannot be recorded")
        out = func(*args, **(kwargs or {}))
        if not self._paused and name not in EMPTY:
            self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def play(self) -> None:
        """Do it all again: what the code read from the host is as it was."""
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            inputs = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def recorded(function: Callable[[], None]) -> Callable[[], None]:
    """As a `Recorder`."""
    with Tape() as tape:
        function()
    return tape.play
