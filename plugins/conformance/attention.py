"""`AttentionBackendKit`: an attention backend against dense attention over rows never paged.

    class TestMine(AttentionBackendKit):
        name = "mine"                                    # as registered
        promised = frozenset({"sliding_window"})         # refusing these here is a failure

On a GPU where there is one, else on the CPU. What the backend refuses is skipped with its reason,
unless it is promised; what it serves must be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from ...core.nn.context import ForwardContext, MixedRows
from ...core.nn.operations import Norm
from ...core.protocols.attention import AttentionBackend, AttentionSpec
from ...core.worker.selection import attention_refusal
from .attention_caches import CacheChecks
from .attention_cases import (
    BATCHES,
    CASES,
    MAX_MODEL_LEN,
    REACHES,
    FutureSpec,
    assert_same,
    bound_layer,
    expected_heads,
    make_spec,
    run_layer,
    write,
)
from .attention_graphs import GraphChecks
from .invariance import InvariantAttention
from .leveled_caches import LevelChecks
from .paged import Batch, Row, Sizes, dense_attention, make_batch
from .paged_backends import DRAFT_SIZES, PagedBackendKit, with_bounds


class AttentionBackendKit(
    CacheChecks, LevelChecks, GraphChecks, InvariantAttention, PagedBackendKit
):
    """Subclass it in your tests, and set the class variables."""

    kind = "attention_backend"
    promised: ClassVar[frozenset[str]] = frozenset()
    """Features of `AttentionSpec`, and dtypes such as "bfloat16", that it must serve on this
    machine: a refusal fails. Plain attention in a promised dtype is promised too."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 2e-5,
        torch.float16: 4e-3,
        torch.bfloat16: 2.5e-2,
    }
    """Absolute and relative tolerance. Float32 differs by the order of sums; the others by the
    rounding of the softmax's weights and of the output."""

    # -------------------------------------------------------------- what tests are made of

    def plain_spec(self) -> AttentionSpec:
        """Return the spec of a layer without features."""
        return make_spec()

    def is_promised(self, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        """Return whether it must serve a layer in a type, features included."""
        return super().is_promised(spec, dtype) and spec.features <= self.promised

    def sinks(self, spec: AttentionSpec) -> torch.Tensor | None:
        """[num_heads] Sinks of significant size, if the layer has them."""
        return torch.linspace(-2.0, 4.0, spec.num_heads, device=self.device) if spec.sinks else None

    def distance_bias(self, spec: AttentionSpec) -> torch.Tensor | None:
        """[num_heads, 9] Biases of significant size by distance, if the layer has them."""
        if not spec.distance_bias:
            return None
        values = torch.linspace(0.0, 20.0, spec.num_heads * 9, device=self.device).sin() * 2.0
        return values.view(spec.num_heads, 9)

    def attend(
        self, backend: AttentionBackend, spec: AttentionSpec, batch: Batch, metadata: Any = None
    ) -> torch.Tensor:
        """`Attention.attend` over the batch's cache: [num_tokens, num_heads, head_dim]."""
        query, key, value = (batch.joined(part) for part in ("query", "key", "value"))
        if metadata is None:
            metadata = backend.build_metadata(batch.layout)
        context = ForwardContext(backend, metadata, batch.layout, batch.positions)
        layer = bound_layer(spec, batch, query.dtype)
        out = layer.attend(
            query, key, value, context, sinks=self.sinks(spec),
            distance_bias=self.distance_bias(spec),
        )  # fmt: skip
        return out.view(query.shape)

    def assert_near(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        dtype: torch.dtype,
        *,
        times: float = 1.0,
    ) -> None:
        bound = self.tolerance[dtype] * times
        torch.testing.assert_close(actual.float(), expected.float(), atol=bound, rtol=bound)

    def check(
        self, sizes: Sizes, spec: AttentionSpec, dtype: torch.dtype, block_size: int, seed: int = 0
    ) -> None:
        """Check that a step equals dense attention, in query's dtype, and changes the cache only at
        the places of this step's tokens."""
        backend = self.make(spec, dtype, block_size)
        batch = make_batch(
            sizes, spec, block_size, self.device, dtype, seed=seed, released=backend.cache_groups
        )
        before = batch.cache.clone()
        actual = self.attend(backend, spec, batch)
        assert actual.dtype == dtype
        learned = self.sinks(spec), self.distance_bias(spec)
        self.assert_near(actual, dense_attention(spec, batch.rows, *learned), dtype)
        if backend.standard_cache:
            write(before, batch.layout, batch.joined("key"), batch.joined("value"))
            assert_same(batch.cache, before)

    # -------------------------------------------------------------- plain attention

    @pytest.mark.parametrize(
        ("batch", "shape"),
        [pytest.param(b, s, id=f"{b}-{'-'.join(map(str, s))}") for b, s in CASES],
    )
    def test_equals_dense_attention(
        self, batch: str, shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        """Decode, prefill, chunks and mixtures; 1 to 16 queries per key head; shuffled blocks.

        The cache is NaN where no token lies, so that reading too far is detected.
        """
        self.check(BATCHES[batch], make_spec(shape), dtype, shape[3])

    @pytest.mark.parametrize("seed", range(4))
    def test_equals_dense_attention_on_random_layouts(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        kv_heads, group = int(draw.integers(1, 4)), int(draw.choice([1, 2, 3, 5, 7, 12]))
        shape = (kv_heads * group, kv_heads, int(draw.choice([64, 80, 96, 128])), 16)
        sizes = []
        for _ in range(int(draw.integers(1, 9))):
            length = int(draw.integers(1, 150))
            decode = draw.random() < 0.5
            sizes.append((length, 1 if decode else int(draw.integers(1, length + 1))))
        block_size = int(draw.choice([4, 8, 16, 64]))
        self.check(sizes, make_spec(shape), torch.float32, block_size, seed)

    def test_long_and_short_rows_together(self, dtype: torch.dtype) -> None:
        self.check([(900, 1), (1, 1), (333, 1), (600, 4)], make_spec((4, 1, 64, 16)), dtype, 16)

    def test_large_logits_do_not_overflow(self) -> None:
        spec = msgspec.structs.replace(make_spec((2, 1, 64, 16)), scale=8.0)
        backend = self.make(spec, torch.float32, 16)
        batch = make_batch([(50, 1), (30, 30)], spec, 16, self.device, torch.float32)
        actual = self.attend(backend, spec, batch)
        self.assert_near(actual, dense_attention(spec, batch.rows), torch.float32, times=20)

    # -------------------------------------------------------------- features

    @pytest.mark.parametrize("batch", ["decode", "mixed", "chunk"])
    @pytest.mark.parametrize(
        "features",
        [
            {"sliding_window": 1},
            {"sliding_window": 24},
            {"soft_cap": 4.0},
            {"sliding_window": 33, "soft_cap": 4.0},
            {"attention_chunk_size": 16},
            {"attention_chunk_size": 19, "soft_cap": 4.0},
            {"attention_chunk_size": 10, "chunk_lookback": 2},
            {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
            {"alibi_slopes": (0.3, 0.01, 0.9, 0.5), "sliding_window": 24, "soft_cap": 4.0},
            {"sinks": True},
            {"sinks": True, "sliding_window": 24},
            {"sinks": True, "attention_chunk_size": 19, "chunk_lookback": 1},
            {"distance_bias": True},
            {"distance_bias": True, "sliding_window": 24, "soft_cap": 4.0},
        ],
        ids=lambda features: "+".join(f"{key}" for key in features),
    )
    def test_features(self, batch: str, features: dict[str, Any], dtype: torch.dtype) -> None:
        self.check(BATCHES[batch], make_spec(**features), dtype, 16)

    @pytest.mark.parametrize("reach", ["sliding_window", "attention_chunk_size"])
    def test_prompts_about_as_long_as_the_reach(self, reach: str, dtype: torch.dtype) -> None:
        """Whole prompts, the longest of which is one token longer than a token sees."""
        features: dict[str, Any] = {reach: 24}
        self.check([(23, 23), (24, 24), (25, 25)], make_spec(**features), dtype, 16)
        self.check([(25, 25)], make_spec(**features), dtype, 16)

    @pytest.mark.parametrize("features", REACHES, ids="+".join)
    def test_nothing_is_read_out_of_reach(
        self, features: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """If it claims `cache_groups`: blocks before the window or chunks belong to others, or hold
        NaN."""
        spec = make_spec(**features)
        if not self.make(spec, dtype, 8).cache_groups:
            pytest.skip(f"{self.name} does not claim cache_groups")
        self.check([(300, 1), (41, 1), (150, 1), (200, 70), (90, 3)], spec, dtype, 8)

    @pytest.mark.parametrize("features", [{}, *REACHES], ids=lambda f: "+".join(f) or "plain")
    def test_lengths_that_only_the_device_knows(self, features: dict[str, Any]) -> None:
        """If it claims `bounded_lengths`: the host has upper bounds of them, block tables are as
        wide, and rows of a few tokens are drafts."""
        spec = make_spec(**features)
        backend = self.make(spec, torch.float32, 8)
        if not backend.bounded_lengths:
            pytest.skip(f"{self.name} does not claim bounded_lengths")
        batch = make_batch(
            DRAFT_SIZES, spec, 8, self.device, torch.float32, released=backend.cache_groups
        )
        layout = with_bounds(batch.layout)
        actual = self.attend(backend, spec, replace(batch, layout=layout))
        self.assert_near(actual, dense_attention(spec, batch.rows), torch.float32)

    @pytest.mark.parametrize("features", [{}, *REACHES], ids=lambda f: "+".join(f) or "plain")
    def test_rows_of_as_many_tokens(self, features: dict[str, Any]) -> None:
        """If it claims `mixed_graph_safe`: recorded steps with drafts have such rows alone, and say
        so."""
        spec, width = make_spec(**features), 5
        backend = self.make(spec, torch.float32, 8)
        if not backend.mixed_graph_safe:
            pytest.skip(f"{self.name} does not claim to be mixed_graph_safe")
        sizes = [(width, width), (64, width), (133, width), (67, width)]
        batch = make_batch(sizes, spec, 8, self.device, torch.float32)
        layout = replace(
            batch.layout,
            query_start_cpu=np.zeros(len(sizes) + 1, dtype=np.int32),
            seq_lens_cpu=np.full(len(sizes), MAX_MODEL_LEN, dtype=np.int32),
            max_query_len=width,
            mixed=MixedRows(
                torch.tensor([0, len(sizes)], dtype=torch.int32, device=self.device),
                0, len(sizes), width,
            ),
        )  # fmt: skip
        actual = self.attend(backend, spec, replace(batch, layout=layout))
        self.assert_near(actual, dense_attention(spec, batch.rows), torch.float32)

    def test_groups_of_a_step_are_kept_apart(self) -> None:
        """If it claims `cache_groups`: layers of equal shape use the tables of their groups."""
        spec = make_spec(sliding_window=24)
        backend = self.make(spec, torch.float32, 16)
        if not backend.cache_groups:
            pytest.skip(f"{self.name} does not claim cache_groups")
        batches = [
            make_batch(BATCHES["mixed"], spec, 16, self.device, torch.float32, seed=seed)
            for seed in range(3)
        ]
        expected = [dense_attention(spec, batch.rows) for batch in batches]
        for _ in range(2):
            metadata = [
                backend.build_metadata(replace(batch.layout, group=number))
                for number, batch in enumerate(batches)
            ]
            for _ in range(2):
                for batch, group_metadata, want in zip(batches, metadata, expected, strict=True):
                    actual = self.attend(backend, spec, batch, group_metadata)
                    self.assert_near(actual, want, torch.float32)

    def test_fresh_prompts_with_features(self) -> None:
        """Rows with nothing cached often have a separate implementation."""
        for features in (
            {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
            {"sinks": True},
            {"soft_cap": 4.0},
            {"sliding_window": 24},
            {"attention_chunk_size": 24},
        ):
            spec = make_spec(**features)
            reason = attention_refusal(self.backend_class, spec, self.device, torch.float32)
            if reason is None:
                self.check([(70, 70)], spec, torch.float32, 16)

    # -------------------------------------------------------------- as layers use it

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("heads", ["plain", "normed-and-rotated", "rotated-and-normed"])
    def test_through_a_layer(self, batch: str, heads: str, dtype: torch.dtype) -> None:
        """Attend from a fused projection, whose parts are not contiguous, by what the backend has
        planned if it takes the step."""
        spec = make_spec((4, 2, 64, 16))
        backend = self.make(spec, dtype, 16)
        paged = make_batch(BATCHES[batch], spec, 16, self.device, dtype)
        qkv = torch.cat([paged.joined(p).flatten(1) for p in ("query", "key", "value")], dim=1)
        cos_sin = None
        norms: tuple[Norm | None, Norm | None] = (None, None)
        if heads != "plain":
            angles = torch.arange(MAX_MODEL_LEN)[:, None] * 10000.0 ** -torch.linspace(0, 1, 32)
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.device)
            weight = torch.linspace(0.5, 1.5, 64, device=self.device, dtype=dtype)
            norms = (Norm(weight, 1e-6), Norm(weight.flip(0), 1e-6))
        norm_last = heads == "rotated-and-normed"
        expected = expected_heads(qkv, paged.positions, cos_sin, norms, norm_last)
        ring = qkv.new_zeros(len(qkv), 4, 64)
        before = paged.cache.clone()
        rows, first = [], 0
        for row in paged.rows:
            tokens = slice(first, first + len(row.query))
            earlier = len(row.key) - len(row.query)
            keys, values = (
                torch.cat([old[:earlier].float(), new[tokens]])
                for old, new in ((row.key, expected[1]), (row.value, expected[2]))
            )
            rows.append(Row(expected[0][tokens], keys, values))
            first = tokens.stop
        actual = run_layer(
            backend, spec, paged, qkv, cos_sin, norms, norm_last=norm_last, query_ring=ring
        )
        self.assert_near(ring.flip(0), expected[0], dtype, times=2)
        self.assert_near(actual, dense_attention(spec, rows).flatten(1), dtype, times=2)
        if backend.standard_cache:
            written = paged.cache.flatten(1, 2)[:, paged.layout.slot_mapping]
            self.assert_near(written, torch.stack(expected[1:]), dtype, times=2)
            write(before, paged.layout, *written)
            assert_same(paged.cache, before)

    @pytest.mark.parametrize("batch", ["decode", "mixed"])
    @pytest.mark.parametrize(
        "features",
        [{"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}, {"sinks": True}],
        ids=lambda features: "+".join(features),
    )
    def test_features_through_a_layer(self, batch: str, features: dict[str, Any]) -> None:
        """A fast path from the projection must not omit features of the general path."""
        spec = make_spec((4, 2, 64, 16), **features)
        backend = self.make(spec, torch.float32, 16)
        paged = make_batch(BATCHES[batch], spec, 16, self.device, torch.float32)
        qkv = torch.cat([paged.joined(p).flatten(1) for p in ("query", "key", "value")], dim=1)
        sinks = self.sinks(spec)
        actual = run_layer(backend, spec, paged, qkv, None, (None, None), sinks)
        expected = dense_attention(spec, paged.rows, sinks).flatten(1)
        self.assert_near(actual, expected, torch.float32)

    def test_one_instance_serves_many_steps_and_layers(self) -> None:
        """Layers of two shapes share a step's metadata; state of a step does not affect later
        ones."""
        shapes = [(4, 2, 64, 16), (8, 1, 128, 16)]
        specs = [make_spec(shape) for shape in shapes]
        # Two that see as many tokens at most, but not the same ones.
        for features in ({"sliding_window": 18}, {"attention_chunk_size": 18}):
            spec = make_spec(shapes[0], **features)
            if not attention_refusal(self.backend_class, spec, self.device, torch.float32):
                specs.append(spec)
        backend = self.make(specs[0], torch.float32, 16)
        for number, sizes in enumerate(BATCHES[name] for name in ("mixed", "decode", "chunk")):
            metadata = None
            for spec in specs:
                batch = make_batch(sizes, spec, 16, self.device, torch.float32, seed=number)
                if metadata is None:
                    metadata = backend.build_metadata(batch.layout)
                actual = self.attend(backend, spec, batch, metadata)
                self.assert_near(actual, dense_attention(spec, batch.rows), torch.float32)

    # -------------------------------------------------------------- refusals

    def test_refusals_are_stated(self) -> None:
        """The refusal is None, or one line with the reason, for any arguments. Query heads that are
        not a multiple of key heads, and dtypes that are not floats, are always refused."""
        odd = [
            make_spec((3, 2, 64, 16)),
            make_spec((2, 2, 512, 16)),
            make_spec((2, 2, 7, 16)),
            make_spec((1024, 1, 64, 16)),
            make_spec(),
        ]
        for device in ("cpu", "cuda", "meta"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
                for spec in odd:
                    reason = attention_refusal(
                        self.backend_class, spec, torch.device(device), dtype
                    )
                    assert reason is None or (reason.strip() and "\n" not in reason)
        cls, here = self.backend_class, self.device
        assert attention_refusal(cls, odd[0], here, torch.float32) is not None, "3 heads share 2"
        assert attention_refusal(cls, odd[-1], here, torch.int8) is not None, "int8 queries"

    def test_what_it_does_not_know_of_is_refused(self) -> None:
        """A layer of a later version is not served as one of this version."""
        spec = FutureSpec(num_heads=2, num_kv_heads=2, head_dim=64, scale=0.1, invented_later=1)
        reason = attention_refusal(self.backend_class, spec, self.device, torch.float32)
        assert reason is not None and "invented_later" in reason
        names = {field.name for field in msgspec.structs.fields(AttentionSpec)}
        assert self.backend_class.features <= names, "it lists what no layer has"
