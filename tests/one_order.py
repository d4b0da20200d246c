"""Products of Triton's interpreter whose bits do not depend on their place in a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def sum_products_in_one_order(monkeypatch: Any) -> None:
    """Let the same row and column of `tl.dot` give the same bits wherever in its tiles they lie, as
    on a GPU.

    The interpreter leaves products to numpy's BLAS, which adds them up in another order at another
    place: OpenBLAS's kernels for AVX2 do for columns 8 to 55 of 64. Sums in float64 are exact for
    operands of 16 bits and products of size about 1, and rounded once here.
    """
    from triton.language import core
    from triton.runtime import interpreter

    np, handle = interpreter.np, interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def exact_dot(self: Any, a: Any, b: Any, acc: Any, *more: Any) -> Any:
        if acc.data.dtype != np.float32:
            return dot(self, a, b, acc, *more)
        sums = dot(self, a, b, handle(np.zeros((1, 1)), core.float64), *more)
        return handle(sums.data.astype(np.float32) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", exact_dot)


class OneOrder:
    """Tests of bits that a GPU promises: the interpreter keeps them with sums of its own alone."""

    @pytest.fixture(autouse=True)
    def sums_have_one_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not torch.cuda.is_available():
            sum_products_in_one_order(monkeypatch)
