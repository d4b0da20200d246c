"""Latent attention in plain torch: the reference backend, for any device.

Rows of one token (decode) are absorbed: `up` is applied to queries and results instead of to every
cached token, so that a gathered latent is both key and value of all heads. Rows of several tokens
(prompts) are expanded: keys and values of all their tokens, cached ones too, are made from the
latents, for as many heads at once as memory allows. Where an indexer has chosen what queries read,
all rows are absorbed. No device value is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...core.nn.context import BatchLayout
from ...core.nn.kv_cache.level_cache import latent_group
from ...core.protocols.attention import BackendSetup
from ...core.protocols.latent_attention import (
    ChosenTokens,
    LatentAttentionBackend,
    LatentAttentionSpec,
)
from .torch_levels import level_tokens

ELEMENTS = 1 << 25
"""Most gathered, expanded or score elements at once: bounds a step's memory."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LatentMetadata:
    layout: BatchLayout
    starts: list[int]
    seq_lens: list[int]


class TorchLatentAttention(LatentAttentionBackend):
    """`LatentAttentionBackend` on torch operations alone. Scores and sums are float32."""

    name: ClassVar[str] = "torch"
    features: ClassVar[frozenset[str]] = frozenset({"index_topk"})
    cache_groups: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = True
    leveled_cache: ClassVar[bool] = True
    bounded_lengths: ClassVar[bool] = True

    @classmethod
    def supports(
        cls, spec: LatentAttentionSpec, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """None when it can serve this layer here, else the reason."""
        if dtype not in DTYPES:
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        return None

    def __init__(self, setup: BackendSetup) -> None:
        self.block_size = setup.block_size

    def build_metadata(self, layout: BatchLayout) -> LatentMetadata:
        """Build the layout as Python numbers, once per step. Waits for the device if only that
        knows the lengths."""
        seq_lens = layout.seq_lens if layout.bounded else np.asarray(layout.seq_lens_cpu)
        return LatentMetadata(
            layout=layout,
            starts=np.asarray(layout.query_start_cpu)[: layout.num_rows + 1].tolist(),
            seq_lens=seq_lens[: layout.num_rows].tolist(),
        )

    def forward(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        metadata: LatentMetadata,
        *,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, key_dim] → [num_tokens, num_heads, value_dim]"""
        if chosen is not None:
            return self._chosen(spec, query, up, cache, chosen)
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.value_dim)
        starts, rows = metadata.starts, metadata.layout.num_rows
        if metadata.layout.levels is not None:
            for row, latents in enumerate(_leveled(spec, cache, metadata, self.block_size)):
                self._prompt(spec, query, up, latents, metadata, row, out)
            return out
        single = [row for row in range(rows) if starts[row + 1] - starts[row] == 1]
        for run in self._runs(spec, single, metadata.seq_lens):
            self._decode(spec, query, up, cache, metadata, run, out)
        for row in range(rows):
            if starts[row + 1] - starts[row] > 1:
                seq_len = metadata.seq_lens[row]
                blocks = metadata.layout.block_table[row, : -(-seq_len // self.block_size)].long()
                latents = cache[blocks].flatten(0, 1)[:seq_len]
                self._prompt(spec, query, up, latents, metadata, row, out)
        return out

    def _runs(
        self, spec: LatentAttentionSpec, rows: list[int], seq_lens: list[int]
    ) -> list[list[int]]:
        """Split rows into runs whose padded gathers are small enough."""
        runs: list[list[int]] = []
        longest = 0
        for row in rows:
            longest = max(longest, seq_lens[row])
            if runs and (len(runs[-1]) + 1) * longest * spec.cache_dim <= ELEMENTS:
                runs[-1].append(row)
            else:
                runs.append([row])
                longest = seq_lens[row]
        return runs

    def _decode(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        metadata: LatentMetadata,
        rows: list[int],
        out: torch.Tensor,
    ) -> None:
        layout, device = metadata.layout, query.device
        columns = -(-max(metadata.seq_lens[row] for row in rows) // self.block_size)
        index = torch.tensor(rows, device=device)
        tokens = torch.tensor([metadata.starts[row] for row in rows], device=device)
        gathered = cache[layout.block_table[index, :columns].long()].flatten(1, 2)
        out[tokens] = _absorbed(spec, query[tokens], up, gathered, layout.seq_lens[index])

    def _chosen(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        chosen: ChosenTokens,
    ) -> torch.Tensor:
        """Attend to the chosen tokens, gathered for as many queries at once as memory allows."""
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        tokens = cache.flatten(0, 1)
        width = max(1, ELEMENTS // (chosen.slots.shape[1] * spec.cache_dim))
        for begin in range(0, len(query), width):
            part = slice(begin, begin + width)
            gathered = tokens[chosen.slots[part].long()]
            out[part] = _absorbed(spec, query[part], up, gathered, chosen.counts[part])
        return out

    def _prompt(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        up: torch.Tensor,
        latents: torch.Tensor,
        metadata: LatentMetadata,
        row: int,
        out: torch.Tensor,
    ) -> None:
        """Attend for one row, whose queries are the last positions of its sequence. latents:
        [tokens, cache_dim], all that it has
        """
        first, end = metadata.starts[row], metadata.starts[row + 1]
        seq_len = len(latents)
        latents = latents.to(query.dtype)
        latent, shared = latents.split_with_sizes([spec.latent_dim, spec.rope_dim], dim=-1)
        positions = torch.arange(seq_len, device=query.device)
        per_head = seq_len * max(spec.key_dim + spec.value_dim, end - first)
        step = max(ELEMENTS // per_head, 1)
        pieces = max(1, per_head // ELEMENTS)
        width = -(-(end - first) // pieces)
        for head in range(0, spec.num_heads, step):
            heads = slice(head, min(head + step, spec.num_heads))
            expanded = torch.einsum("sl,hdl->hsd", latent, up[heads])
            key, value = expanded.split_with_sizes([spec.nope_dim, spec.value_dim], dim=-1)
            key = torch.cat([key, shared.expand(len(key), -1, -1)], dim=-1).float()
            for begin in range(first, end, width):
                stop = min(begin + width, end)
                queries = query[begin:stop, heads].transpose(0, 1).float()
                scores = queries @ key.mT * spec.scale
                own = positions[seq_len - (end - begin) : seq_len - (end - stop), None]
                weights = scores.masked_fill(positions > own, -torch.inf).softmax(dim=-1)
                attended = (weights @ value.float()).to(query.dtype)
                out[begin:stop, heads] = attended.transpose(0, 1)


def _leveled(
    spec: LatentAttentionSpec, cache: torch.Tensor, metadata: LatentMetadata, block_size: int
) -> Iterator[torch.Tensor]:
    """Yield what each row has cached, in levels and after them, [tokens, cache_dim]."""
    layout = metadata.layout
    assert layout.levels is not None and layout.slots is not None, "as levels need them"
    width = latent_group(spec.latent_dim, spec.rope_dim)
    part = cache.view(*cache.shape[:2], -1, width)
    counts = layout.levels.tokens[layout.slots[: layout.num_rows].long()].tolist()
    for row, own in enumerate(counts):
        table, seq_len = layout.block_table[row], metadata.seq_lens[row]
        (older,), column = level_tokens((part,), layout.levels, own, table, cache.dtype)
        newest = cache[table[column : -(-seq_len // block_size)].long()].flatten(0, 1)
        yield torch.cat([*(x.flatten(1) for x in older), newest[: seq_len - column * block_size]])


def _absorbed(
    spec: LatentAttentionSpec,
    query: torch.Tensor,
    up: torch.Tensor,
    gathered: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Attend to the first latents of each query: query: [R, num_heads, key_dim]; gathered: [R, S,
    cache_dim]; counts: [R] → [R, num_heads, value_dim]"""
    hidden = torch.arange(gathered.shape[1], device=query.device) >= counts[:, None]
    # What lies past a row's end is undefined, maybe NaN: a zero weight does not remove it.
    latents = gathered.masked_fill(hidden[:, :, None], 0.0)
    own, turned = query.split_with_sizes([spec.nope_dim, spec.rope_dim], dim=-1)
    absorbed = torch.einsum("rhn,hnl->rhl", own, up[:, : spec.nope_dim])
    scores = torch.cat([absorbed, turned], dim=-1).float() @ latents.float().mT * spec.scale
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
    mixed = (weights @ latents[..., : spec.latent_dim].float()).to(query.dtype)
    return torch.einsum("rhl,hvl->rhv", mixed, up[:, spec.nope_dim :])
