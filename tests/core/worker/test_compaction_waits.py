"""Nothing in a compaction waits for the device, whichever the policy and the type of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.kv_cache.quantized_cache import KVCache, QuantizedCache, write_blocks
from jackfield.core.nn.latent.layer import LatentAttention
from jackfield.core.nn.operations import Operations
from jackfield.core.parts.kv_compression import Compaction
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.protocols.latent_attention import LatentAttentionSpec
from jackfield.core.registry import load_plugins
from jackfield.core.worker.parts.compacted_layers import compacted_layers
from jackfield.core.worker.parts.compaction import Compactor
from jackfield.core.worker.parts.query_ring import QueryRing
from jackfield.core.worker.slot_table import SlotTable

POLICIES = (
    "window", "key_norm", "key_diff", "snap_kv", "snap_kv_merge", "expected_attention", "r_kv",
    "r_kv_fast", "snap_kv_merge_fast", "weighted",
)  # fmt: skip
SIZE, TOKENS, KEPT = 4, 90, 40
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
"""Operations after which the host needs a number, or a shape, from the device."""
BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Those after which it does if an index is a mask."""


class Waits(TorchDispatchMode):
    """Notes operations for which the host of a GPU waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += 1
        by_mask = name in BY_MASK and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def compactor(
    policy: str, cache_type: str, device: torch.device, dtype: torch.dtype, num_layers: int
) -> tuple[Compactor, list[Compaction]]:
    """Two requests, of which one goes to fresh blocks and one stays within its first ones."""
    operations = Operations()
    if device.type == "cuda":
        from jackfield.plugins.operations.triton import TritonOperations

        operations = TritonOperations()
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5)
    columns = -(-TOKENS // SIZE)
    num_blocks = 1 + 3 * columns
    draw = torch.Generator().manual_seed(0)
    slots = torch.arange(num_blocks * SIZE, device=device)
    layers = []
    for _ in range(num_layers):
        layer = Attention(spec, BuildContext(device, dtype, operations))
        wide = torch.randn(2, num_blocks, SIZE, 2, 32, generator=draw).to(device, dtype)
        cache: KVCache = wide
        if cache_type == "fp8":
            cache = wide.to(torch.float8_e4m3fn)
        elif cache_type != "auto":
            cache = QuantizedCache.of({
                part.name: torch.zeros(
                    part.count, num_blocks, SIZE, *part.shape,
                    dtype=getattr(torch, part.dtype), device=device,
                )
                for part in QUANTIZED_FORMATS[cache_type].parts(2, 32)
            })  # fmt: skip
            write_blocks(*wide.flatten(1, 2), cache, slots)
        layer.kv_cache = cache
        layers.append(layer)
    table = SlotTable(
        num_slots=2, max_model_len=TOKENS + 8, block_size=SIZE, device=device, compacts=True
    )
    order = torch.randperm(2 * columns, generator=draw).int().view(2, columns) + 1
    table.block_table[:2, :columns] = order.to(device)
    built = load_plugins()["kv_compressor"].load(policy)()
    ring, seen = None, compacted_layers(layers, TOKENS)
    if built.num_queries:
        ring = QueryRing(seen, 2, built.num_queries, device, dtype)
        for layer in layers:
            assert layer.query_ring is not None
            layer.query_ring.normal_()
    fresh = tuple(range(1 + 2 * columns, 1 + 2 * columns + KEPT // SIZE))
    own = tuple(order[1, : KEPT // SIZE].tolist())
    compactions = [Compaction(0, TOKENS, KEPT, (fresh,)), Compaction(1, TOKENS, KEPT, (own,))]
    return Compactor(
        built, policy, seen, table, SIZE, operations, dtype=dtype, ring=ring
    ), compactions


def test_every_policy_is_here() -> None:
    assert sorted(POLICIES) == sorted(load_plugins()["kv_compressor"])


@pytest.mark.parametrize("cache_type", ["auto", "fp8", "int8_int4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_operation_of_a_compaction_waits(
    policy: str, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton's interpreter reads numbers, which a GPU's kernels do not.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subject, compactions = compactor(policy, cache_type, torch.device("cpu"), torch.float32, 2)
    with torch.inference_mode(), Waits() as waits:
        assert subject.run(compactions) == {}
    assert waits.count > 10 and waits.seen == []


@pytest.mark.parametrize("policy", ["key_norm", "snap_kv"])
def test_nor_does_one_of_latents_beside_a_window(policy: str) -> None:
    """A layer with a window in the table of another keeps the most recent tokens."""
    device, dtype = torch.device("cpu"), torch.float32
    build = BuildContext(device, dtype, Operations())
    spec = LatentAttentionSpec(
        num_heads=2, latent_dim=12, rope_dim=4, nope_dim=6, value_dim=5, scale=0.3
    )
    latent = LatentAttention(spec, build, interleaved=False)
    window = Attention(
        AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=0.3, sliding_window=24), build
    )
    columns = -(-TOKENS // SIZE)
    latent.latent_cache = torch.randn(3 * columns, SIZE, 16)
    latent.absorbed = torch.randn(2, 11, 12)
    window.kv_cache = torch.randn(2, 3 * columns, SIZE, 1, 8)
    before = latent.latent_cache.clone(), window.kv_cache.clone()
    table = SlotTable(
        num_slots=1, max_model_len=TOKENS + 8, block_size=SIZE, device=device, compacts=True
    )
    table.block_table[0, :columns] = torch.arange(columns).int() + 1
    layers = compacted_layers([latent, window], TOKENS)
    built = load_plugins()["kv_compressor"].load(policy)()
    ring = QueryRing(layers, 1, built.num_queries, device, dtype) if built.num_queries else None
    assert (latent.query_ring is None) == (ring is None) and window.query_ring is None
    fresh = tuple(range(columns + 1, columns + 1 + KEPT // SIZE))
    subject = Compactor(built, policy, layers, table, SIZE, Operations(), dtype, ring)
    with torch.inference_mode(), Waits() as waits:
        assert subject.run([Compaction(0, TOKENS, KEPT, (fresh,))]) == {}
    assert waits.seen == []
    old, new = slice(SIZE, SIZE + TOKENS), slice(fresh[0] * SIZE, fresh[0] * SIZE + KEPT)
    rows = before[0].flatten(0, 1)[old], latent.latent_cache.flatten(0, 1)[new]
    assert all((row == rows[0]).all(1).any() for row in rows[1])
    recent = before[1].flatten(1, 2)[:, old][:, -KEPT:]
    assert torch.equal(window.kv_cache.flatten(1, 2)[:, new], recent)


def test_the_mode_notes_what_waits() -> None:
    x = torch.arange(4.0)
    with Waits() as waits:
        x[x > 1].sum().item()
        x[torch.tensor([1])]
    assert waits.seen == ["index", "_local_scalar_dense"]


@pytest.mark.gpu
@pytest.mark.parametrize("cache_type", ["auto", "fp8", "int8", "int8_int4", "int4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_is_not_waited_for(policy: str, cache_type: str) -> None:
    """Of so many layers, each is moved on its own where values are merged: what is kept for them
    on the device must not be sent again."""
    subject, compactions = compactor(policy, cache_type, torch.device("cuda"), torch.bfloat16, 70)
    with torch.inference_mode():
        subject.warm_up()
        torch.cuda.set_sync_debug_mode("error")
        try:
            failures = subject.run(compactions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert failures == {}
