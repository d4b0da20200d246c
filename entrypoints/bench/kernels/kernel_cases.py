"""Each kernel at real shapes, with its unavoidable bytes and operations.

Shapes are Qwen3-8B's, Qwen3-30B-A3B's for experts, DeepSeek's for latents and indexers, and
state_cases.py's for states; `TINY` ones run in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from ....core.worker.sampling.gumbel import seed_lanes
from ....core.worker.sampling.sampling_columns import NUM_COLUMNS, Column
from ....kernels.activations import gelu_mul, silu_mul
from ....kernels.attention.decode_splits import choose_num_splits, workspace_elements
from ....kernels.attention.fused_decode_attention import fused_decode_attention
from ....kernels.attention.norm_heads import norm_heads
from ....kernels.attention.paged_attention_decode import paged_attention_decode
from ....kernels.attention.paged_attention_prefill import paged_attention_prefill
from ....kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache
from ....kernels.attention.shared_prefix import (
    attend_prefix,
    prefix_elements,
    prefix_splits,
)
from ....kernels.linear.gemv import gemv
from ....kernels.linear.small_m_matmul import (
    MAX_TILES,
    SplitKWorkspace,
    small_m_matmul,
    split_k_floats,
)
from ....kernels.rms_norm import rms_norm
from ....kernels.sampling.sample_gumbel import sample_gumbel
from ....kernels.step.decode_inputs import decode_inputs
from ....kernels.tuning import Product, small_m_config, small_m_rule
from .cache_cases import QWEN3_8B_CACHE, TINY_CACHE, cache_cases
from .case import BLOCK_SIZE, EPS, Case, Maker, Work
from .expert_cases import QWEN3_30B_A3B, TINY_MIXTURE, expert_cases
from .index_cases import MEASURED as MEASURED_INDEXED
from .index_cases import TINY_INDEXED, index_cases
from .latent_cases import MEASURED, TINY_LATENTS, latent_cases
from .quant_cases import quant_cases
from .state_cases import PUBLISHED, TINY_STATES, state_cases

SMALL_M_ROWS = (8, 32)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tokens: tuple[int, int, int]
    """For norms, activations and heads."""
    rows: tuple[int, int, int]
    """For sampling."""
    decode: tuple[tuple[int, int], ...]
    """(rows, context) of decode attention."""
    fused: tuple[tuple[int, int], ...]
    prefixes: tuple[tuple[int, int], ...]
    """(rows, tokens that they share)."""
    prefill: tuple[tuple[int, int], ...]
    """(rows, prompt) of prefill attention."""

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


QWEN3_8B = Sizes(
    hidden=4096, intermediate=12288, num_heads=32, num_kv_heads=8, head_dim=128, vocab=151936,
    tokens=(256, 2048, 8192), rows=(1, 64, 256),
    decode=((256, 850), (64, 4096), (32, 16384)), fused=((1, 256), (8, 1024), (16, 4096)),
    prefixes=((16, 8192), (64, 2048), (256, 2048)), prefill=((8, 1024), (2, 4096), (1, 16384)),
)  # fmt: skip
TINY = Sizes(
    hidden=128, intermediate=256, num_heads=4, num_kv_heads=2, head_dim=16, vocab=300,
    tokens=(1, 2, 5), rows=(1, 2, 3), decode=((1, 20), (2, 33), (3, 40)),
    fused=((1, 20), (2, 33), (3, 40)), prefixes=((2, 64), (3, 130), (4, 200)),
    prefill=((1, 9), (2, 17), (1, 40)),
)  # fmt: skip


PARTS: tuple[tuple[Callable[..., Iterator[Case]], Any, Any], ...] = (
    (expert_cases, QWEN3_30B_A3B, TINY_MIXTURE),
    (cache_cases, QWEN3_8B_CACHE, TINY_CACHE),
    (latent_cases, MEASURED, TINY_LATENTS),
    (index_cases, MEASURED_INDEXED, TINY_INDEXED),
    (state_cases, PUBLISHED, TINY_STATES),
)
"""Makers of other files' cases, with published and small shapes."""


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield three shapes of each kernel, and a layer's projections for the matrix-vector
    product.
    """
    maker = _Maker(sizes, device, dtype)
    yield from maker.gemvs()
    for rows in SMALL_M_ROWS:
        yield from maker.small_m_matmuls(rows)
    for tokens in sizes.tokens:
        yield maker.rms_norm(tokens)
    for activation in (silu_mul, gelu_mul):
        for tokens in sizes.tokens:
            yield maker.activation(activation, tokens)
    for tokens in sizes.tokens:
        yield maker.qk_norm_rope_cache(tokens)
    for tokens in sizes.tokens:
        yield maker.norm_heads(tokens)
    for rows, context in sizes.fused:
        yield maker.fused_decode(rows, context)
    for rows, context in sizes.decode:
        yield maker.decode(rows, context)
    for rows, shared in sizes.prefixes:
        yield maker.prefix(rows, shared)
    for rows, prompt in sizes.prefill:
        yield maker.prefill(rows, prompt)
    for rows in sizes.rows:
        yield maker.decode_inputs(rows)
    for rows in sizes.rows:
        yield maker.sample_gumbel(rows)
    yield from quant_cases(sizes.hidden, sizes.intermediate, sizes.tokens, device, dtype)
    for more, published, tiny in PARTS:
        yield from more(published if sizes == QWEN3_8B else tiny, device, dtype)


class _Maker(Maker):
    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.sizes = sizes

    def gemvs(self) -> Iterator[Case]:
        s = self.sizes
        yield self.gemv("qkv", s.qkv, s.hidden, norm=True)
        yield self.gemv("output", s.hidden, s.num_heads * s.head_dim, residual=True)
        yield self.gemv("gate and up", 2 * s.intermediate, s.hidden, norm=True, gated=True)
        yield self.gemv("down", s.hidden, s.intermediate, residual=True)
        yield self.gemv("head", s.vocab, s.hidden, norm=True)

    def gemv(
        self,
        name: str,
        rows: int,
        size: int,
        *,
        norm: bool = False,
        residual: bool = False,
        gated: bool = False,
    ) -> Case:
        def make() -> Work:
            x, weight = self.random(1, size), self.random(rows, size)
            scale = (self.random(size), EPS) if norm else None
            residual_row = self.random(1, rows) if residual else None
            return lambda: gemv(x, weight, norm=scale, residual=residual_row, gated=gated)

        return Case(
            kernel="gemv", shape=f"{name} {rows} x {size}", bytes=rows * size * self.item, make=make
        )

    def small_m_matmuls(self, rows: int) -> Iterator[Case]:
        s = self.sizes
        for name, product in (
            ("qkv", Product(s.qkv, s.hidden, False)),
            ("output", Product(s.hidden, s.num_heads * s.head_dim, False)),
            ("gate and up", Product(s.intermediate, s.hidden, True)),
            ("down", Product(s.hidden, s.intermediate, False)),
        ):
            yield self.small_m_matmul(name, rows, product)

    def small_m_matmul(self, name: str, rows: int, product: Product) -> Case:
        stacked = product.outputs * (2 if product.gated else 1)

        def make() -> Work:
            x, weight = self.random(rows, product.inputs), self.random(stacked, product.inputs)
            residual = None if product.gated else self.random(rows, product.outputs)
            config = small_m_config(product, rows, self.device) or small_m_rule(product, rows)
            assert config is not None
            room = split_k_floats(rows, product.outputs, config.split_k, product.gated)
            workspace = SplitKWorkspace(
                torch.empty(room, device=self.device),
                torch.zeros(MAX_TILES, dtype=torch.int32, device=self.device),
            )
            return lambda: small_m_matmul(
                x,
                weight,
                residual=residual,
                gated=product.gated,
                config=config,
                workspace=workspace,
            )

        return Case(
            kernel="small_m_matmul", shape=f"{name} {rows} rows, {stacked} x {product.inputs}",
            bytes=stacked * product.inputs * self.item, make=make,
            flops=2.0 * rows * stacked * product.inputs,
        )  # fmt: skip

    def rms_norm(self, tokens: int) -> Case:
        size = self.sizes.hidden

        def make() -> Work:
            x, weight = self.random(tokens, size), self.random(size)
            return lambda: rms_norm(x, weight, EPS)

        moved = 2 * tokens * size * self.item
        return Case(kernel="rms_norm", shape=f"{tokens} x {size}", bytes=moved, make=make)

    def activation(self, kernel: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> Case:
        size = self.sizes.intermediate

        def make() -> Work:
            x = self.random(tokens, 2 * size)
            return lambda: kernel(x)

        moved = 3 * tokens * size * self.item
        name = kernel.__name__
        return Case(kernel=name, shape=f"{tokens} x {2 * size}", bytes=moved, make=make)

    def qk_norm_rope_cache(self, tokens: int) -> Case:
        s = self.sizes

        def make() -> Work:
            qkv = self.random(tokens, s.qkv)
            norms = [(self.random(s.head_dim), EPS) for _ in range(2)]
            positions = torch.arange(tokens, device=self.device)
            cos_sin = torch.randn(tokens, s.head_dim, device=self.device)
            cache = self.cache(-(-tokens // BLOCK_SIZE))
            return lambda: qk_norm_rope_cache(
                qkv, s.num_heads, s.num_kv_heads, positions, cos_sin, norms[0], norms[1], cache,
                positions,
            )  # fmt: skip

        read = s.qkv * self.item + s.head_dim * 4
        num_values = (s.num_heads + s.num_kv_heads) * s.head_dim + s.kv
        moved = tokens * (read + num_values * self.item)
        return Case(
            kernel="qk_norm_rope_cache", shape=f"{tokens} x {s.qkv}", bytes=moved, make=make
        )

    def norm_heads(self, tokens: int) -> Case:
        s = self.sizes
        heads = s.num_heads + s.num_kv_heads

        def make() -> Work:
            qkv = self.random(tokens, s.qkv)
            layout = (s.num_heads, s.num_kv_heads, s.head_dim)
            first, second = (
                (self.random(s.head_dim), self.random(s.head_dim), EPS, None) for _ in range(2)
            )
            return lambda: norm_heads(qkv, layout, first, second)

        moved = 2 * tokens * heads * s.head_dim * self.item
        return Case(
            kernel="norm_heads", shape=f"{tokens} x {heads * s.head_dim}", bytes=moved, make=make
        )

    def cache(self, blocks: int) -> torch.Tensor:
        s = self.sizes
        return self.random(2, blocks, BLOCK_SIZE, s.num_kv_heads, s.head_dim)

    def paged(self, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return cache, block tables (blocks in random order) and lengths."""
        table = self.block_table(rows, context)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=self.device)
        return self.cache(table.numel()), table, lengths

    def splits(self, rows: int, context: int) -> tuple[int, int]:
        """Return (splits, floats of workspace)."""
        s = self.sizes
        splits = choose_num_splits(
            rows, s.num_kv_heads, s.head_dim, self.dtype, context, self.num_sms
        )
        return splits, workspace_elements(rows, s.num_heads, s.head_dim, splits)

    def decode(self, rows: int, context: int) -> Case:
        s = self.sizes

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context)
            query = self.random(rows, s.num_heads, s.head_dim)
            splits, floats = self.splits(rows, context)
            workspace = torch.empty(floats, device=self.device)
            scale = 1 / math.sqrt(s.head_dim)
            return lambda: paged_attention_decode(
                query, cache, table, lengths, scale=scale, num_splits=splits, workspace=workspace
            )

        moved = rows * (context * s.kv + 2 * s.num_heads * s.head_dim) * self.item
        return Case(kernel="paged_attention_decode", shape=f"{rows} rows of {context}", bytes=moved,
                    make=make)  # fmt: skip

    def prefix(self, rows: int, shared: int) -> Case:
        s = self.sizes
        splits = prefix_splits(
            rows, s.num_heads, s.num_kv_heads, s.head_dim, self.dtype, self.num_sms
        )
        floats = prefix_elements(rows, s.num_heads, s.head_dim, splits)

        def make() -> Work:
            cache, table, lengths = self.paged(1, shared)
            query = self.random(rows, s.num_heads, s.head_dim)
            workspace = torch.empty(floats, device=self.device)
            scale = 1 / math.sqrt(s.head_dim)
            return lambda: attend_prefix(
                query, cache, table, lengths, scale=scale, num_splits=splits, workspace=workspace
            )

        queries = rows * s.num_heads * s.head_dim
        return Case(
            kernel="attend_prefix", shape=f"{rows} rows of {shared}",
            bytes=(shared * s.kv + queries) * self.item + 4 * rows * s.num_heads * (s.head_dim + 1),
            flops=4 * queries * shared, make=make,
        )  # fmt: skip

    def fused_decode(self, rows: int, context: int) -> Case:
        s = self.sizes

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context)
            qkv = self.random(rows, s.qkv)
            splits, floats = self.splits(rows, context)
            workspace = torch.empty(floats, device=self.device)
            counters = torch.zeros(rows * s.num_kv_heads, dtype=torch.int32, device=self.device)
            last = table[:, (context - 1) // BLOCK_SIZE].long()
            slots = last * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
            cos_sin = torch.randn(context, s.head_dim, device=self.device)
            norms = [(self.random(s.head_dim), EPS) for _ in range(2)]
            return lambda: fused_decode_attention(
                qkv, s.num_heads, s.num_kv_heads, cache, table, lengths, slots,
                scale=1 / math.sqrt(s.head_dim), counters=counters, workspace=workspace,
                num_splits=splits, cos_sin=cos_sin, query_norm=norms[0], key_norm=norms[1],
            )  # fmt: skip

        moved = rows * (context * s.kv + s.qkv + s.num_heads * s.head_dim) * self.item
        return Case(kernel="fused_decode_attention", shape=f"{rows} rows of {context}", bytes=moved,
                    make=make)  # fmt: skip

    def prefill(self, rows: int, prompt: int) -> Case:
        s = self.sizes

        def make() -> Work:
            cache, table, lengths = self.paged(rows, prompt)
            query = self.random(rows * prompt, s.num_heads, s.head_dim)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * prompt
            return lambda: paged_attention_prefill(
                query, cache, table, starts, lengths, scale=1 / math.sqrt(s.head_dim),
                max_query_len=prompt,
            )  # fmt: skip

        pairs = rows * prompt * (prompt + 1) / 2
        moved = rows * prompt * (s.kv + 2 * s.num_heads * s.head_dim) * self.item
        return Case(
            kernel="paged_attention_prefill", shape=f"{rows} rows of {prompt}", bytes=moved,
            flops=4 * s.num_heads * s.head_dim * pairs, make=make,
        )  # fmt: skip

    def decode_inputs(self, rows: int) -> Case:
        columns = 4096 // BLOCK_SIZE

        def make() -> Work:
            packed = torch.zeros(2, rows, dtype=torch.int32, device=self.device)
            packed[0] = torch.arange(rows)
            # All slots count as padding, so that no length grows from launch to launch.
            lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)[:1]
            history = torch.zeros(rows, 64, dtype=torch.int32, device=self.device)
            table = torch.zeros(rows, columns, dtype=torch.int32, device=self.device)
            rows_table = torch.zeros_like(table)
            return lambda: decode_inputs(packed, lengths, history, table, rows_table, BLOCK_SIZE)

        moved = rows * (2 * columns * 4 + 4 * 4 + 5 * 8 + 8)
        return Case(kernel="decode_inputs", shape=f"{rows} rows", bytes=moved, make=make)

    def sample_gumbel(self, rows: int) -> Case:
        vocab = self.sizes.vocab

        def make() -> Work:
            logits = self.random(rows, vocab)
            settings = torch.zeros(rows, NUM_COLUMNS, dtype=torch.int32)
            settings[:, Column.INVERSE_TEMPERATURE] = torch.tensor(1.25).view(torch.int32)
            settings[:, Column.NOISE] = torch.tensor(1.0).view(torch.int32)
            settings[:, Column.LANES :] = torch.from_numpy(seed_lanes(7))
            ready = settings.to(self.device)
            slots = torch.arange(rows, device=self.device)
            lengths = torch.full_like(slots, 3)
            history = torch.zeros(rows, 8, dtype=torch.int32, device=self.device)
            token_ids = torch.zeros(rows, dtype=torch.int32, device=self.device)
            return lambda: sample_gumbel(logits, ready, slots, lengths, history, token_ids)

        return Case(
            kernel="sample_gumbel", shape=f"{rows} x {vocab}", bytes=rows * vocab * self.item,
            make=make,
        )  # fmt: skip
