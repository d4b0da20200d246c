"""Candidates of `bench tune` for 4-bit weights, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GROUP = 128
EPS = 1e-6
ROWS = {"int4_gemv": (1,), "int4_small_m": (8, 16, 32, 64, 128, 256)}
"""Kernel → measured numbers of rows."""
SHARED_BYTES = 215_000
"""Shared memory for tiles, less the compiler's."""
TILES = {
    8: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 2, 4), (32, 64, 2, 3), (64, 32, 4, 4)),
    16: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 2, 3), (64, 32, 4, 4)),
    32: ((64, 32, 4, 4), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2)),
    64: ((128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 3), (128, 64, 8, 2)),
    128: ((128, 32, 8, 2), (128, 16, 8, 4), (64, 32, 4, 2)),
}
"""block_m → candidates (block_n, block_k, num_warps, num_stages)."""
GEMV = (
    (32, 4, 4), (32, 2, 6), (32, 2, 4), (32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 2, 4),
    (64, 2, 3), (64, 2, 2), (128, 2, 3), (128, 2, 2), (128, 4, 2),
)  # fmt: skip


def candidates(kernel: str, product: tuple[int, int, bool], rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of `Int4GemvConfig` or `SmallMConfig`."""
    if kernel == "int4_gemv":
        yield from GEMV
        return
    outputs, inputs, gated = product
    for block_m in {min(rows, 128), min(rows, 64)}:
        for block_n, block_k, warps, stages in TILES[block_m]:
            tile = block_k * (4 * block_n * (2 if gated else 1) + 16 * block_m)
            if tile * stages > SHARED_BYTES:
                continue
            for split_k in (1, 2, 4, 8):
                programs = -(-outputs // block_n) * -(-rows // block_m) * split_k
                if split_k > 1 and (programs > 520 or inputs // 8 < 2 * block_k * split_k):
                    continue
                if split_k > 1 or programs >= 90:
                    yield block_m, block_n, block_k, split_k, warps, stages


class Int4Product:
    """Copies of a layer's weights in 4 bits, and both products."""

    def __init__(self, product: tuple[int, int, bool], rows: int, copies: int) -> None:
        import torch

        from ....core.nn.quantized_weight import QuantizedWeight
        from ....kernels.linear.small_m_matmul import MAX_TILES, SplitKWorkspace

        self.outputs, self.inputs, self.gated = product
        stacked = self.outputs * (2 if self.gated else 1)

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        def weight() -> QuantizedWeight:
            words = torch.randint(
                -(2**31), 2**31, (stacked, self.inputs // 8), device="cuda", dtype=torch.int32
            )
            scale = (random(-(-self.inputs // GROUP), stacked).abs() + 0.5) * 0.004
            return QuantizedWeight(words, scale, GROUP, bits=4)

        self.x = random(rows, self.inputs)
        self.weights = [weight() for _ in range(copies)]
        self.residual = None if self.gated else random(rows, self.outputs)
        # With one token, a product that follows a norm computes the norm, too.
        self.norm = (random(self.inputs).abs() + 0.5, EPS) if self.residual is None else None
        self.workspace = SplitKWorkspace(
            torch.empty(8 * rows * stacked, device="cuda"),
            torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda"),
        )

    def multiply(self, config: tuple[Any, ...], i: int) -> Any:
        from ....kernels.linear.int4_gemv import Int4GemvConfig, int4_gemv
        from ....kernels.linear.small_m_matmul import SmallMConfig, small_m_matmul

        weight = self.weights[i % len(self.weights)]
        if len(self.x) == 1:
            return int4_gemv(
                self.x, weight, norm=self.norm, residual=self.residual, gated=self.gated,
                config=Int4GemvConfig(*config),
            )  # fmt: skip
        return small_m_matmul(
            self.x, weight, residual=self.residual, gated=self.gated,
            config=SmallMConfig(*config), workspace=self.workspace,
        )  # fmt: skip

    def library(self, i: int) -> Any:
        """Dequantize, and multiply with cuBLAS."""
        import torch

        from ....kernels.activations import silu_mul
        from ....kernels.quant.dequantize import dequantize_weight
        from ....kernels.rms_norm import rms_norm

        x = self.x
        if len(x) == 1 and self.norm is not None:
            x = rms_norm(x, *self.norm)
        dense = dequantize_weight(self.weights[i % len(self.weights)], x.dtype).t()
        if self.residual is None:
            return silu_mul(torch.mm(x, dense))
        return torch.addmm(self.residual, x, dense)
