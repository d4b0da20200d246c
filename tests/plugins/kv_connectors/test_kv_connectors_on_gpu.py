"""Built-in connectors with the cache on a GPU: copies on streams of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_builtin_connectors import check_reduced
from test_kv_connector_kits import TestCpuOffload as CpuOffload
from test_kv_connector_kits import TestFileStore as FileStore
from test_kv_connector_kits import TestPeerStore as PeerStore

from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.kv_halves import Halves, bits, random_cache
from jackfield.plugins.kv_connectors import copying

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestCpuOffloadOnGpu(CpuOffload):
    device = "cuda"


class TestFileStoreOnGpu(FileStore):
    device = "cuda"


class TestPeerStoreOnGpu(PeerStore):
    device = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_in_chunks_while_the_device_computes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((8, 128), (2, 64), (1, 10))
    caches = [random_cache(64, 16, heads, dim, dtype).cuda() for heads, dim in shapes]
    before = [cache.clone() for cache in caches]
    block_bytes = sum(cache[:, 0].nbytes for cache in caches)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 7 * block_bytes)
    copier = copying.BlockCopier(caches)
    rows = copier.new_rows(70)
    blocks = torch.randperm(63)[:40].add(1).tolist()
    places = torch.randperm(70)[:40].tolist()
    copier.read(blocks, rows, places)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy.T / 4096
    for cache in caches:  # In the compute stream, behind what keeps it busy.
        with torch.inference_mode():
            cache.zero_()
    after: Any = torch.cuda.Event()
    after.record()
    copier.write(blocks, rows, places, after)
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(bits(cache[:, blocks]), bits(was[:, blocks]))
        others = [n for n in range(64) if n not in blocks]
        assert not bits(cache[:, others]).any()


@pytest.mark.parametrize("name", ["int8", "int8_int4", "int4"])
def test_blocks_are_kept_in_fewer_bits_on_the_device(name: Any) -> None:
    check_reduced(name, "cuda")


def test_a_pool_of_host_memory_is_pinned_as_it_lies() -> None:
    caches = [random_cache(8, 16, 2, 64, torch.bfloat16).cuda()]
    halves = Halves("cpu_offload", {"kv_offloading_size": 0.01}, load_plugins(), caches)
    assert halves.worker._pool.is_pinned()
    halves.close()
