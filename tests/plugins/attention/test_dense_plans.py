"""Long fresh prompts go to torch's dense attention, if plans for their length were made before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.protocols.attention import AttentionSpec, BackendSetup
from jackfield.plugins.attention import triton_dense
from jackfield.plugins.attention.triton_dense import DensePlans, prefers_dense
from jackfield.plugins.conformance.paged import dense_attention, make_batch

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
CPU = torch.device("cpu")


def plans_of(
    spec: AttentionSpec, most: int, count: int | None = None, dtype: torch.dtype = torch.float32
) -> DensePlans:
    """Return plans of the `count` longest lengths, or of all."""
    plans = DensePlans([spec], most, CPU, dtype)
    while count != 0 and plans.prepare_next():
        count = None if count is None else count - 1
    return plans


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans are made, but nothing is computed; the lengths of those made."""
    made: list[int] = []
    monkeypatch.setattr(triton_dense, "causal_attention", lambda *parts: made.append(parts[-1]))
    return made


def test_lengths_are_few_and_rows_are_padded_little(no_products: list[int]) -> None:
    plans = plans_of(PLAIN, 8192)
    assert no_products == [8192, 7168, 6144, 5120, 4096, 3072, 2048]
    cases = {8193: 0, 8192: 8192, 7169: 8192, 7168: 7168, 7000: 7168, 4095: 4096, 3584: 4096,
             3583: 0, 2049: 0, 2048: 2048, 2047: 0}  # fmt: skip
    assert {tokens: plans.length(tokens) for tokens in cases} == cases
    no_products.clear()
    plans_of(PLAIN, 131072)
    assert len(no_products) == 16 and no_products[0] == 131072
    no_products.clear()
    # The first chunk of longer prompts has its own; short steps have no long rows.
    assert plans_of(PLAIN, 2500).length(2500) == 2500 and no_products == [2500, 2048]
    assert plans_of(PLAIN, 2047).length(2047) == 0


@pytest.mark.parametrize("more", [{"soft_cap": 30.0}, {"head_dim": 256}], ids=str)
def test_layers_that_it_cannot_compute_have_no_plans(
    more: dict[str, Any], no_products: list[int]
) -> None:
    spec = AttentionSpec(**{**dict(num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0), **more})
    assert plans_of(spec, 8192).length(8192) == 0 and not no_products


def test_steps_without_plans_are_replayed(no_products: list[int]) -> None:
    """A plan made in a step would take longer than the step."""
    lens = np.array([4096, 4090])
    plans = DensePlans([PLAIN], 8192, CPU, torch.float32)
    assert not prefers_dense(lens, lens, plans)
    while plans.length(4090) == 0:
        assert plans.prepare_next()
    assert prefers_dense(lens, lens, plans)
    assert not prefers_dense(lens, lens + 16, plans), "not after cached tokens"
    assert not prefers_dense(np.array([4096, 1]), np.array([4096, 9]), plans), "too small"


def test_a_length_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: Any) -> None:
        if parts[-1] > 3072:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_dense, "causal_attention", fail)
    plans = plans_of(PLAIN, 4096)
    assert (plans.length(4096), plans.length(3072)) == (0, 3072)


@pytest.mark.parametrize("lengths", [(21,), (24, 7, 22, 1)], ids=["alone", "beside others"])
def test_padded_rows_are_computed_like_others(
    lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton's backend, of which the interpreter computes the rest."""
    triton = pytest.importorskip("jackfield.plugins.attention.triton")
    spec, dtype = PLAIN, torch.float32
    if triton.TritonAttention.supports(spec, CPU, dtype) is not None:
        pytest.skip("it needs Triton's interpreter")
    monkeypatch.setattr(triton_dense, "DENSE_TOKENS", 8)
    monkeypatch.setattr(triton_dense, "FINE", 8)
    setup = BackendSetup(
        device=CPU, dtype=dtype, block_size=16, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=64, layers=(spec,),
    )  # fmt: skip
    backend = triton.TritonAttention.create(setup)
    backend.plans = plans_of(spec, 32)
    padded: list[int] = []
    pad = triton_dense._padded

    def counted(part: torch.Tensor, length: int) -> torch.Tensor:
        padded.append(length)
        return pad(part, length)

    monkeypatch.setattr(triton_dense, "_padded", counted)
    batch = make_batch([(length, length) for length in lengths], spec, 16, CPU, dtype)
    parts = [batch.joined(name) for name in ("query", "key", "value")]
    for cache, part in zip(batch.cache, parts[1:], strict=True):
        cache.flatten(0, 1)[batch.layout.slot_mapping] = part
    out = backend.forward(spec, *parts, batch.cache, backend.build_metadata(batch.layout))
    torch.testing.assert_close(out, dense_attention(spec, batch.rows), atol=2e-5, rtol=2e-5)
    rows = [length for length in lengths if length > 20]
    assert padded == 3 * len(rows) * [24], "queries, keys and values of each"
