"""Compiles the kernels of batch-invariant steps, and prints the registers that each uses."""

import re

import torch
from offline_driver import usage

from jackfield.core.nn.quantized_weight import QuantizedWeight
from jackfield.core.nn.routing import RoutingRule
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.kernels.attention.paged_attention_prefill import paged_attention_prefill
from jackfield.kernels.compile import Precompiler
from jackfield.plugins.attention.triton_call import layer_arguments
from jackfield.plugins.operations.triton_invariant import InvariantTritonOperations

T, HIDDEN, INNER, E, TOP_K = 64, 4096, 14336, 128, 8
INNER_ROWS = torch.empty(T, INNER, dtype=torch.bfloat16)


def made(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def fp8(rows, size):
    return QuantizedWeight(made(rows, size, dtype=torch.float8_e4m3fn), torch.empty(1, rows), size)


def words(rows, size):
    values = made(rows, size // 8, dtype=torch.int32)
    return QuantizedWeight(values, made(size // 128, rows), 128, bits=4)


def attention(spec):
    cache = made(2, 64, 16, spec.num_kv_heads, spec.head_dim)
    table, starts = made(T, 64, dtype=torch.int32), made(T + 1, dtype=torch.int32)
    paged_attention_prefill(
        made(T, spec.num_heads, spec.head_dim), cache, table, starts, made(T, dtype=torch.int32),
        **layer_arguments(spec), max_query_len=1, uniform=True,
    )  # fmt: skip


operations = InvariantTritonOperations()
x, logits = made(T, HIDDEN), made(T, E)
steps = {
    "qkv": lambda: operations.linear(x, made(6144, HIDDEN)),
    "out": lambda: operations.linear(x, made(HIDDEN, HIDDEN), residual=made(T, HIDDEN)),
    "gate": lambda: operations.gated_linear(x, made(2 * INNER, HIDDEN)),
    "down": lambda: operations.linear(INNER_ROWS, made(HIDDEN, INNER), residual=made(T, HIDDEN)),
    "many rows": lambda: operations.linear(made(4096, HIDDEN), made(HIDDEN, HIDDEN)),
    "head": lambda: operations.linear(x, made(128256, HIDDEN)),
    "fp8": lambda: operations.quantized_linear(x, fp8(HIDDEN, HIDDEN)),
    "4 bits": lambda: operations.quantized_linear(x, words(HIDDEN, HIDDEN)),
    "experts": lambda: operations.experts(
        x, operations.route(logits, RoutingRule(TOP_K, renormalize=True)),
        made(E * 2 * 768, HIDDEN), made(E * HIDDEN, 768), residual=made(T, HIDDEN),
    ),
    **{
        f"attention {dim} {window}": lambda dim=dim, window=window: attention(
            AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=dim, scale=1.0,
                          sliding_window=window)
        )
        for dim in (64, 128, 256) for window in (None, 4096)
    },
}  # fmt: skip
for name, step in steps.items():
    with Precompiler(torch.device("cpu"), threads=1) as precompiler:
        step()
        futures = list(precompiler._pool.futures)
    for future in futures:
        kernel = future.result()
        used = usage(kernel)
        print(kernel.metadata.name, name, used, kernel.metadata.shared)
        assert used["STACK"] == "0", f"{name} spills: {used}"
        if re.search("matmul|prefill", kernel.metadata.name):
            assert "wgmma" in kernel.asm["ptx"], f"{name} is not on the matrix unit"
