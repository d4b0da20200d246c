"""Operations on Triton kernels in which a row's result does not depend on the rows beside it.

Each product has one tile, whatever the number of rows: a tensor core adds the products of a row and
a column in the same order, wherever the row lies in the tile. Sums that several programs share are
added in one order, which a single program keeps, too. Norms, rotations and activations are those of
other steps: they compute a row per program.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .triton import TritonOperations

try:
    from ...kernels.linear.uniform_matmul import uniform_matmul
except ImportError:
    pass  # `supports` says why.


class InvariantTritonOperations(TritonOperations):
    """For layers that attend to keys and values, and mixtures of experts."""

    name: ClassVar[str] = "triton_invariant"
    features: ClassVar[frozenset[str]] = TritonOperations.features - {"linear.norm_sums"}
    batch_invariant: ClassVar[bool] = True

    def several_rows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        return uniform_matmul(
            x, weight, bias, residual=residual, gated=gated, workspace=self._workspace(x.device),
            out=residual,
        )  # fmt: skip
