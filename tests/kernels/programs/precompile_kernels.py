"""Compiles kernels ahead, on threads; failures are raised at the launch."""

import threading

import torch
import triton
import triton.language as tl
from launch_driver import compiled, launched
from triton.runtime.cache import triton_key

from jackfield.kernels.activations import silu_mul
from jackfield.kernels.compile import Precompiler, load_compiler
from jackfield.kernels.launch import launch


@triton.jit
def wrong(out_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 4, "too large for this kernel")
    tl.store(out_ptr, SIZE)


@triton.jit
def slow(out_ptr):
    at = tl.arange(0, 64)
    x = tl.load(out_ptr + at[:, None] * 64 + at[None, :])
    for _ in tl.static_range(40):
        x = tl.dot(x, x)
    tl.store(out_ptr + at[:, None] * 64 + at[None, :], x)


@triton.jit
def other(out_ptr):
    tl.store(out_ptr, 1)


failures = []


@triton.jit
def crowded(out_ptr):
    tl.store(out_ptr, 2)


def compile_alone(*arguments, **options):
    if threading.current_thread() is not threading.main_thread():
        failures.append(threading.current_thread().name)
        raise MemoryError("too many compilers")
    return triton.compile(*arguments, **options)


crowded.device_caches[0]
crowded.compile = compile_alone

assert not triton_key.cache_info().misses
load_compiler(torch.device("cpu"))
assert triton_key.cache_info().misses == 1 <= triton_key.cache_info().hits, "hashed ahead, once"
assert [name for name, _ in compiled] == ["_smallest_kernel"]
compiled.clear()
x = torch.ones(2, 64)
number = torch.zeros(1, dtype=torch.int32)
with Precompiler(torch.device("cpu"), threads=2) as kernels:
    launch(slow, (1,))(torch.zeros(64, 64))
    silu_mul(x)
    assert kernels.lacks("a model")
    silu_mul(x.to(torch.bfloat16))
    silu_mul(x)
    launch(wrong, (1,))(number, SIZE=8)
    launch(crowded, (1,))(number)
    assert launched == []
    other[(1,)](number)
    assert launched == ["other"]
threads = {thread.partition("_")[0] for _, thread in compiled}
assert threads == {"jackfield-compile", "MainThread"}, threads
assert len(failures) == 1 and ("crowded", "MainThread") in compiled
assert not any("compile" in thread.name for thread in threading.enumerate())
assert sorted(name for name, _ in compiled) == [
    "_gated_activation_kernel",
    "_gated_activation_kernel",
    "crowded",
    "other",
    "slow",
]

silu_mul(x)
silu_mul(x.to(torch.bfloat16))
assert launched == ["other", *["_gated_activation_kernel"] * 2] and len(compiled) == 5
# The failures above left it open whether the cache has all.
for lacks in (True, False):
    with Precompiler(torch.device("cpu"), threads=2) as kernels:
        silu_mul(torch.ones(2, 48))
        assert kernels.lacks("a model") is lacks
        other[(1,)](number)
    with Precompiler(torch.device("cpu"), threads=2) as kernels:
        assert kernels.lacks("another model") is lacks
for _ in range(2):
    try:
        launch(wrong, (1,))(number, SIZE=8)
    except triton.compiler.CompilationError as error:
        assert "too large for this kernel" in str(error)
    else:
        raise AssertionError("a kernel that does not compile was launched")
