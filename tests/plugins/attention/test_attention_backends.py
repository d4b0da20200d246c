"""Both attention backends against dense attention over rows that were never paged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jackfield.core.nn.context import BatchLayout
from jackfield.core.protocols import AttentionSpec
from jackfield.kernels import reference
from jackfield.plugins.attention import torch as torch_backend
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.attention.triton import TritonAttention

CUDA = torch.cuda.is_available()
DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if CUDA else [])]
# Against dense float32 from inputs of the storage type: float32 differs by the order of sums;
# float16 and bfloat16 by the rounding of the softmax's weights and of the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


@dataclass
class Row:
    """A request: all its keys and values so far, and the queries of this step (its last ones)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass
class Batch:
    rows: list[Row]
    layout: BatchLayout
    cache: torch.Tensor
    unused: torch.Tensor
    """Flat slots that hold no token of any row, after this step."""

    def joined(self, name: str) -> torch.Tensor:
        """The step's queries, keys or values, [num_tokens, heads, head_dim]."""
        return torch.cat([getattr(r, name)[-len(r.query) :] for r in self.rows])


def make_batch(
    sizes: list[tuple[int, int]],
    spec: AttentionSpec,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Batch:
    """Rows of (tokens in all, queries) in shuffled blocks; NaN wherever no earlier token lies."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in sizes]
    num_blocks = sum(counts) + 5
    free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    cache = torch.full(
        (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim), float("nan"), dtype=dtype
    )
    flat = cache.view(2, -1, spec.num_kv_heads, spec.head_dim)
    table = torch.zeros(len(sizes), max(counts) + 2, dtype=torch.int32)
    rows, slots, used = [], [], []
    for index, (length, queries) in enumerate(sizes):
        blocks = [free.pop() for _ in range(counts[index])]
        table[index, : len(blocks)] = torch.tensor(blocks)
        row_slots = [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
        used += row_slots
        slots += row_slots[length - queries :]
        shape = (length, spec.num_kv_heads, spec.head_dim)
        key = torch.randn(shape, generator=random).to(dtype)
        value = torch.randn(shape, generator=random).to(dtype)
        query = torch.randn(queries, spec.num_heads, spec.head_dim, generator=random).to(dtype)
        flat[0, row_slots[: length - queries]] = key[: length - queries]
        flat[1, row_slots[: length - queries]] = value[: length - queries]
        rows.append(Row(query.to(device), key.to(device), value.to(device)))
    starts = np.cumsum([0, *(q for _, q in sizes)]).astype(np.int32)
    lengths = np.array([n for n, _ in sizes], dtype=np.int32)
    layout = BatchLayout(
        num_rows=len(sizes),
        num_tokens=int(starts[-1]),
        max_query_len=max(q for _, q in sizes),
        max_seq_len=int(lengths.max()),
        query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_start_cpu=starts,
        seq_lens_cpu=lengths,
    )
    unused = sorted(set(range(num_blocks * block_size)) - set(used))
    return Batch(rows, layout, cache.to(device), torch.tensor(unused, device=device))


def dense_attention(spec: AttentionSpec, rows: list[Row]) -> torch.Tensor:
    """Each row by itself in float32, with the mask written out. [num_tokens, heads, head_dim]"""
    outputs = []
    for row in rows:
        group = spec.num_heads // spec.num_kv_heads
        queries, keys = len(row.query), len(row.key)
        mask = torch.zeros(queries, keys, dtype=torch.bool)
        for query in range(queries):
            own = keys - queries + query
            first = 0 if spec.sliding_window is None else max(0, own - spec.sliding_window + 1)
            mask[query, first : own + 1] = True
        mask = mask.to(row.query.device)
        for head in range(spec.num_heads):
            key = row.key[:, head // group].float()
            scores = row.query[:, head].float() @ key.T * spec.scale
            if spec.soft_cap is not None:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            outputs.append(weights @ row.value[:, head // group].float())
    grouped = iter(outputs)
    return torch.cat(
        [torch.stack([next(grouped) for _ in range(spec.num_heads)], dim=1) for _ in rows]
    )


def make_backend(cls, device: torch.device, dtype: torch.dtype, block_size: int):
    return cls(
        device=device,
        dtype=dtype,
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def attend(backend, spec, cache, layout, query, key, value):
    """As a layer does: write the cache where the backend does not, then attend."""
    if backend.standard_cache:
        reference.kv_cache_write(key, value, cache, layout.slot_mapping)
    return backend.forward(spec, query, key, value, cache, backend.build_metadata(layout))


def check(cls, sizes, spec, block_size, device, dtype) -> None:
    assert cls.supports(spec, device, dtype) is None
    batch = make_batch(sizes, spec, block_size, device, dtype)
    before = batch.cache.clone()
    backend = make_backend(cls, device, dtype, block_size)
    inputs = [batch.joined(name) for name in ("query", "key", "value")]
    project = getattr(backend, "forward_projection", None)
    if project is not None:
        qkv = torch.cat([part.flatten(1) for part in inputs], dim=1)
        fused_cache = batch.cache.clone()
        metadata = backend.build_metadata(batch.layout)
        fused = project(spec, qkv, None, None, None, fused_cache, metadata)
        assert (fused is None) == (batch.layout.max_query_len > 1)
    got = attend(backend, spec, batch.cache, batch.layout, *inputs)
    want = dense_attention(spec, batch.rows)
    assert got.dtype == dtype
    if project is not None and fused is not None:
        assert_near(fused.float(), want, dtype)
        torch.testing.assert_close(fused_cache, batch.cache, atol=0, rtol=0, equal_nan=True)
    assert_near(got.float(), want, dtype)
    flat, old = batch.cache.flatten(1, 2), before.flatten(1, 2)
    assert torch.equal(flat[0, batch.layout.slot_mapping], batch.joined("key"))
    assert torch.equal(flat[1, batch.layout.slot_mapping], batch.joined("value"))
    assert flat[:, batch.unused].isnan().all()
    kept = torch.ones(flat.shape[1], dtype=torch.bool, device=device)
    kept[batch.layout.slot_mapping] = False
    torch.testing.assert_close(flat[:, kept], old[:, kept], atol=0, rtol=0, equal_nan=True)


PLACES = [
    pytest.param(TorchAttention, torch.device("cpu"), torch.float32, id="torch-cpu-float32"),
    pytest.param(TorchAttention, torch.device("cpu"), torch.bfloat16, id="torch-cpu-bfloat16"),
]
if CUDA:
    PLACES += [
        pytest.param(cls, torch.device("cuda"), dtype, id=f"{cls.name}-cuda-{dtype}")
        for cls in (TorchAttention, TritonAttention)
        for dtype in (torch.float32, torch.bfloat16)
    ]
else:
    PLACES += [
        pytest.param(TritonAttention, torch.device("cpu"), dtype, id=f"triton-interpreter-{dtype}")
        for dtype in (torch.float32, torch.float16)
    ]

# (tokens in all, queries) of each row.
BATCHES = {
    "prefill": [(21, 21), (1, 1), (70, 70)],
    "decode": [(1, 1), (19, 1), (140, 1), (64, 1)],
    "mixed": [(75, 1), (6, 1), (40, 40), (9, 3)],
    "chunk": [(90, 17), (33, 32), (70, 5)],
}


@pytest.mark.parametrize(("cls", "device", "dtype"), PLACES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(2, 2, 64, 16), (4, 1, 80, 4), (8, 1, 96, 16)]
)
def test_backend_equals_dense_attention(cls, device, dtype, batch, heads, kv_heads, dim, block):
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    check(cls, BATCHES[batch], spec, block, device, dtype)


@pytest.mark.parametrize(("cls", "device", "dtype"), PLACES)
@pytest.mark.parametrize("batch", ["decode", "mixed", "chunk"])
@pytest.mark.parametrize(("window", "cap"), [(1, None), (24, None), (None, 4.0), (33, 4.0)])
def test_sliding_window_and_soft_cap(cls, device, dtype, batch, window, cap):
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        scale=0.1,
        sliding_window=window,
        soft_cap=cap,
    )
    check(cls, BATCHES[batch], spec, 16, device, dtype)


@pytest.mark.parametrize(("cls", "device", "dtype"), PLACES)
def test_keys_and_values_may_be_views_of_a_fused_projection(cls, device, dtype):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)
    batch = make_batch([(30, 1), (20, 20)], spec, 4, device, dtype)
    parts = [batch.joined(name).flatten(1) for name in ("query", "key", "value")]
    fused = torch.cat(parts, dim=1).split([128, 64, 64], dim=1)
    query, key, value = (part.view(len(part), -1, 32) for part in fused)
    assert not key.is_contiguous()
    backend = make_backend(cls, device, dtype, 4)
    got = attend(backend, spec, batch.cache, batch.layout, query, key, value)
    want = dense_attention(spec, batch.rows)
    assert_near(got.float(), want, dtype)


@pytest.mark.parametrize("window", [None, 20])
def test_torch_backend_gives_the_same_in_small_pieces(monkeypatch, window):
    # One row a gather, one query a product: the memory bounds must not show in the result.
    monkeypatch.setattr(torch_backend, "GATHER_ELEMENTS", 1)
    monkeypatch.setattr(torch_backend, "SCORE_ELEMENTS", 400)
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, sliding_window=window
    )
    sizes = [(75, 1), (6, 1), (40, 31), (9, 1), (12, 1)]
    check(TorchAttention, sizes, spec, 4, torch.device("cpu"), torch.float32)


def test_torch_backend_cuts_a_gather_that_is_mostly_padding(monkeypatch):
    monkeypatch.setattr(torch_backend, "PADDING_ALLOWED", 50)
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    batch = make_batch([(5, 1), (6, 1), (400, 1)], spec, 4, torch.device("cpu"), torch.float32)
    backend = make_backend(TorchAttention, torch.device("cpu"), torch.float32, 4)
    chunks = backend._decode_chunks(spec, backend.build_metadata(batch.layout))
    assert [(c.first_row, c.end_row) for c in chunks] == [(0, 2), (2, 3)]


def test_supports_names_the_reason():
    cpu = torch.device("cpu")
    uneven = AttentionSpec(num_heads=3, num_kv_heads=2, head_dim=16, scale=1.0)
    wide = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=512, scale=1.0)
    for cls in (TorchAttention, TritonAttention):
        device = torch.device("cuda") if CUDA else cpu
        assert "num_heads (3)" in cls.supports(uneven, device, torch.float32)
        assert "int8" in cls.supports(wide, device, torch.int8)
    assert "head_dim 512" in TritonAttention.supports(wide, DEVICES[-1], torch.float32)
    assert TorchAttention.supports(wide, cpu, torch.float32) is None


def _ask_elsewhere(prelude: str) -> str:
    """What TritonAttention.supports says of a CPU layer in a process of its own."""
    program = prelude + (
        "\nimport torch\n"
        "from jackfield.core.protocols import AttentionSpec\n"
        "from jackfield.plugins.attention.triton import TritonAttention\n"
        "spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)\n"
        "print(TritonAttention.supports(spec, torch.device('cpu'), torch.float32))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_triton_backend_without_a_gpu_or_without_triton_says_so():
    assert _ask_elsewhere("") == "it needs a CUDA device"
    assert "triton cannot be imported" in _ask_elsewhere("import sys; sys.modules['triton'] = None")


@pytest.mark.gpu
def test_captured_decode_serves_other_lengths():
    device, dtype = torch.device("cuda"), torch.bfloat16
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5)
    short = make_batch([(3, 1), (9, 1), (2, 1)], spec, 16, device, dtype, seed=1)
    long = make_batch([(700, 1), (1, 1), (129, 1)], spec, 16, device, dtype, seed=2)
    table = torch.zeros_like(long.layout.block_table)
    table[:, : short.layout.block_table.shape[1]] = short.layout.block_table
    inputs = [short.joined(n).clone() for n in ("query", "key", "value")]
    cache = torch.full_like(long.cache, float("nan"))
    cache[:, : short.cache.shape[1]] = short.cache
    layout = BatchLayout(
        num_rows=3,
        num_tokens=3,
        max_query_len=1,
        max_seq_len=9,
        query_start=short.layout.query_start.clone(),
        seq_lens=short.layout.seq_lens.clone(),
        block_table=table,
        slot_mapping=short.layout.slot_mapping.clone(),
        query_start_cpu=short.layout.query_start_cpu,
        seq_lens_cpu=short.layout.seq_lens_cpu,
    )
    backend = make_backend(TritonAttention, device, dtype, 16)
    metadata = backend.build_metadata(layout)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.cat([part.flatten(1) for part in inputs], dim=1)
        fused = backend.forward_projection(spec, qkv, None, None, None, cache, metadata)
        return backend.forward(spec, *inputs, cache, metadata), fused

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for batch in (short, long):
        layout.seq_lens.copy_(batch.layout.seq_lens)
        layout.slot_mapping.copy_(batch.layout.slot_mapping)
        table.zero_()
        table[:, : batch.layout.block_table.shape[1]] = batch.layout.block_table
        cache[:, : batch.cache.shape[1]] = batch.cache
        for tensor, name in zip(inputs, ("query", "key", "value"), strict=True):
            tensor.copy_(batch.joined(name))
        graph.replay()
        want = dense_attention(spec, batch.rows)
        for out in outs:
            torch.testing.assert_close(out.float(), want, atol=2.5e-2, rtol=2.5e-2)


@pytest.mark.gpu
def test_long_fresh_rows_beside_others():
    """A row that takes torch's dense attention, between rows that cannot."""
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5)
    sizes = [(30, 1), (70, 40), (2200, 2200), (2100, 2050), (2048, 2048), (5, 5)]
    device, dtype = torch.device("cuda"), torch.bfloat16
    batch = make_batch(sizes, spec, 16, device, dtype)
    backend = make_backend(TritonAttention, device, dtype, 16)
    runs = backend.build_metadata(batch.layout).runs
    assert [(r.first_row, r.end_row, r.fresh) for r in runs] == [
        (1, 2, False), (2, 3, True), (3, 4, False), (4, 5, True), (5, 6, False),
    ]  # fmt: skip
    check(TritonAttention, sizes, spec, 16, device, dtype)
