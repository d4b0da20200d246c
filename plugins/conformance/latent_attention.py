"""`LatentAttentionBackendKit`: a latent attention backend against keys and values made in full.

    class TestMine(LatentAttentionBackendKit):
        name = "mine"                                    # as registered
        promised = frozenset({"float32", "bfloat16"})    # refusing these here is a failure

On a GPU where there is one, else on the CPU. What the backend refuses is skipped with its reason,
unless it is promised; what it serves must be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from ...core.cache.level_options import level_format
from ...core.nn.context import BatchLayout, MixedRows
from ...core.nn.kv_cache.level_cache import latent_group
from ...core.protocols.latent_attention import (
    ChosenTokens,
    LatentAttentionBackend,
    LatentAttentionSpec,
)
from ...core.worker.selection import attention_refusal
from .attention_cases import BATCHES, MAX_MODEL_LEN
from .leveled_caches import leveled_rows
from .paged import Sizes, make_layout
from .paged_backends import DRAFT_SIZES, PagedBackendKit, with_bounds


class FutureLatentSpec(LatentAttentionSpec, frozen=True, kw_only=True):
    """A layer of a later version."""

    invented_later: int | None = None


def latent_spec(
    heads: int = 4, latent: int = 64, rope: int = 16, nope: int = 32, value: int = 32
) -> LatentAttentionSpec:
    """Return the spec of a layer of these sizes."""
    return LatentAttentionSpec(
        num_heads=heads, latent_dim=latent, rope_dim=rope, nope_dim=nope, value_dim=value,
        scale=(nope + rope) ** -0.5,
    )  # fmt: skip


SPECS = {
    "small": latent_spec(),
    "one head": latent_spec(1, 32, 8, 16, 24),
    "odd sizes": latent_spec(5, 40, 6, 12, 10),
    "many heads": latent_spec(20, 96, 32, 16, 16),
}


class LatentBatch(NamedTuple):
    """Rows over a cache in which everything that no row may read is NaN."""

    query: torch.Tensor
    """[num_tokens, num_heads, key_dim]"""
    latent: torch.Tensor
    """[num_tokens, cache_dim]"""
    rows: list[torch.Tensor]
    """[tokens, cache_dim] of each row, all its tokens"""
    sizes: Sizes
    up: torch.Tensor
    """[num_heads, nope_dim + value_dim, latent_dim]"""
    cache: torch.Tensor
    """[num_blocks, block_size, cache_dim], this step's tokens included"""
    layout: BatchLayout


def latent_batch(
    sizes: Sizes,
    spec: LatentAttentionSpec,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    table_width: int | None = None,
) -> LatentBatch:
    """Return random rows in shuffled blocks."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in sizes]
    num_blocks = sum(counts) + 5
    free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    cache = torch.full((num_blocks, block_size, spec.cache_dim), float("nan"), dtype=dtype)
    table = torch.zeros(len(sizes), table_width or max(counts) + 2, dtype=torch.int32)
    rows, slots = [], []
    for index, (length, queries) in enumerate(sizes):
        blocks = [free.pop() for _ in range(counts[index])]
        table[index, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[at // block_size] * block_size + at % block_size for at in range(length)]
        slots += own[length - queries :]
        latents = torch.randn(length, spec.cache_dim, generator=random).to(dtype)
        cache.flatten(0, 1)[own] = latents
        rows.append(latents.to(device))
    num_tokens = sum(queries for _, queries in sizes)
    query = torch.randn(num_tokens, spec.num_heads, spec.key_dim, generator=random)
    up = torch.randn(
        spec.num_heads, spec.nope_dim + spec.value_dim, spec.latent_dim, generator=random
    )
    up = up * spec.latent_dim**-0.5
    new = [row[len(row) - queries :] for row, (_, queries) in zip(rows, sizes, strict=True)]
    layout = make_layout(sizes, table, torch.tensor(slots, dtype=torch.int64), device)
    return LatentBatch(
        query.to(device, dtype), torch.cat(new), rows, sizes, up.to(device, dtype),
        cache.to(device), layout,
    )  # fmt: skip


def choose_some(
    batch: LatentBatch, topk: int, block_size: int, seed: int = 0
) -> tuple[ChosenTokens, list[torch.Tensor]]:
    """Choose up to `topk` tokens for each query at random. → also of each row which are not read,
    [queries, length] bool"""
    random = torch.Generator().manual_seed(seed)
    device = batch.query.device
    slots = torch.zeros(len(batch.query), topk, dtype=torch.int32)
    counts, hidden, token = [], [], 0
    for table, (length, queries) in zip(batch.layout.block_table.cpu(), batch.sizes, strict=True):
        unread = torch.ones(queries, length, dtype=torch.bool)
        for own, position in enumerate(range(length - queries, length)):
            chosen = torch.randperm(position + 1, generator=random)[:topk].sort().values
            unread[own, chosen] = False
            places = table[chosen // block_size] * block_size + chosen % block_size
            slots[token, : len(chosen)] = places.to(torch.int32)
            counts.append(len(chosen))
            token += 1
        hidden.append(unread.to(device))
    number = torch.tensor(counts, dtype=torch.int32)
    return ChosenTokens(slots.to(device), number.to(device)), hidden


def expanded_attention(
    spec: LatentAttentionSpec, batch: LatentBatch, hidden: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Make each row's keys and values from its latents, and attend to them one by one, in float64:
    → [num_tokens, num_heads, value_dim]. hidden: of each row which are not read, [queries, length]
    bool; None: those after each query."""
    outputs, first = [], 0
    for row, (latents, (length, queries)) in enumerate(zip(batch.rows, batch.sizes, strict=True)):
        wide = latents.double()
        both = torch.einsum("sl,hdl->shd", wide[:, : spec.latent_dim], batch.up.double())
        shared = wide[:, None, spec.latent_dim :].expand(-1, spec.num_heads, -1)
        key = torch.cat([both[..., : spec.nope_dim], shared], dim=-1)
        own = torch.arange(length - queries, length, device=latents.device)
        later = torch.arange(length, device=latents.device) > own[:, None]
        query = batch.query[first : first + queries].double()
        scores = torch.einsum("qhd,shd->hqs", query, key) * spec.scale
        unread = later if hidden is None else hidden[row]
        weights = scores.masked_fill(unread, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqs,shv->qhv", weights, both[..., spec.nope_dim :]))
        first += queries
    return torch.cat(outputs)


class LatentAttentionBackendKit(PagedBackendKit):
    """Subclass it in your tests, and set the class variables."""

    kind = "latent_attention_backend"
    promised: ClassVar[frozenset[str]] = frozenset()
    """Dtypes such as "bfloat16" that it must serve on this machine: a refusal fails."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 2e-5,
        torch.float16: 5e-3,
        torch.bfloat16: 4e-2,
    }
    """Absolute and relative tolerance: queries and results that heads are absorbed into are
    rounded, too."""

    def plain_spec(self) -> LatentAttentionSpec:
        """Return the spec of a layer without features."""
        return latent_spec()

    def check(
        self, backend: LatentAttentionBackend, spec: LatentAttentionSpec, batch: LatentBatch
    ) -> None:
        """Check that a step equals attention to expanded keys and values, and that the cache stays
        as it was."""
        before = batch.cache.clone()
        metadata = backend.build_metadata(batch.layout)
        actual = backend.forward(
            spec, batch.query.clone(), batch.latent, batch.up, batch.cache, metadata
        )
        assert actual.dtype == batch.query.dtype
        self.assert_near(actual, expanded_attention(spec, batch))
        torch.testing.assert_close(batch.cache, before, atol=0, rtol=0, equal_nan=True)

    def assert_near(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        bound = self.tolerance[actual.dtype]
        torch.testing.assert_close(actual.float(), expected.float(), atol=bound, rtol=bound)

    @pytest.mark.parametrize("batch", BATCHES)
    def test_equals_expanded_attention(self, batch: str, dtype: torch.dtype) -> None:
        """Decode, prefill, chunks and mixtures in shuffled blocks; the rest of the cache is NaN."""
        spec = SPECS["small"]
        backend = self.make(spec, dtype)
        self.check(backend, spec, latent_batch(BATCHES[batch], spec, 16, self.device, dtype))

    @pytest.mark.parametrize("shape", sorted(SPECS.keys() - {"small"}))
    def test_shapes(self, shape: str) -> None:
        spec = SPECS[shape]
        backend = self.make(spec, torch.float32, 4)
        sizes = [(35, 1), (6, 1), (20, 20), (9, 3)]
        self.check(backend, spec, latent_batch(sizes, spec, 4, self.device, torch.float32))

    def test_long_and_short_rows_together(self, dtype: torch.dtype) -> None:
        spec = SPECS["small"]
        sizes = [(900, 1), (1, 1), (333, 1), (600, 4)]
        backend = self.make(spec, dtype)
        self.check(backend, spec, latent_batch(sizes, spec, 16, self.device, dtype))

    def test_lengths_that_only_the_device_knows(self) -> None:
        """If it claims `bounded_lengths`: the host has upper bounds of them, block tables are as
        wide, and rows of a few tokens are drafts."""
        spec = SPECS["small"]
        backend = self.make(spec, torch.float32)
        if not backend.bounded_lengths:
            pytest.skip(f"{self.name} does not claim bounded_lengths")
        batch = latent_batch(DRAFT_SIZES, spec, 16, self.device, torch.float32)
        self.check(backend, spec, batch._replace(layout=with_bounds(batch.layout)))

    @pytest.mark.parametrize("batch", ["decode", "mixed"])
    @pytest.mark.parametrize("shape", ["small", "one head"])
    def test_tokens_in_levels(self, shape: str, batch: str, dtype: torch.dtype) -> None:
        """If it claims a `leveled_cache`: all queries of a row see its tokens in levels."""
        if not self.backend_class.leveled_cache:
            pytest.skip(f"{self.name} does not claim a leveled_cache")
        spec = SPECS[shape]
        width = latent_group(spec.latent_dim, spec.rope_dim)
        backend, plain = self.make(spec, dtype, 4), BATCHES[batch]
        own = latent_batch(plain, spec, 4, self.device, dtype)
        formats = [level_format(bits, 4, width, dtype.itemsize) for bits in (16, 8, 4)]
        layout, (cache,), rows = leveled_rows(
            own.layout, [own.cache.view(*own.cache.shape[:2], -1, width)],
            [[row.view(len(row), -1, width)] for row in own.rows], formats,
        )  # fmt: skip
        left = [row.flatten(1) for (row,) in rows]
        self.check(backend, spec, own._replace(layout=layout, cache=cache.flatten(2), rows=left))

    @pytest.mark.parametrize("shape", SPECS)
    def test_chosen_tokens_alone_are_read(self, shape: str, dtype: torch.dtype) -> None:
        """If it lists `index_topk`: decode rows, chunks and prompts of which some have fewer tokens
        than may be chosen. Everything else in the cache may be NaN."""
        if "index_topk" not in self.backend_class.features:
            pytest.skip(f"{self.name} does not list index_topk")
        spec = msgspec.structs.replace(SPECS[shape], index_topk=20)
        backend = self.make(spec, dtype)
        sizes = [(75, 1), (6, 1), (40, 40), (90, 5), (33, 1)]
        batch = latent_batch(sizes, spec, 16, self.device, dtype)
        chosen, hidden = choose_some(batch, 20, 16)
        unread = torch.ones(batch.cache.shape[:2].numel(), dtype=torch.bool, device=self.device)
        for slots, count in zip(chosen.slots, chosen.counts.tolist(), strict=True):
            unread[slots[:count].long()] = False
        batch.cache.flatten(0, 1)[unread] = float("nan")
        actual = backend.forward(
            spec, batch.query.clone(), batch.latent, batch.up, batch.cache,
            backend.build_metadata(batch.layout), chosen=chosen,
        )  # fmt: skip
        self.assert_near(actual, expanded_attention(spec, batch, hidden))

    def test_large_logits_do_not_overflow(self) -> None:
        spec = msgspec.structs.replace(SPECS["small"], scale=4.0)
        backend = self.make(spec, torch.float32)
        sizes = [(50, 1), (30, 30)]
        batch = latent_batch(sizes, spec, 16, self.device, torch.float32)
        actual = backend.forward(
            spec, batch.query, batch.latent, batch.up, batch.cache,
            backend.build_metadata(batch.layout),
        )  # fmt: skip
        torch.testing.assert_close(
            actual.double(), expanded_attention(spec, batch), atol=1e-3, rtol=1e-3
        )

    def test_one_instance_serves_many_steps_and_layers(self) -> None:
        """Layers of two shapes share a step's metadata."""
        specs = [SPECS["small"], SPECS["many heads"]]
        backend = self.make(specs[0], torch.float32)
        for number, sizes in enumerate(BATCHES[name] for name in ("mixed", "decode", "chunk")):
            for spec in specs:
                batch = latent_batch(sizes, spec, 16, self.device, torch.float32, seed=number)
                self.check(backend, spec, batch)

    def test_warm_up_on_the_null_block(self) -> None:
        """At start a step runs in which every token goes to slot 0; its result is discarded."""
        spec = SPECS["small"]
        backend = self.make(spec, torch.float32)
        for sizes in ([(40, 40)], [(1, 1)], [(4, 4), (3, 3)]):
            batch = latent_batch(sizes, spec, 16, self.device, torch.float32)
            table = torch.zeros(len(sizes), 3, dtype=torch.int32)
            slots = torch.zeros(batch.layout.num_tokens, dtype=torch.int64)
            layout = make_layout(sizes, table, slots, self.device)
            metadata = backend.build_metadata(layout)
            actual = backend.forward(
                spec, batch.query, batch.latent, batch.up, batch.cache, metadata
            )
            assert actual.shape == (layout.num_tokens, spec.num_heads, spec.value_dim)

    # -------------------------------------------------------------- refusals

    def test_refusals_are_stated(self) -> None:
        """The refusal is None, or one line with the reason, for any arguments; dtypes that are not
        floats are always refused."""
        for device in ("cpu", "cuda", "meta"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
                for spec in (*SPECS.values(), latent_spec(128, 512, 64, 128, 128)):
                    reason = attention_refusal(
                        self.backend_class, spec, torch.device(device), dtype
                    )
                    assert reason is None or (reason.strip() and "\n" not in reason)
        assert attention_refusal(self.backend_class, latent_spec(), self.device, torch.int8), (
            "int8 queries"
        )

    def test_what_it_does_not_know_of_is_refused(self) -> None:
        """A layer of a later version is not served as one of this version."""
        fields = msgspec.structs.asdict(latent_spec())
        spec = FutureLatentSpec(**fields, invented_later=1)
        reason = attention_refusal(self.backend_class, spec, self.device, torch.float32)
        assert reason is not None and "invented_later" in reason

    # -------------------------------------------------------------- graphs

    def test_decode_reads_lengths_on_the_device(self) -> None:
        """Without a graph what a graph needs: the host's lengths are upper bounds only."""
        spec = SPECS["small"]
        backend = self.make(spec, torch.float32)
        if not backend.graph_safe:
            pytest.skip(f"{self.name} does not claim to be graph_safe")
        width = MAX_MODEL_LEN // 16
        for seed, sizes in enumerate(([(3, 1), (9, 1), (2, 1)], [(700, 1), (1, 1), (129, 1)])):
            batch = latent_batch(
                sizes, spec, 16, self.device, torch.float32, seed=seed, table_width=width
            )
            longest = np.full(len(sizes), MAX_MODEL_LEN, dtype=np.int32)
            layout = replace(batch.layout, seq_lens_cpu=longest, max_seq_len=MAX_MODEL_LEN)
            self.check(backend, spec, batch._replace(layout=layout))

    @pytest.mark.parametrize("decode_rows", [0, 4])
    def test_mixed_steps_read_rows_on_the_device(
        self, decode_rows: int, dtype: torch.dtype
    ) -> None:
        """The host knows the most rows of each kind, and the number of tokens."""
        spec = SPECS["small"]
        backend = self.make(spec, dtype)
        if not backend.mixed_graph_safe:
            pytest.skip(f"{self.name} does not claim to be mixed_graph_safe")
        decodes = [(75, 1), (6, 1)][: decode_rows // 2]
        sizes = [*decodes, (40, 40), (29, 3), (33, 1), (60, 30)]
        batch = latent_batch(sizes, spec, 16, self.device, dtype, table_width=MAX_MODEL_LEN // 16)
        layout = mixed_layout(batch.layout, decode_rows // 2, decode_rows, 8)
        self.check(backend, spec, batch._replace(layout=layout))


def mixed_layout(
    layout: BatchLayout, decode_rows: int, max_decode_rows: int, max_prompt_rows: int
) -> BatchLayout:
    """Return the layout as in a recorded step: rows without tokens come last, and their number and
    lengths are known on the device alone."""
    rows = max_decode_rows + max_prompt_rows
    missing = rows - layout.num_rows
    device = layout.seq_lens.device
    bounds = torch.tensor(
        [decode_rows, layout.num_rows - decode_rows], dtype=torch.int32, device=device
    )
    lengths = np.full(rows, MAX_MODEL_LEN, dtype=np.int32)

    def padded(tensor: torch.Tensor, value: torch.Tensor | int) -> torch.Tensor:
        more = torch.zeros(missing, *tensor.shape[1:], dtype=tensor.dtype, device=device)
        return torch.cat([tensor, more + value])

    return BatchLayout.of(
        query_start=padded(layout.query_start, layout.query_start[-1]),
        seq_lens=padded(layout.seq_lens, 0),
        block_table=padded(layout.block_table, 0),
        slot_mapping=layout.slot_mapping,
        query_start_cpu=np.zeros(rows + 1, dtype=np.int32),
        seq_lens_cpu=lengths,
        max_query_len=layout.num_tokens,
        mixed=MixedRows(bounds, max_decode_rows, max_prompt_rows),
    )
