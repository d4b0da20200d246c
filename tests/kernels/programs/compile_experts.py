"""Compiles the kernels of a mixture's layer, and prints the registers that each uses."""

import re
import sys

import torch
from offline_driver import usage

from jackfield.core.nn.activations import ClampedSwiGLU, LimitedSwiGLU
from jackfield.core.nn.operations import Norm
from jackfield.core.nn.quantized_weight import QuantizedWeight, e2m1_run
from jackfield.core.nn.routing import RoutingRule
from jackfield.kernels.compile import Precompiler
from jackfield.kernels.moe import slots
from jackfield.plugins.operations.triton import TritonOperations

more, E, TOP_K, HIDDEN, INNER = {}, 128, 8, 2048, 768
kinds = {"bf16": (1, 64, 8192), "fp8": (64,), "words": (1, 64)}
if sys.argv[2] == "gpt-oss-20b":
    E, TOP_K, HIDDEN, INNER = 32, 4, 2880, 2880
    kinds = {"bf16": (1, 64, 8192), "fp8 groups": (1, 64, 256, 2048), "e2m1": (1, 64, 256, 2048)}
    more["gate_up_bias"] = torch.empty(E * 2 * INNER, dtype=torch.bfloat16)
    more["down_bias"] = torch.empty(E * HIDDEN, dtype=torch.bfloat16)
    more["activation"] = ClampedSwiGLU(1.702, 7.0)
elif sys.argv[2] == "nemotron-3-nano":
    E, TOP_K, HIDDEN, INNER = 128, 6, 2688, 1856
    kinds = {"bf16": (1, 64, 8192), "fp8": (64,)}
    more["activation"] = "relu2"
elif sys.argv[2] == "gemma-4-26b-a4b":
    E, TOP_K, HIDDEN, INNER = 128, 8, 2816, 704
    kinds = {"bf16": (1, 64, 8192), "fp8": (64,)}
    more["activation"] = "gelu"
elif sys.argv[2] == "step-3.5-flash":
    E, TOP_K, HIDDEN, INNER = 288, 8, 4096, 1280
    kinds = {"bf16": (1, 64, 8192), "fp8": (64,)}
    more["activation"] = LimitedSwiGLU(7.0)
LAYERS = 1 if more.get("activation") == "relu2" else 2


def bank(kind, rows, size):
    if kind == "bf16":
        return torch.empty(rows, size, dtype=torch.bfloat16)
    if kind == "fp8 groups":
        values = torch.empty(rows, size, dtype=torch.float8_e4m3fn)
        return QuantizedWeight(values, torch.empty(size // 32, rows, dtype=torch.bfloat16), 32)
    if kind == "fp8":
        values, scale = torch.empty(rows, size, dtype=torch.float8_e4m3fn), torch.empty(1, rows)
        return QuantizedWeight(values, scale, size)
    words = torch.empty(rows, size // 8, dtype=torch.int32)
    if kind == "e2m1":
        scale = torch.empty(size // 32, rows, dtype=torch.bfloat16)
        return QuantizedWeight(words, scale, 32, bits=4, e2m1_run=e2m1_run(size, 32))
    scale = torch.empty(size // 128, rows, dtype=torch.bfloat16)
    return QuantizedWeight(words, scale, 128, bits=4)


operations = TritonOperations()
for kind, tokens in kinds.items():
    gate_up, down = bank(kind, E * LAYERS * INNER, HIDDEN), bank(kind, E * HIDDEN, INNER)
    for num_tokens in tokens:
        x = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
        logits = torch.empty(num_tokens, E, dtype=torch.bfloat16)
        with Precompiler(torch.device("cpu"), threads=1) as precompiler:
            rule = RoutingRule(TOP_K, renormalize=True)
            if num_tokens == 1:
                norm = Norm(torch.empty(HIDDEN, dtype=torch.bfloat16), 1e-6)
                weight = torch.empty(E, HIDDEN, dtype=torch.bfloat16)
                x, logits = operations.normed_linear(x, norm, weight)
            routing = operations.route(logits, rule)
            residual = torch.empty_like(x)
            output = operations.experts(x, routing, gate_up, down, residual=residual, **more)
            assert output.shape == x.shape
            futures = list(precompiler._pool.futures)
        for future in futures:
            kernel = future.result()
            used = usage(kernel)
            name = f"{kind} {num_tokens} {kernel.metadata.name}"
            print(kernel.metadata.name, kind, num_tokens, used, kernel.metadata.shared)
            assert used["STACK"] == "0", f"{name} spills: {used}"
            if "matmul" in name:
                assert "wgmma" in kernel.asm["ptx"], f"{name} is not on the matrix unit"
            if kernel.metadata.name == "_expert_gemv_kernel":
                wide = re.findall(r"ld\.global\S*evict_first\S*\.v4", kernel.asm["ptx"])
                assert wide, f"{name} does not read 16 bytes at once"

# With dependent launches, weights are prefetched, of this rank's experts alone.
slots.pdl_options = lambda device: {"launch_pdl": True}
for kind in ("bf16", "words") if sys.argv[2] == "qwen3-30b-a3b" else ():
    gate_up, down = bank(kind, E * LAYERS * INNER, HIDDEN), bank(kind, E * HIDDEN, INNER)
    x, logits = (torch.empty(1, size, dtype=torch.bfloat16) for size in (HIDDEN, 2 * E))
    with Precompiler(torch.device("cpu"), threads=1) as precompiler:
        routing = operations.route(logits, RoutingRule(TOP_K))._replace(num_experts=2 * E)
        operations.experts(x, routing, gate_up, down, residual=torch.empty_like(x), **more)
        second = list(precompiler._pool.futures)[-1].result()
    prefetches = re.findall(r"(\S*)\s+cp\.async\.bulk\.prefetch", second.asm["ptx"])
    assert prefetches and all(guard.startswith("@%") for guard in prefetches), prefetches
