"""Counting of what is a launch on a GPU, where Triton's interpreter runs kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
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


STEP = {"_embedding_kernel": 1, "zeros": 1}
"""What every step begins with, and the positions that `PagedModel` makes."""


def launches_of_one_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return what a decode step of one row launches, without its logits, besides `STEP`. Its result
    is that of torch."""
    from jackfield.plugins.conformance.paged_model import PagedModel

    counted, plain = (PagedModel(folder, "float32", kernels=k) for k in ("triton", "torch"))
    for model in (counted, plain):
        for tokens in ([5, 6, 7], [8]):  # What operations keep, they make in the first step.
            model.run({0: tokens})
    launches = Launches(monkeypatch)

    def watch(module: Any, method: str) -> None:
        plain = getattr(module, method)

        def watched(*args: Any) -> Any:
            with launches:
                return plain(*args)

        monkeypatch.setattr(module, method, watched)

    watch(counted.model, "forward")
    hidden = counted.hidden({0: [9]})
    if isinstance(hidden, tuple):
        watch(counted.model.model, "finish")
        hidden = counted.model.model.finish(hidden)
    monkeypatch.undo()
    want = plain.logits(plain.hidden({0: [9]}))
    torch.testing.assert_close(counted.logits(hidden), want, atol=1e-4, rtol=1e-4)
    return launches.counts - Counter(STEP)
