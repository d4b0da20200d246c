"""What is particular to one attention backend; what they share is in `test_attention_kit.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import forked
import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jackfield.core.nn.layer_operations.heads import rotate
from jackfield.core.protocols.attention import AttentionBackend, AttentionSpec, BackendSetup
from jackfield.plugins.attention import torch as torch_backend
from jackfield.plugins.attention import triton as triton_backend
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.attention.triton import TritonAttention
from jackfield.plugins.attention.triton_invariant import InvariantTritonAttention
from jackfield.plugins.attention.triton_portable import PortableTritonAttention
from jackfield.plugins.conformance.attention_cases import bound_layer
from jackfield.plugins.conformance.paged import Batch, Sizes, dense_attention, make_batch

CUDA = torch.cuda.is_available()
DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if CUDA else [])]


def make_backend(
    cls: type[AttentionBackend], device: torch.device, dtype: torch.dtype, block_size: int
) -> AttentionBackend:
    setup = BackendSetup(
        device=device,
        dtype=dtype,
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    return cls.create(setup)


def attend(backend: AttentionBackend, spec: AttentionSpec, batch: Batch) -> torch.Tensor:
    parts = [batch.joined(name) for name in ("query", "key", "value")]
    for cache, part in zip(batch.cache, parts[1:], strict=True):
        cache.flatten(0, 1)[batch.layout.slot_mapping] = part
    return backend.forward(spec, *parts, batch.cache, backend.build_metadata(batch.layout))


def check(
    cls: type[AttentionBackend],
    sizes: Sizes,
    spec: AttentionSpec,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float = 2e-5,
) -> None:
    batch = make_batch(sizes, spec, block_size, device, dtype)
    actual = attend(make_backend(cls, device, dtype, block_size), spec, batch)
    expected = dense_attention(spec, batch.rows)
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("cls", "kernel"),
    [
        (TritonAttention, "Hopper's asynchronous units over 16-bit caches"),
        (PortableTritonAttention, "any GPU"),
        (InvariantTritonAttention, "any GPU"),
    ],
)
def test_a_backend_says_which_kernel_prompts_take(
    cls: type[AttentionBackend], kernel: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_backend, "has_hopper_kernel", lambda *arguments: True)
    setup = BackendSetup(
        device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16, max_num_seqs=16,
        max_num_batched_tokens=512, max_model_len=1024,
        layers=(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1),),
    )  # fmt: skip
    with caplog.at_level("INFO", "jackfield.attention"):
        cls.create(setup)
    assert caplog.messages == [f"prompts with heads of 64 channels take the kernel for {kernel}"]


class KeywordAttention(TorchAttention):
    """Written for version 2 of the hooks."""

    def __init__(self, *, block_size: int, max_model_len: int, **sizes: Any) -> None:
        self.block_size, self.device = block_size, sizes["device"]
        self.others = {"max_model_len": max_model_len, **sizes}


def test_a_constructor_with_keywords_gets_the_fields_of_the_setup() -> None:
    device = torch.device("cpu")
    with pytest.warns(DeprecationWarning, match=f"{__name__}.*BackendSetup"):
        backend: Any = make_backend(KeywordAttention, device, torch.float32, 8)
    assert backend.block_size == 8
    assert backend.others == {
        "device": device, "dtype": torch.float32, "max_num_seqs": 16,
        "max_num_batched_tokens": 512, "max_model_len": 1024,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_backend(TorchAttention, device, torch.float32, 8)


@pytest.mark.parametrize("rows", [2, 70])
def test_triton_decodes_few_rows_from_the_projection_and_leaves_the_rest(rows: int) -> None:
    device, dtype = DEVICES[-1], torch.float32
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    backend = make_backend(TritonAttention, device, dtype, 16)
    backend.max_num_seqs = 80
    for sizes, num_fused in (([(9, 1)] * rows, rows * 2 <= 128), ([(9, 1), (9, 9)], False)):
        batch = make_batch(sizes, spec, 16, device, dtype)
        parts = [batch.joined(name) for name in ("query", "key", "value")]
        qkv = torch.cat([part.flatten(1) for part in parts], dim=1)
        metadata = backend.build_metadata(batch.layout)
        cache = batch.cache.clone()
        layer = bound_layer(spec, replace(batch, cache=cache), dtype)
        project = backend.plan_projection(layer)
        assert project is not None
        fused = project(layer, qkv, None, None, None, metadata, None)
        assert (fused is not None) == num_fused
        plain = attend(backend, spec, batch)
        if fused is not None:
            torch.testing.assert_close(fused, plain)
            torch.testing.assert_close(cache, batch.cache, atol=0, rtol=0, equal_nan=True)


def test_triton_turns_tokens_by_the_positions_that_it_is_given() -> None:
    """Behind pictures these are not the places in the cache."""
    device, dtype = DEVICES[-1], torch.float32
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    backend = make_backend(TritonAttention, device, dtype, 16)
    batch = make_batch([(9, 1), (30, 1)], spec, 16, device, dtype)
    table = torch.randn(64, 16, device=device)
    positions = torch.tensor([3, 50], device=device)
    metadata = backend.build_metadata(batch.layout)
    given = [batch.joined(name) for name in ("query", "key", "value")]
    turned = [rotate(part, table[positions][:, None]) for part in given[:2]]
    outputs = []
    for parts, more in (((*turned, given[2]), None), (given, table)):
        qkv = torch.cat([part.flatten(1) for part in parts], dim=1)
        layer = bound_layer(spec, replace(batch, cache=batch.cache.clone()), dtype)
        project = backend.plan_projection(layer)
        assert project is not None
        where = {} if more is None else {"positions": positions}
        outputs.append(project(layer, qkv, more, None, None, metadata, None, **where))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("within", [{}, {"sliding_window": 20}, {"attention_chunk_size": 20}])
def test_torch_backend_gives_the_same_in_small_pieces(monkeypatch, within):
    # One row a gather, one query a product: the memory bounds must not show in the result.
    monkeypatch.setattr(torch_backend, "GATHER_ELEMENTS", 1)
    monkeypatch.setattr(torch_backend, "SCORE_ELEMENTS", 400)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, **within)
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
    wide = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=640, scale=1.0)
    shared = AttentionSpec(num_heads=72, num_kv_heads=1, head_dim=512, scale=1.0)
    for cls in (TorchAttention, TritonAttention):
        device = torch.device("cuda") if CUDA else cpu
        assert "num_heads (3)" in cls.supports(uneven, device, torch.float32)
        assert "int8" in cls.supports(wide, device, torch.int8)
    assert "head_dim 640" in TritonAttention.supports(wide, DEVICES[-1], torch.float32)
    assert "more than 64 heads of 512" in TritonAttention.supports(
        shared, DEVICES[-1], torch.float32
    )
    few = msgspec.structs.replace(shared, num_heads=64)
    assert TritonAttention.supports(few, DEVICES[-1], torch.float32) is None
    assert TorchAttention.supports(wide, cpu, torch.float32) is None


def test_a_layer_has_chunks_or_a_window():
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "scale": 1.0}
    with pytest.raises(ValueError, match="not both"):
        AttentionSpec(**shape, attention_chunk_size=8, sliding_window=8)
    with pytest.raises(ValueError, match="chunk_lookback needs"):
        AttentionSpec(**shape, sliding_window=8, chunk_lookback=1)


def _ask_elsewhere(prelude: str, run: Any = subprocess.run) -> str:
    """What TritonAttention.supports says of a CPU layer in a process of its own."""
    program = prelude + (
        "\nimport torch\n"
        "from jackfield.core.protocols import AttentionSpec\n"
        "from jackfield.plugins.attention.triton import TritonAttention\n"
        "spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)\n"
        "print(TritonAttention.supports(spec, torch.device('cpu'), torch.float32))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def test_triton_backend_without_a_gpu_or_without_triton_says_so():
    assert _ask_elsewhere("", forked.run) == "it needs a CUDA device"
    assert "triton cannot be imported" in _ask_elsewhere("import sys; sys.modules['triton'] = None")


@pytest.mark.gpu
def test_long_rows_beside_others() -> None:
    """Rows with and without cached tokens, after one that takes the decode kernel."""
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5)
    sizes = [(30, 1), (70, 40), (2300, 2300), (2100, 2050), (5, 5)]
    check(TritonAttention, sizes, spec, 16, torch.device("cuda"), torch.bfloat16, 2.5e-2)
