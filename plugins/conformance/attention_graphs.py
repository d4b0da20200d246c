"""Checks of decode steps that are recorded and replayed, for `AttentionBackendKit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ...core.nn.context import BatchLayout
from ...core.worker.selection import attention_refusal
from .attention_cases import (
    MAX_MODEL_LEN,
    REACHES,
    make_spec,
    run_layer,
)
from .paged import Batch, dense_attention, make_batch


class GraphChecks:
    """Part of `AttentionBackendKit`."""

    assert_near: Any
    backend_class: Any
    device: Any
    make: Any
    name: Any

    def _static(self, short: Batch, long: Batch) -> tuple[Batch, BatchLayout]:
        """Return a batch whose tensors are rewritten between steps, as in decode graphs: the host
        knows only the largest lengths.
        """
        rows = short.layout.num_rows
        layout = BatchLayout.of(
            query_start=short.layout.query_start.clone(),
            seq_lens=short.layout.seq_lens.clone(),
            block_table=short.layout.block_table.clone(),
            slot_mapping=short.layout.slot_mapping.clone(),
            query_start_cpu=short.layout.query_start_cpu,
            seq_lens_cpu=np.full(rows, MAX_MODEL_LEN, dtype=np.int32),
        )
        cache = torch.full_like(long.cache, float("nan"))
        cache[:, : short.cache.shape[1]] = short.cache
        return replace(short, layout=layout, cache=cache), layout

    def _decode_graph(self, capture: bool, **features: Any) -> None:
        spec = make_spec((8, 2, 128, 16), **features)
        reason = attention_refusal(self.backend_class, spec, self.device, torch.bfloat16)
        dtype = torch.float32 if reason else torch.bfloat16
        backend = self.make(spec, dtype, 16)
        if not backend.graph_safe:
            pytest.skip(f"{self.name} does not claim to be graph_safe")
        sizes = ([(3, 1), (9, 1), (2, 1)], [(700, 1), (1, 1), (129, 1)])
        width = MAX_MODEL_LEN // 16
        batches = [
            make_batch(s, spec, 16, self.device, dtype, seed=n, table_width=width)
            for n, s in enumerate(sizes)
        ]
        static, layout = self._static(*batches)
        inputs = [static.joined(part).clone() for part in ("query", "key", "value")]
        qkv = torch.cat([part.flatten(1) for part in inputs], dim=1)
        out = torch.empty_like(qkv[:, : 8 * 128])

        def step() -> None:
            out.copy_(run_layer(backend, spec, static, qkv.clone(), None, (None, None)))

        step()
        replay = step
        if capture:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        for batch in batches:
            layout.seq_lens.copy_(batch.layout.seq_lens)
            layout.slot_mapping.copy_(batch.layout.slot_mapping)
            layout.block_table.copy_(batch.layout.block_table)
            static.cache[:, : batch.cache.shape[1]] = batch.cache
            parts = [batch.joined(part).flatten(1) for part in ("query", "key", "value")]
            qkv.copy_(torch.cat(parts, dim=1))
            replay()
            self.assert_near(out, dense_attention(spec, batch.rows).flatten(1), dtype)

    @pytest.mark.parametrize("features", [{}, *REACHES], ids=lambda f: "+".join(f) or "plain")
    def test_decode_reads_lengths_on_the_device(self, features: dict[str, Any]) -> None:
        """Checks without a graph what a graph needs: the host's lengths are upper bounds only."""
        self._decode_graph(capture=False, **features)

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "features",
        [{}, *REACHES, {"alibi_slopes": tuple(2.0**-n for n in range(1, 9))}],
        ids=lambda features: "+".join(features) or "plain",
    )
    def test_captured_decode_serves_other_lengths(self, features: dict[str, Any]) -> None:
        if not torch.cuda.is_available():
            pytest.skip("CUDA graphs need a CUDA device")
        self._decode_graph(capture=True, **features)
