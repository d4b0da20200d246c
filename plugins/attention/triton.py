"""Attention on Triton kernels: split-KV decode and ragged prefill over the paged cache.

A step's leading one-token rows (a plan puts decode rows first) take the decode kernel, the rest the
prefill kernel, in whose tiles a decode row would waste most, with one program for a long context.
With few decode rows, one launch goes from the projection to the output.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

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
    from ...kernels.attention.fused_decode_attention import fused_decode_attention
    from ...kernels.attention.fused_decode_config import fits_registers
    from ...kernels.attention.levels import LevelRows
    from ...kernels.attention.paged_attention_prefill import has_hopper_kernel
    from ...kernels.attention.quantized_tiles import is_narrow
    from ...kernels.attention.shared_prefix import PrefixSums, prefix_elements, prefix_splits
    from .triton_call import LayerCall, layer_arguments, may_share, reads_prefix_once

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"

logger = logging.getLogger("jackfield.attention")

ROW_ELEMENTS = 8192
"""Tokens of a row, times heads of a group, times channels, for which the decode kernel's sums stay
in registers."""
WORKSPACE_TOKENS = 4
"""Tokens of a row for whose splits there is room; rows of more have fewer splits."""
MAX_GROUP = 128
MAX_HEAD_DIM = 512
MAX_WIDE_GROUP = 64
"""Most query heads that share a key head of over 256 channels."""
FUSED_PROGRAMS = 128
"""Most rows times kv heads of a fused decode launch: beyond, the plain kernel saves more than its
launches cost."""
LEAST_PREFIX = 256
"""Fewest tokens that rows share for which these are read once."""
PREFIX_BYTES = 64_000_000
"""Keys and values of all rows' prefixes from which on reading them once pays, in a layer: what
memory delivers while the launch for it runs."""
INTERPRETER_SMS = 8
"""Multiprocessors assumed in the interpreter, so that it also splits small batches."""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class TritonMetadata:
    """The layout, and the number of leading rows that the decode kernel takes."""

    layout: BatchLayout
    num_decode_rows: int


class Workspace(NamedTuple):
    """Buffers of the decode kernels for one head shape, for any number of rows."""

    floats: torch.Tensor
    counters: torch.Tensor
    """[max_num_seqs * num_kv_heads] int32 zeros"""
    prefix: torch.Tensor
    """Sums of what rows share."""


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
    portable: ClassVar[bool] = False
    """Whether prompts take the kernel for any GPU, on Hopper GPUs, too."""

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
        specs = [spec for spec in setup.layers if isinstance(spec, AttentionSpec)]
        shared = (spec.num_kv_heads * spec.head_dim for spec in specs if may_share(spec))
        self._token_bytes = 2 * setup.dtype.itemsize * max(shared, default=0)
        """Of keys and values in a layer that may read a shared prefix once; 0: there is none."""
        for size in sorted({spec.head_dim for spec in specs}):
            own = not self.portable and has_hopper_kernel(setup.dtype, size, device)
            kernel = "Hopper's asynchronous units over 16-bit caches" if own else "any GPU"
            logger.info("prompts with heads of %d channels take the kernel for %s", size, kernel)

    def build_metadata(self, layout: BatchLayout) -> TritonMetadata:
        rows = layout.num_rows
        if layout.mixed is not None:
            return TritonMetadata(layout, 0)
        if layout.decode_only and layout.num_tokens == rows:
            return TritonMetadata(layout, rows)
        longer = np.diff(layout.query_start_cpu[: rows + 1]) != 1
        decode_rows = int(np.argmax(longer)) if longer.any() else rows
        return TritonMetadata(layout, decode_rows)

    def least_shared_prefix(self, num_rows: int) -> int | None:
        """Choose it where a layer reads `PREFIX_BYTES` less."""
        if not self._token_bytes:
            return None
        return max(LEAST_PREFIX, PREFIX_BYTES // (num_rows * self._token_bytes))

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
        layout = metadata.layout
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        slopes = None if spec.alibi_slopes is None else self._slopes(spec.alibi_slopes)
        call = LayerCall(spec, query, kv_cache, layout, slopes, distance_bias, sinks, out)
        self.attend(call, metadata)
        return out

    def attend(self, call: LayerCall, metadata: TritonMetadata) -> None:
        """Launch the kernels of a step's rows."""
        layout, rows = metadata.layout, metadata.num_decode_rows
        if layout.levels is not None and sees_all(call.spec, self.max_model_len):
            return self._attend_leveled(call, metadata)
        if layout.mixed is not None:
            return self._attend_mixed(call, layout.mixed)
        if rows:
            call.decode(rows, *self._splits(call, rows), prefix=self._prefix(call, rows))
        if rows < layout.num_rows:
            num_tokens = int(layout.query_start_cpu[layout.num_rows]) - rows
            call.prefill(
                layout.max_query_len, first_row=rows, num_tokens=num_tokens, portable=self.portable
            )

    def _attend_leveled(self, call: LayerCall, metadata: TritonMetadata) -> None:
        """Attend to tokens in levels, too: one launch for rows of one token, and one for others. A
        recorded step with prompts takes one for all.
        """
        layout, rows = metadata.layout, metadata.num_decode_rows
        if layout.mixed is not None:
            return call.leveled(layout.max_query_len)
        if rows:
            num_splits, workspace = self._splits(call, rows)
            call.leveled(
                1, num_rows=rows, num_tokens=rows, num_splits=num_splits, workspace=workspace
            )
        if rows < layout.num_rows:
            call.leveled(
                layout.max_query_len, first_row=rows, num_rows=layout.num_rows - rows,
                num_tokens=int(layout.query_start_cpu[layout.num_rows]) - rows,
            )  # fmt: skip

    def _attend_mixed(self, call: LayerCall, mixed: MixedRows) -> None:
        """Launch both kernels over the maximum number of rows; each selects its rows on the device.

        They run in parallel: one is bound by memory, the other by products. Few rows of as many
        tokens each (drafts) take that of decode rows, which splits their keys.
        """
        layout, rows = call.layout, mixed.max_decode_rows
        if mixed.width and (num_splits := self._wide_splits(call, mixed.width)) > 1:
            workspace = self._workspace(call.spec, call.query.dtype).floats
            num_rows = layout.num_tokens // mixed.width
            return call.decode(num_rows, num_splits, workspace, width=mixed.width)

        def prompts() -> None:
            call.prefill(
                layout.max_query_len, num_tokens=layout.num_tokens, bounds=mixed.bounds,
                max_rows=mixed.max_prompt_rows, portable=self.portable,
            )  # fmt: skip

        if not rows:
            return prompts()
        with self._beside(prompts):
            prefix = self._prefix(call, rows, mixed.bounds)
            call.decode(
                rows, *self._splits(call, rows), query_start=layout.query_start, prefix=prefix
            )

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
        """Return None for other steps, and for partial rotations over quantized caches."""
        spec, kv_cache, layout = layer.spec, layer.kv_cache, metadata.layout
        rows = layout.num_rows
        if layout.mixed is not None or metadata.num_decode_rows != layout.num_tokens:
            return None
        rotates_all = cos_sin is None or cos_sin.shape[1] == spec.head_dim
        if isinstance(kv_cache, QuantizedCache) and not rotates_all:
            return None
        if rows * spec.num_kv_heads > FUSED_PROGRAMS:
            return None
        if reads_prefix_once(spec, kv_cache, layout):
            return None
        if not fits_registers(spec.num_heads // spec.num_kv_heads, spec.head_dim, qkv.dtype):
            return None
        query_ring = None
        if query_places is not None:
            assert layer.query_ring is not None, "queries are kept in a ring"
            query_ring = layer.query_ring, query_places
        arguments, levels = layer_arguments(spec), None
        if layout.levels is not None and sees_all(spec, self.max_model_len):
            assert layout.slots is not None, "as levels need them"
            levels = LevelRows(layout.levels.tokens, layout.levels.formats, layout.slots)
            # A window that long hides nothing; places in the cache are no distances.
            arguments |= {"sliding_window": None, "attention_chunk_size": None}
        workspace = self._workspace(spec, qkv.dtype)
        return fused_decode_attention(
            qkv,
            spec.num_heads,
            spec.num_kv_heads,
            kv_cache,
            layout.block_table,
            layout.seq_lens,
            layout.slot_mapping,
            **arguments,
            levels=levels,
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

    def _splits(self, call: LayerCall, rows: int) -> tuple[int, torch.Tensor]:
        """Return the number of splits of the first `rows` rows, and the space of their sums."""
        narrow = is_narrow(call.kv_cache)
        num_splits = self._num_splits(call.spec, rows, call.query.dtype, narrow)
        return num_splits, self._workspace(call.spec, call.query.dtype).floats

    def _num_splits(self, spec: AttentionSpec, rows: int, dtype: torch.dtype, narrow: bool) -> int:
        longest, reach = self.max_model_len, spec.reach
        if reach is not None:
            longest = min(longest, reach.most_tokens)
        return choose_num_splits(
            rows, spec.num_kv_heads, spec.head_dim, dtype, longest, self.num_sms, narrow
        )

    def _prefix(
        self, call: LayerCall, rows: int, bounds: torch.Tensor | None = None
    ) -> PrefixSums | None:
        """Attend to what the first `rows` rows share, or bounds[0] of them; None: each reads it."""
        if not reads_prefix_once(call.spec, call.kv_cache, call.layout):
            return None
        num_splits = self._prefix_splits(call.spec, rows, call.query.dtype)
        workspace = self._workspace(call.spec, call.query.dtype).prefix
        return call.shared_prefix(rows, num_splits, workspace, bounds)

    def _prefix_splits(self, spec: AttentionSpec, rows: int, dtype: torch.dtype) -> int:
        return prefix_splits(
            rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype, self.num_sms
        )

    def _wide_splits(self, call: LayerCall, width: int) -> int:
        """Return into how many splits rows of `width` tokens divide their keys; 1: prompts' kernel
        serves them as well, or has the registers that they need."""
        spec, tokens = call.spec, call.layout.num_tokens
        if width * (spec.num_heads // spec.num_kv_heads) * spec.head_dim > ROW_ELEMENTS:
            return 1
        num_splits, workspace = self._splits(call, tokens // width)
        each = workspace_elements(tokens, spec.num_heads, spec.head_dim, 2) // 2
        return min(num_splits, workspace.numel() // each)

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
            needed *= WORKSPACE_TOKENS
            counters = self.max_num_seqs * spec.num_kv_heads
            shared = max(
                prefix_elements(rows, *sizes, self._prefix_splits(spec, rows, dtype))
                for rows in range(1, self.max_num_seqs + 1)
            )
            workspace = Workspace(
                torch.empty(needed, dtype=torch.float32, device=self.device),
                torch.zeros(counters, dtype=torch.int32, device=self.device),
                torch.empty(shared, dtype=torch.float32, device=self.device),
            )
            self._workspaces[shape] = workspace
        return workspace
