"""What `bench tune` tries for products by 4-bit numbers, and how it multiplies by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GROUP = 128
EPS = 1e-6
ROWS = {"nibble_gemv": (1,), "nibble_skinny": (8, 16, 32, 64, 128, 256)}
"""Kernel → numbers of rows that are measured"""
SHARED_BYTES = 215_000
"""A multiprocessor's memory for tiles, less what the compiler wants."""
TILES = {
    8: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 2, 4), (32, 64, 2, 3), (64, 32, 4, 4)),
    16: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 2, 3), (64, 32, 4, 4)),
    32: ((64, 32, 4, 4), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2)),
    64: ((128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 3), (128, 64, 8, 2)),
    128: ((128, 32, 8, 2), (128, 16, 8, 4), (64, 32, 4, 2)),
}
"""block_m → (block_n, run, num_warps, num_stages) worth a try"""
GEMV = ((32, 4, 4), (32, 2, 6), (64, 4, 2), (64, 4, 3), (64, 2, 4), (128, 2, 3), (128, 4, 2))


def candidates(kernel: str, product: tuple[int, int, bool], rows: int) -> Iterator[tuple[Any, ...]]:
    """Shapes as tuples, `NibbleGemvShape` or `NibbleSkinnyShape`."""
    if kernel == "nibble_gemv":
        yield from GEMV
        return
    outputs, inputs, gated = product
    for block_m in {min(rows, 128), min(rows, 64)}:
        for block_n, run, warps, stages in TILES[block_m]:
            tile = run * (4 * block_n * (2 if gated else 1) + 16 * block_m)
            if tile * stages > SHARED_BYTES:
                continue
            for split in (1, 2, 4, 8):
                programs = -(-outputs // block_n) * -(-rows // block_m) * split
                if split > 1 and (programs > 520 or inputs // 8 < 2 * run * split):
                    continue
                if split > 1 or programs >= 90:
                    yield block_m, block_n, run, split, warps, stages


class NibbleProduct:
    """A layer's weights in 4 bits, copies of them, and both ways to multiply."""

    def __init__(self, product: tuple[int, int, bool], rows: int, copies: int) -> None:
        import torch

        from ...kernels.packed_weight import Packed
        from ...kernels.skinny import MAX_TILES, SkinnyWorkspace

        self.outputs, self.inputs, self.gated = product
        stacked = self.outputs * (2 if self.gated else 1)

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        def weight() -> Packed:
            words = torch.randint(
                -(2**31), 2**31, (stacked, self.inputs // 8), device="cuda", dtype=torch.int32
            )
            scale = (random(-(-self.inputs // GROUP), stacked).abs() + 0.5) * 0.004
            return Packed(words, scale, None, GROUP, 1, 4)

        self.x = random(rows, self.inputs)
        self.weights = [weight() for _ in range(copies)]
        self.residual = None if self.gated else random(rows, self.outputs)
        # One token's products do the norm before, too: of those that have one.
        self.norm = (random(self.inputs).abs() + 0.5, EPS) if self.residual is None else None
        self.workspace = SkinnyWorkspace(
            torch.empty(8 * rows * stacked, device="cuda"),
            torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda"),
        )

    def multiply(self, shape: tuple[Any, ...], i: int) -> Any:
        from ...kernels.nibble_gemv import NibbleGemvShape, nibble_gemv
        from ...kernels.nibble_skinny import NibbleSkinnyShape, nibble_skinny

        weight = self.weights[i % len(self.weights)]
        if len(self.x) == 1:
            return nibble_gemv(
                self.x, weight, norm=self.norm, residual=self.residual, gated=self.gated,
                shape=NibbleGemvShape(*shape),
            )  # fmt: skip
        return nibble_skinny(
            self.x, weight, residual=self.residual, gated=self.gated,
            shape=NibbleSkinnyShape(*shape), workspace=self.workspace,
        )  # fmt: skip

    def library(self, i: int) -> Any:
        """The weight made wide, and cuBLAS."""
        import torch

        from ...kernels.rms_norm import rms_norm
        from ...kernels.silu_mul import silu_mul
        from ...kernels.unpack_weight import unpack_weight

        x = self.x
        if len(x) == 1 and self.norm is not None:
            x = rms_norm(x, *self.norm)
        dense = unpack_weight(self.weights[i % len(self.weights)], x.dtype).t()
        if self.residual is None:
            return silu_mul(torch.mm(x, dense))
        return torch.addmm(self.residual, x, dense)
