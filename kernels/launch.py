"""Launches every kernel of this project; in a `Precompiler`, compiles it only."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch

from .assembler import choose_assembler

# Here, for each kernel's module imports this one, and none is compiled before.
choose_assembler()

compile_only: contextvars.ContextVar[bool] = contextvars.ContextVar("compile_only", default=False)
"""Set by `Precompiler` for its thread: launches compile and run nothing."""


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    if compile_only.get():
        return functools.partial(kernel.run, grid=grid, warmup=True)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


def empty_indices(*shape: int, device: torch.device) -> torch.Tensor:
    """Return int32 for a kernel to fill with indices that torch then uses: uninitialised, but zeros
    in a `Precompiler`, where no kernel runs.
    """
    make = torch.zeros if compile_only.get() else torch.empty
    return make(shape, dtype=torch.int32, device=device)
