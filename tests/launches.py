"""Counting of what is a launch on a GPU, where Triton's interpreter runs kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts what is a launch on a GPU: Triton kernels, and torch's operations that compute or
    copy."""

    FREE = (
        "view", "reshape", "empty", "new_empty", "slice", "select", "split", "split_with_sizes",
        "transpose", "expand", "alias", "detach", "as_strided", "unbind", "t", "permute", "squeeze",
        "unsqueeze",
    )  # fmt: skip

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **options: Any) -> None:
            before = self.counts.copy()
            run(executor, *args, **options)
            # The interpreter itself uses torch.
            self.counts = before + Counter([executor.fn.__name__])

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if name not in self.FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
