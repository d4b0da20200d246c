"""`Operations` on this project's Triton kernels; products of many tokens stay with cuBLAS."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from ...core.nn.operations import (
    ClampedSwiGLU,
    DecodeTensors,
    ExpertWeight,
    GrammarBits,
    HeadLayout,
    Norm,
    Operations,
    Routing,
    SampleOutputs,
    SlotTables,
    StepTensors,
    split_heads,
)
from ...core.nn.packed import PackedWeight

try:
    from ...kernels.choose_tokens import choose_tokens
    from ...kernels.decode_inputs import decode_inputs
    from ...kernels.edit_logits import edit_logits
    from ...kernels.gelu_mul import gelu_mul
    from ...kernels.gemv import gemv
    from ...kernels.heads import heads
    from ...kernels.mask_tokens import mask_tokens
    from ...kernels.rehearsal import Rehearsal, can_rehearse, load_compiler, num_loaded
    from ...kernels.rms_norm import rms_norm
    from ...kernels.route import route
    from ...kernels.sample_tokens import sample_tokens
    from ...kernels.silu_mul import silu_mul
    from ...kernels.skinny import MAX_TILES, SkinnyShape, SkinnyWorkspace, elements, skinny
    from ...kernels.step_inputs import scatter, step_inputs
    from ...kernels.tuning import Product, skinny_shape
    from .experts import experts_product, experts_serve
    from .packed import packed_product

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"


SHARES = 4 << 20
"""Floats of room for products whose sums are shared among programs."""


class TritonOperations(Operations):
    """One token goes through fused matrix-vector products, a few through skinny ones where they
    were measured to be faster, more through kernels around cuBLAS."""

    name: ClassVar[str] = "triton"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when they run here, else the reason."""
        if _MISSING is not None:
            return _MISSING
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        return None

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, SkinnyWorkspace] = {}

    @classmethod
    def get_ready(cls, device: torch.device) -> None:
        """Loads Triton's compiler."""
        if device.type == "cuda" and _MISSING is None and can_rehearse():
            with torch.cuda.device(device):
                load_compiler()

    def rehearse(self, device: torch.device) -> Rehearsal | None:
        """Compiles on threads, side by side."""
        return Rehearsal(device) if device.type == "cuda" and can_rehearse() else None

    def num_loaded(self) -> int:
        """Counted by Triton's own hook."""
        return num_loaded()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[..., size] → the same shape."""
        return rms_norm(x, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x), in one launch."""
        return rms_norm(x, norm.weight, norm.eps, residual)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual + norm(x) Wᵀ + bias, the residual overwritten."""
        if x.shape[0] == 1:
            return gemv(x, weight, bias, norm=norm, residual=residual)
        if norm is not None:
            x = self.rms_norm(x, norm)
        if (shape := self._skinny_shape(x, weight, gated=False)) is not None:
            workspace = self._workspace(x.device)
            return skinny(
                x, weight, bias, residual=residual, shape=shape, workspace=workspace, out=residual
            )
        if residual is None or bias is not None:
            return super().linear(x, weight, bias, residual=residual)
        return residual.addmm_(x, weight.t())

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> torch.Tensor:
        """silu(gate) * up of one product."""
        if x.shape[0] == 1:
            return gemv(x, weight, bias, norm=norm, gated=True)
        if norm is not None:
            x = self.rms_norm(x, norm)
        if (shape := self._skinny_shape(x, weight, gated=True)) is not None:
            workspace = self._workspace(x.device)
            return skinny(x, weight, bias, gated=True, shape=shape, workspace=workspace)
        return super().gated_linear(x, weight, bias)

    def _skinny_shape(
        self, x: torch.Tensor, weight: torch.Tensor, *, gated: bool
    ) -> SkinnyShape | None:
        """None where a library's product is the better one, or the only one."""
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        shape = skinny_shape(Product(outputs, weight.shape[1], gated), x.shape[0], x.device)
        if shape is None or x.dtype == torch.float32:
            return None
        if elements(x.shape[0], outputs, shape.split, gated) > SHARES:
            return None
        return shape

    def _workspace(self, device: torch.device) -> SkinnyWorkspace:
        """Never replaced: captured graphs hold its addresses."""
        if device not in self._workspaces:
            self._workspaces[device] = SkinnyWorkspace(
                torch.empty(SHARES, dtype=torch.float32, device=device),
                torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
            )
        return self._workspaces[device]

    def packed_linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """`linear` or `gated_linear` by a quantized weight, which is read as it is."""
        return packed_product(
            self, x, weight, bias, norm=norm, residual=residual, gated=gated,
            workspace=self._workspace,
        )  # fmt: skip

    def route(self, logits: torch.Tensor, top_k: int, *, renormalize: bool) -> Routing:
        """In one launch."""
        return Routing(*route(logits, top_k, renormalize=renormalize))

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ClampedSwiGLU | None = None,
    ) -> torch.Tensor:
        """Only chosen experts are read; the residual is overwritten."""
        make = experts_product if experts_serve(gate_up, down) else super().experts
        return make(
            x, routing, gate_up, down, residual=residual, gate_up_bias=gate_up_bias,
            down_bias=down_bias, activation=activation,
        )  # fmt: skip

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] → [T, size]"""
        return silu_mul(x)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] → [T, size]"""
        return gelu_mul(x)

    def heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as views of `qkv`, which is changed."""
        heads(qkv, layout.num_heads, layout.num_kv_heads, positions, cos_sin, query_norm, key_norm)
        return split_heads(qkv, layout)

    def cached_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `heads`; keys and values are in the cache, too."""
        heads(
            qkv,
            layout.num_heads,
            layout.num_kv_heads,
            positions,
            cos_sin,
            query_norm,
            key_norm,
            kv_cache,
            slot_mapping,
            cache_scales,
        )
        return split_heads(qkv, layout)

    def decode_inputs(
        self,
        packed: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
    ) -> DecodeTensors:
        """All of them in one launch."""
        return DecodeTensors(*decode_inputs(packed, token_history, block_table, block_size))

    def step_inputs(
        self,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        first_positions: torch.Tensor,
        sample_slots: torch.Tensor,
        num_tokens: int,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
    ) -> StepTensors:
        """All of them in one launch."""
        tokens, rows, seq_lens, tables = step_inputs(
            query_start, slots, first_positions, sample_slots, num_tokens, token_history,
            block_table, block_size,
        )  # fmt: skip
        (ids, positions, places), (sampled, lengths, last) = tokens, rows
        return StepTensors(ids, positions, places, sampled, lengths, last, seq_lens, tables)

    def scatter(self, storage: torch.Tensor, writes: torch.Tensor, count: torch.Tensor) -> None:
        """In one launch."""
        scatter(storage, writes, count)

    samples: ClassVar[bool] = True

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
        *,
        plain: bool,
        grammar: GrammarBits | None = None,
        skip: int = 0,
    ) -> None:
        """Plain rows in two launches, any others in five."""
        if plain:
            choose_tokens(logits, tables.settings, slots, lengths, tables.history, out.chosen)
        else:
            sample_tokens(logits, slots, lengths, tables, out, grammar=grammar, skip=skip)

    def edit_logits(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tables: SlotTables,
        out: torch.Tensor,
        *,
        edits: int,
        scale: bool,
        grammar: GrammarBits | None = None,
    ) -> None:
        """In one launch."""
        edit_logits(logits, slots, tables, out, edits=edits, scale=scale, grammar=grammar)

    def mask_tokens(
        self, logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        """In place; logits that stay are not even read."""
        mask_tokens(logits, bits, rows)
