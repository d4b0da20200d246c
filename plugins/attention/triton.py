"""Attention on Triton kernels: split-KV decode and ragged prefill over the paged cache.

A step's leading one-token rows (a plan puts decode rows first) take the decode kernel, the rest the
prefill kernel, in whose tiles a decode row would waste most, with one program for a long context.
With few decode rows, one launch goes from the projection to the output.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.cache.formats import QUANTIZED_FORMATS
from ...core.nn.context import BatchLayout, MixedRows
from ...core.nn.kv_cache.quantized_cache import KVCache, QuantizedCache
from ...core.nn.operations import Norm
from ...core.protocols.attention import (
    AttentionBackend,
    AttentionSpec,
    BackendSetup,
    ProjectedLayer,
    Projection,
)
from .torch_levels import sees_all

try:
    from ...kernels.attention.decode_splits import choose_num_splits, workspace_elements
    from ...kernels.attention.fused_decode_attention import fits_registers, fused_decode_attention
    from ...kernels.attention.leveled_attention import leveled_attention
    from ...kernels.attention.paged_attention_decode import paged_attention_decode
    from ...kernels.attention.paged_attention_prefill import paged_attention_prefill
    from ...kernels.attention.quantized_tiles import is_narrow

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"

MAX_GROUP = 128
MAX_HEAD_DIM = 512
MAX_WIDE_GROUP = 64
"""Most query heads that share a key head of over 256 channels."""
DENSE_TOKENS = 2048
"""Number of tokens from which a row with nothing cached uses torch's dense attention (cuDNN)."""
DENSE_STEP, DENSE_ROWS = 6144, 4
"""Fewest tokens, and most rows, of steps that are launched instead of replayed for it: recorded
steps use our kernel for all rows."""
FUSED_PROGRAMS = 128
"""Most rows times kv heads of a fused decode launch: beyond, the plain kernel saves more than its
launches cost."""
INTERPRETER_SMS = 8
"""Multiprocessors assumed in the interpreter, so that it also splits small batches."""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class TritonMetadata:
    """The layout, and the kernel of each row."""

    layout: BatchLayout
    num_decode_rows: int
    runs: tuple[Run, ...]


class Run(NamedTuple):
    """Rows [first_row, end_row), tokens [first_token, end_token)."""

    first_row: int
    end_row: int
    first_token: int
    end_token: int
    max_query_len: int
    fresh: bool
    """Long rows of one length with nothing cached."""


class Workspace(NamedTuple):
    """Buffers of the decode kernels for one head shape, for any number of rows."""

    floats: torch.Tensor
    counters: torch.Tensor
    """[max_num_seqs * num_kv_heads] int32 zeros"""


class TritonAttention(AttentionBackend):
    """`AttentionBackend` on this project's Triton kernels.

    Decode-only batches may be captured in a CUDA graph: launches depend only on the number of rows,
    and each head shape has one workspace.
    """

    name: ClassVar[str] = "triton"
    features: ClassVar[frozenset[str]] = frozenset(
        {
            "sliding_window",
            "attention_chunk_size",
            "chunk_lookback",
            "soft_cap",
            "alibi_slopes",
            "sinks",
            "distance_bias",
            "key_scale",
            "value_scale",
        }
    )
    graph_safe: ClassVar[bool] = True
    mixed_graph_safe: ClassVar[bool] = True
    fp8_cache: ClassVar[bool] = True
    cache_formats: ClassVar[frozenset[str]] = frozenset(QUANTIZED_FORMATS)
    cache_groups: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = True
    leveled_cache: ClassVar[bool] = True
    bounded_lengths: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        if _MISSING is not None:
            return _MISSING
        if device.type != "cuda" and not _interpreted():
            return "it needs a CUDA device"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        if dtype == torch.bfloat16 and _interpreted():
            return "Triton's interpreter has no bfloat16 products"
        if spec.num_heads % spec.num_kv_heads:
            return (
                f"num_heads ({spec.num_heads}) is no multiple of num_kv_heads ({spec.num_kv_heads})"
            )
        if spec.distance_bias and spec.alibi_slopes is not None:
            return "it has distance_bias in place of alibi_slopes"
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return f"more than {MAX_GROUP} query heads share a key head"
        if not 1 <= spec.head_dim <= MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is over {MAX_HEAD_DIM}"
        if spec.head_dim > 256 and spec.num_heads // spec.num_kv_heads > MAX_WIDE_GROUP:
            return f"more than {MAX_WIDE_GROUP} heads of {spec.head_dim} channels share a key head"
        return None

    def __init__(self, setup: BackendSetup) -> None:
        device = self.device = setup.device
        self.max_num_seqs = setup.max_num_seqs
        self.max_model_len = setup.max_model_len
        self.num_sms = INTERPRETER_SMS
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspaces: dict[tuple[int, int, int], Workspace] = {}
        self._slope_tensors: dict[tuple[float, ...], torch.Tensor] = {}
        self._side_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._dense = device.type == "cuda" and setup.dtype != torch.float32

    def build_metadata(self, layout: BatchLayout) -> TritonMetadata:
        rows = layout.num_rows
        if layout.mixed is not None:
            return TritonMetadata(layout, 0, ())
        if layout.decode_only and layout.num_tokens == rows:
            return TritonMetadata(layout, rows, ())
        starts = layout.query_start_cpu[: rows + 1]
        lengths = np.diff(starts)
        longer = lengths != 1
        decode_rows = int(np.argmax(longer)) if longer.any() else rows
        fresh = (lengths >= DENSE_TOKENS) & (layout.seq_lens_cpu[:rows] == lengths) & self._dense
        runs: list[Run] = []
        first = decode_rows
        for row in [*(np.flatnonzero(fresh[decode_rows:]) + decode_rows).tolist(), rows]:
            if first < row:
                most = int(lengths[first:row].max())
                runs.append(Run(first, row, int(starts[first]), int(starts[row]), most, False))
            if row < rows:
                begin, end = int(starts[row]), int(starts[row + 1])
                run = Run(row, row + 1, begin, end, end - begin, True)
                if runs and runs[-1].fresh and runs[-1].max_query_len == run.max_query_len:
                    before = runs.pop()
                    run = run._replace(first_row=before.first_row, first_token=before.first_token)
                runs.append(run)
            first = row + 1
        return TritonMetadata(layout, decode_rows, tuple(runs))

    def prefers_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Prefer it for large steps of long prompts alone, which torch's dense attention takes."""
        if not self._dense or len(query_lens) > DENSE_ROWS:
            return False
        fresh = (query_lens >= DENSE_TOKENS) & (seq_lens == query_lens)
        return int(query_lens[fresh].sum()) >= DENSE_STEP

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        metadata: TritonMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout, rows = metadata.layout, metadata.num_decode_rows
        if layout.levels is not None and sees_all(spec, self.max_model_len):
            return self._forward_leveled(spec, query, key, value, kv_cache, metadata, sinks)
        if layout.mixed is not None:
            return self._forward_mixed(
                spec, query, kv_cache, layout, layout.mixed, sinks, distance_bias
            )
        if len(metadata.runs) == 1 and not rows and _takes_dense(spec, metadata.runs[0]):
            return _dense(spec, query, key, value, metadata.runs[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        slopes = None if spec.alibi_slopes is None else self._slopes(spec.alibi_slopes)
        if rows:
            paged_attention_decode(
                query[:rows],
                kv_cache,
                layout.block_table,
                layout.seq_lens,
                **layer_arguments(spec),
                alibi_slopes=slopes,
                distance_bias=distance_bias,
                sinks=sinks,
                num_splits=self._num_splits(spec, rows, query.dtype, is_narrow(kv_cache)),
                workspace=self._workspace(spec, query.dtype).floats,
                out=out[:rows],
            )
        for run in metadata.runs:
            tokens = slice(run.first_token, run.end_token)
            if _takes_dense(spec, run):
                out[tokens] = _dense(spec, query[tokens], key[tokens], value[tokens], run)
                continue
            paged_attention_prefill(
                query,
                kv_cache,
                layout.block_table,
                layout.query_start,
                layout.seq_lens[: run.end_row],
                **layer_arguments(spec),
                max_query_len=run.max_query_len,
                alibi_slopes=slopes,
                distance_bias=distance_bias,
                sinks=sinks,
                first_row=run.first_row,
                num_tokens=run.end_token - run.first_token,
                out=out,
            )
        return out

    def _forward_leveled(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        metadata: TritonMetadata,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to tokens in levels, too: one launch for rows of one token, and one for others. A
        recorded step with prompts takes one for all.
        """
        layout, out = (
            metadata.layout,
            torch.empty(query.shape, dtype=query.dtype, device=query.device),
        )
        assert layout.levels is not None and layout.slots is not None, "as levels need them"
        assert isinstance(kv_cache, torch.Tensor), "levels are of caches in the model's type"

        def attend(max_query_len: int, **rows: Any) -> None:
            assert layout.levels is not None and layout.slots is not None
            leveled_attention(
                query, kv_cache, layout.block_table, layout.query_start, layout.seq_lens,
                layout.levels.tokens, layout.levels.formats, layout.slots, scale=spec.scale,
                max_query_len=max_query_len, soft_cap=spec.soft_cap, sinks=sinks, out=out, **rows,
            )  # fmt: skip

        if layout.mixed is not None:
            attend(layout.max_query_len)
            return out
        if rows := metadata.num_decode_rows:
            splits = self._num_splits(spec, rows, query.dtype, narrow=False)
            workspace = self._workspace(spec, query.dtype).floats
            attend(1, num_rows=rows, num_tokens=rows, num_splits=splits, workspace=workspace)
        for run in metadata.runs:
            tokens = slice(run.first_token, run.end_token)
            # Nothing is cached of fresh rows, in levels or not.
            if _takes_dense(spec, run):
                out[tokens] = _dense(spec, query[tokens], key[tokens], value[tokens], run)
                continue
            attend(
                run.max_query_len, first_row=run.first_row, num_rows=run.end_row - run.first_row,
                num_tokens=run.end_token - run.first_token,
            )  # fmt: skip
        return out

    def _forward_mixed(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        layout: BatchLayout,
        mixed: MixedRows,
        sinks: torch.Tensor | None,
        distance_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launch both kernels over the maximum number of rows; each selects its rows on the device.

        They run in parallel: one is bound by memory, the other by products.
        """
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        slopes = None if spec.alibi_slopes is None else self._slopes(spec.alibi_slopes)

        def prompts() -> None:
            paged_attention_prefill(
                query,
                kv_cache,
                layout.block_table,
                layout.query_start,
                layout.seq_lens,
                **layer_arguments(spec),
                max_query_len=layout.max_query_len,
                alibi_slopes=slopes,
                distance_bias=distance_bias,
                sinks=sinks,
                num_tokens=layout.num_tokens,
                out=out,
                bounds=mixed.bounds,
                max_rows=mixed.max_prompt_rows,
            )

        rows = mixed.max_decode_rows
        if not rows:
            prompts()
            return out
        with self._beside(prompts):
            paged_attention_decode(
                query[:rows],
                kv_cache,
                layout.block_table,
                layout.seq_lens,
                **layer_arguments(spec),
                alibi_slopes=slopes,
                distance_bias=distance_bias,
                sinks=sinks,
                num_splits=self._num_splits(spec, rows, query.dtype, is_narrow(kv_cache)),
                workspace=self._workspace(spec, query.dtype).floats,
                out=out[:rows],
                query_start=layout.query_start,
            )
        return out

    @contextlib.contextmanager
    def _beside(self, work: Callable[[], None]) -> Iterator[None]:
        """Enqueue `work`, and the context's launches in parallel on another stream."""
        if self._side_stream is None:
            work()
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        self._side_stream.wait_stream(stream)
        work()
        with torch.cuda.stream(self._side_stream):
            yield
        stream.wait_stream(self._side_stream)

    def plan_projection(self, layer: ProjectedLayer) -> Projection | None:
        """Plan decode steps of few rows, in one launch each."""
        return None if layer.spec.head_dim % 2 else self._fused_decode

    def _fused_decode(
        self,
        layer: ProjectedLayer,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        metadata: TritonMetadata,
        query_places: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return None for other steps, for partial rotations over quantized caches, and with tokens
        in levels.
        """
        spec, kv_cache, layout = layer.spec, layer.kv_cache, metadata.layout
        rows = layout.num_rows
        if layout.mixed is not None or metadata.num_decode_rows != layout.num_tokens:
            return None
        if layout.levels is not None and sees_all(spec, self.max_model_len):
            return None
        rotates_all = cos_sin is None or cos_sin.shape[1] == spec.head_dim
        if isinstance(kv_cache, QuantizedCache) and not rotates_all:
            return None
        if rows * spec.num_kv_heads > FUSED_PROGRAMS:
            return None
        if not fits_registers(spec.num_heads // spec.num_kv_heads, spec.head_dim, qkv.dtype):
            return None
        query_ring = None
        if query_places is not None:
            assert layer.query_ring is not None, "queries are kept in a ring"
            query_ring = layer.query_ring, query_places
        workspace = self._workspace(spec, qkv.dtype)
        return fused_decode_attention(
            qkv,
            spec.num_heads,
            spec.num_kv_heads,
            kv_cache,
            layout.block_table,
            layout.seq_lens,
            layout.slot_mapping,
            **layer_arguments(spec),
            counters=workspace.counters,
            workspace=workspace.floats,
            num_splits=self._num_splits(spec, rows, qkv.dtype, is_narrow(kv_cache)),
            cos_sin=cos_sin,
            query_norm=query_norm,
            key_norm=key_norm,
            alibi_slopes=None if spec.alibi_slopes is None else self._slopes(spec.alibi_slopes),
            positions=layout.positions if positions is None else positions,
            query_ring=query_ring,
            norm_last=layer.norm_last,
            next_weights=layer.next_weights,
        )

    def _slopes(self, slopes: tuple[float, ...]) -> torch.Tensor:
        """[num_heads] float32, created once: captured graphs hold its address."""
        slopes_tensor = self._slope_tensors.get(slopes)
        if slopes_tensor is None:
            slopes_tensor = torch.tensor(slopes, dtype=torch.float32, device=self.device)
            self._slope_tensors[slopes] = slopes_tensor
        return slopes_tensor

    def _num_splits(self, spec: AttentionSpec, rows: int, dtype: torch.dtype, narrow: bool) -> int:
        longest, reach = self.max_model_len, spec.reach
        if reach is not None:
            longest = min(longest, reach.most_tokens)
        return choose_num_splits(
            rows, spec.num_kv_heads, spec.head_dim, dtype, longest, self.num_sms, narrow
        )

    def _workspace(self, spec: AttentionSpec, dtype: torch.dtype) -> Workspace:
        """Return the workspace, created once: captured graphs hold its addresses."""
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        workspace = self._workspaces.get(shape)
        if workspace is None:
            # Window and chunks are ignored: layers of the same head shape share this.
            free = AttentionSpec(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.scale,
            )
            splits = [
                (rows, self._num_splits(free, rows, dtype, narrow))
                for rows in range(1, self.max_num_seqs + 1)
                for narrow in (False, True)
            ]
            sizes = (spec.num_heads, spec.head_dim)
            needed = max(workspace_elements(rows, *sizes, number) for rows, number in splits)
            counters = self.max_num_seqs * spec.num_kv_heads
            workspace = Workspace(
                torch.empty(needed, dtype=torch.float32, device=self.device),
                torch.zeros(counters, dtype=torch.int32, device=self.device),
            )
            self._workspaces[shape] = workspace
        return workspace


def layer_arguments(spec: AttentionSpec) -> dict[str, Any]:
    """Return the arguments of a layer that all kernels take."""
    return {
        "scale": spec.scale,
        "sliding_window": spec.sliding_window,
        "attention_chunk_size": spec.attention_chunk_size,
        "chunk_lookback": spec.chunk_lookback,
        "soft_cap": spec.soft_cap,
        "cache_scales": (spec.key_scale, spec.value_scale),
    }


def _takes_dense(spec: AttentionSpec, run: Run) -> bool:
    reach = spec.reach
    return (
        run.fresh
        and spec.features <= {"sliding_window", "attention_chunk_size", "chunk_lookback"}
        and (reach is None or reach.most_tokens >= run.max_query_len)
        and spec.head_dim % 8 == 0
        and spec.head_dim <= 128
    )


def _dense(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Run,
) -> torch.Tensor:
    """Compute whole rows of one length with cuDNN's kernel, which is faster from some thousand
    tokens on.

    query: [rows * tokens, num_heads, head_dim]; key, value: [rows * tokens, num_kv_heads, head_dim]
    """
    rows = run.end_row - run.first_row
    queries, keys, values = (
        part.view(rows, run.max_query_len, *part.shape[1:]).transpose(1, 2)
        for part in (query, key, value)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out: torch.Tensor = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
    return out.transpose(1, 2).flatten(0, 1)
