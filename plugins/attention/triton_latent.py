"""Latent attention on Triton kernels: split-KV decode of absorbed queries, expanded prompts.

A step's leading one-token rows take the decode kernel. The others take two: one attends to tokens
of earlier steps, absorbed; the other continues with the step's own tokens, with full keys and
values.

With tokens chosen by an indexer, the decode kernel takes every query as a row whose blocks are the
chosen slots, of one token each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...core.nn.context import BatchLayout
from ...core.nn.kv_cache.level_cache import latent_group
from ...core.protocols.attention import BackendSetup
from ...core.protocols.latent_attention import (
    ChosenTokens,
    LatentAttentionBackend,
    LatentAttentionSpec,
)

try:
    from ...kernels.attention.latent.head_matmul import MAX_TOKENS, head_matmul
    from ...kernels.attention.latent.latent_context import latent_context
    from ...kernels.attention.latent.latent_decode import (
        choose_latent_splits,
        latent_decode,
        latent_workspace,
    )
    from ...kernels.attention.latent.latent_prompt import latent_prompt
    from ...kernels.attention.levels import LevelRows

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"

MAX_LATENT, MAX_HEAD = 512, 256
"""Largest latents, and parts of a head's key and value, that fit in a program's shared memory."""
LAUNCHED_ROWS, LAUNCHED_TOKENS = 8, 2048
"""Most rows, and fewest tokens, of steps of whole prompts that are launched instead of replayed.
Estimates: the device should then take longer than the host's launches."""
INTERPRETER_SMS = 8
"""Multiprocessors assumed in the interpreter, so that it also splits small batches."""


@dataclass(frozen=True)
class TritonLatentMetadata:
    """The layout, and the kernels that its rows need; undefined in a recorded step with prompts."""

    layout: BatchLayout
    num_decode_rows: int
    max_query_len: int
    """Tokens of the longest other row."""
    has_context: bool
    """Whether another row has earlier tokens."""


class TritonLatentAttention(LatentAttentionBackend):
    """`LatentAttentionBackend` on this project's Triton kernels.

    Steps may be captured in a CUDA graph: launches depend only on the numbers of rows and tokens.
    """

    name: ClassVar[str] = "triton"
    features: ClassVar[frozenset[str]] = frozenset({"index_topk"})
    graph_safe: ClassVar[bool] = True
    mixed_graph_safe: ClassVar[bool] = True
    cache_groups: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = True
    leveled_cache: ClassVar[bool] = True
    bounded_lengths: ClassVar[bool] = True

    @classmethod
    def supports(
        cls, spec: LatentAttentionSpec, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if _MISSING is not None:
            return _MISSING
        if device.type != "cuda" and not interpreted:
            return "it needs a CUDA device"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        if dtype == torch.bfloat16 and interpreted:
            return "Triton's interpreter has no bfloat16 products"
        if not 1 <= spec.latent_dim <= MAX_LATENT:
            return f"latent_dim {spec.latent_dim} is over {MAX_LATENT}"
        if max(spec.rope_dim, spec.nope_dim, spec.value_dim) > MAX_HEAD:
            return f"a part of a head has over {MAX_HEAD} channels"
        return None

    def __init__(self, setup: BackendSetup) -> None:
        device = self.device = setup.device
        self.max_num_seqs = setup.max_num_seqs
        self.max_num_tokens = max(setup.max_num_seqs, setup.max_num_batched_tokens)
        self.max_model_len = setup.max_model_len
        self.num_sms = INTERPRETER_SMS
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspaces: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def build_metadata(self, layout: BatchLayout) -> TritonLatentMetadata:
        rows = layout.num_rows
        if layout.mixed is not None:
            return TritonLatentMetadata(layout, 0, layout.max_query_len, True)
        if layout.decode_only and layout.num_tokens == rows:
            return TritonLatentMetadata(layout, rows, 0, False)
        lengths = np.diff(layout.query_start_cpu[: rows + 1])
        longer = lengths != 1
        first = int(np.argmax(longer)) if longer.any() else rows
        contexts = layout.seq_lens_cpu[first:rows] > lengths[first:]
        longest = int(lengths[first:].max(initial=0))
        return TritonLatentMetadata(layout, first, longest, bool(contexts.any()))

    def prefers_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Prefer it for large steps of whole prompts: a recorded step absorbs them, too."""
        longer = query_lens > 1
        fresh = bool((seq_lens == query_lens)[longer].all())
        few = len(query_lens) <= LAUNCHED_ROWS
        return few and fresh and int(query_lens.sum()) >= LAUNCHED_TOKENS

    def forward(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        metadata: TritonLatentMetadata,
        *,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        if chosen is not None:
            return self._chosen(spec, query, up, cache, chosen)
        layout, rows = metadata.layout, metadata.num_decode_rows
        mixed = layout.mixed
        if mixed is not None:
            rows = mixed.max_decode_rows
        tokens = query.shape[0]
        out = query.new_empty(tokens, spec.num_heads, spec.value_dim)
        lse: torch.Tensor | None = None
        absorbing = tokens if metadata.has_context else rows
        if absorbing:
            own, turned = query[:absorbing].split_with_sizes([spec.nope_dim, spec.rope_dim], dim=-1)
            absorbed = _head_products(own, up[:, : spec.nope_dim])
            sums = torch.empty_like(absorbed, memory_format=torch.contiguous_format)
            if rows:
                self._decode(spec, absorbed[:rows], turned[:rows], cache, layout, sums[:rows])
            if metadata.has_context:
                lse = query.new_empty(tokens, spec.num_heads, dtype=torch.float32)
                latent_context(
                    absorbed,
                    turned,
                    cache,
                    layout.block_table,
                    layout.query_start,
                    layout.seq_lens,
                    scale=spec.scale,
                    out=sums,
                    lse=lse,
                    first_row=rows,
                    num_tokens=tokens if mixed is not None else tokens - rows,
                    bounds=None if mixed is None else mixed.bounds,
                    max_rows=0 if mixed is None else mixed.max_prompt_rows,
                    **_levels(spec, layout),
                )
            # Sums of tokens without a context are undefined: products of others do not see them.
            _head_products(sums, up[:, spec.nope_dim :].mT, out[:absorbing])
        if mixed is not None or tokens > rows:
            vectors, shared = latent.split_with_sizes([spec.latent_dim, spec.rope_dim], dim=-1)
            expanded = F.linear(vectors, up.flatten(0, 1)).view(tokens, spec.num_heads, -1)
            latent_prompt(
                query,
                expanded,
                shared,
                layout.query_start,
                scale=spec.scale,
                max_query_len=metadata.max_query_len,
                out=out,
                lse=lse,
                first_row=rows,
                num_tokens=tokens if mixed is not None else tokens - rows,
                num_rows=layout.num_rows - rows,
                bounds=None if mixed is None else mixed.bounds,
                max_rows=0 if mixed is None else mixed.max_prompt_rows,
            )
        return out

    def _chosen(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        chosen: ChosenTokens,
    ) -> torch.Tensor:
        own, turned = query.split_with_sizes([spec.nope_dim, spec.rope_dim], dim=-1)
        absorbed = _head_products(own, up[:, : spec.nope_dim])
        sums = torch.empty_like(absorbed, memory_format=torch.contiguous_format)
        latent_decode(
            absorbed,
            turned,
            cache.view(-1, 1, spec.cache_dim),
            chosen.slots,
            chosen.counts,
            scale=spec.scale,
            num_splits=self._chosen_splits(spec, len(query), query.dtype),
            workspace=self._workspace(spec, query.dtype),
            out=sums,
        )
        out = query.new_empty(len(query), spec.num_heads, spec.value_dim)
        return _head_products(sums, up[:, spec.nope_dim :].mT, out)

    def _decode(
        self,
        spec: LatentAttentionSpec,
        absorbed: torch.Tensor,
        turned: torch.Tensor,
        cache: torch.Tensor,
        layout: BatchLayout,
        out: torch.Tensor,
    ) -> None:
        latent_decode(
            absorbed,
            turned,
            cache,
            layout.block_table,
            layout.seq_lens,
            scale=spec.scale,
            num_splits=self._num_splits(spec, len(absorbed), absorbed.dtype),
            workspace=self._workspace(spec, absorbed.dtype),
            out=out,
            query_start=None if layout.mixed is None else layout.query_start,
            **_levels(spec, layout),
        )

    def _num_splits(self, spec: LatentAttentionSpec, rows: int, dtype: torch.dtype) -> int:
        return choose_latent_splits(
            rows, spec.num_heads, spec.latent_dim, dtype, self.max_model_len, self.num_sms
        )

    def _chosen_splits(self, spec: LatentAttentionSpec, tokens: int, dtype: torch.dtype) -> int:
        longest = min(spec.index_topk or self.max_model_len, self.max_model_len)
        return choose_latent_splits(
            tokens, spec.num_heads, spec.latent_dim, dtype, longest, self.num_sms
        )

    def _workspace(self, spec: LatentAttentionSpec, dtype: torch.dtype) -> torch.Tensor:
        """Return the workspace, created once: captured graphs hold its address."""
        shape = (spec.num_heads, spec.latent_dim)
        key = (*shape, spec.index_topk)
        if key not in self._workspaces:
            splits = [
                (rows, self._num_splits(spec, rows, dtype))
                for rows in range(1, self.max_num_seqs + 1)
            ]
            if spec.index_topk is not None:
                splits += [
                    (tokens, self._chosen_splits(spec, tokens, dtype))
                    for tokens in range(1, self.max_num_tokens + 1)
                ]
            needed = max(latent_workspace(rows, *shape, number) for rows, number in splits)
            self._workspaces[key] = torch.empty(needed, dtype=torch.float32, device=self.device)
        return self._workspaces[key]


def _levels(spec: LatentAttentionSpec, layout: BatchLayout) -> dict[str, Any]:
    """Return what kernels need for tokens in levels."""
    if layout.levels is None:
        return {}
    assert layout.slots is not None, "as levels need them"
    rows = LevelRows(layout.levels.tokens, layout.levels.formats, layout.slots)
    return {"levels": rows, "channels": latent_group(spec.latent_dim, spec.rope_dim)}


def _head_products(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_tokens, num_heads, in_dim], [num_heads, in_dim, out_dim] → [num_tokens, num_heads,
    out_dim]"""
    if x.shape[0] <= MAX_TOKENS:
        return head_matmul(x, weight, out)
    if out is not None:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
