"""NVTX ranges of a model's modules, for Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def mark_modules(
    model: nn.Module, push: Callable[[str], object], pop: Callable[[], object]
) -> None:
    """Open a range, with the module's name, around each call of each module of a model.

    Recorded steps call no module. push, pop: `torch.cuda.nvtx.range_push` and `range_pop`.
    """
    for name, module in model.named_modules():
        begin = partial(_begin, push, name or type(model).__name__)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(partial(_end, pop), always_call=True)


def _begin(push: Callable[[str], object], name: str, *_: Any) -> None:
    push(name)  # Its result would take the place of the arguments.


def _end(pop: Callable[[], object], *_: Any) -> None:
    pop()
