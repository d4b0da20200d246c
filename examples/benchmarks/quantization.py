"""Quantized Qwen3-8B on a GPU: are the kernels right, how fast is each, how fast is the model?

    python examples/benchmarks/quantization.py check
    python examples/benchmarks/quantization.py kernels [--sweep]
    python examples/benchmarks/quantization.py model --method fp8 --out docs/benchmarks/quant.jsonl

`check` compares each kernel with its torch twin in bfloat16 at the model's shapes, and exits with 1
if one is off. `kernels` times a product of each layer, by format and number of tokens, with the
share of the bytes' floor; `--sweep` tries other tiles of the 8-bit kernels and names the best (of
4 bits `jackfield bench tune` does). `model`
runs the engine on random weights: milliseconds per step at batch 1, 16 and 64, and prompt tokens a
second. Every number is also printed as a JSON line, and appended to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936,
    "max_position_embeddings": 40960, "head_dim": 128, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"hf_overrides": {"quantization_config": {
        "quant_method": "rtn", "bits": 4, "group_size": 128}}},
}  # fmt: skip
PROJECTIONS = {  # name: rows, columns, gated
    "qkv": (6144, 4096, False), "output": (4096, 4096, False),
    "gate and up": (24576, 4096, True), "down": (4096, 12288, False),
}  # fmt: skip
FORMATS = ("bf16", "fp8", "int8", "int4")
BF16 = torch.bfloat16


class Report:
    """Prints records, and keeps them."""

    def __init__(self, out: str | None) -> None:
        self._out = Path(out) if out else None
        self._about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip

    def add(self, **record: Any) -> None:
        line = json.dumps({**record, **self._about})
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")


def packed(name: str, rows: int, size: int) -> Any:
    """A random weight of [rows, size] in a format, as the operations take it."""
    from jackfield.core.nn.quantized_weight import (
        QuantizedWeight,
        round_to_fp8,
        round_to_int8,
        round_to_words,
    )

    dense = torch.randn(rows, size, device="cuda", dtype=BF16) / size**0.5
    if name == "int4":
        words, scale = round_to_words(dense, 4, 128)
        return QuantizedWeight(words, scale, 128, bits=4)
    values, row_scale = (round_to_fp8 if name == "fp8" else round_to_int8)(dense)
    return QuantizedWeight(values, row_scale[None], size, inputs="quantized")


# ---------------------------------------------------------------- check


def check(report: Report) -> bool:
    """Kernels against twins, and the whole product against a float32 one."""
    from jackfield.core.nn.operations import Norm, Operations
    from jackfield.kernels import reference
    from jackfield.kernels.quant.dequantize import dequantize_weight
    from jackfield.kernels.quant.quantize_rows import quantize_rows
    from jackfield.plugins.operations.triton import TritonOperations

    fine = True

    def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
        nonlocal fine
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        right = error <= bound
        fine &= right
        report.add(check=what, error=error, bound=bound, right=right)

    torch.manual_seed(0)
    x = torch.randn(300, 4096, device="cuda", dtype=BF16)
    norm = (torch.rand(4096, device="cuda", dtype=BF16) + 0.5, 1e-6)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for static_scale in (None, torch.tensor([0.02], device="cuda")):
            values, scales = quantize_rows(x, dtype, norm=norm, scale=static_scale)
            expected, want_scales = reference.quantize_rows(x, dtype, norm=norm, scale=static_scale)
            actual, target = (
                values.float() * scales[:, None],
                expected.float() * want_scales[:, None],
            )
            compare(
                f"quantize_rows {dtype} given={static_scale is not None}",
                actual,
                target,
                5e-3,
            )
    triton, plain = TritonOperations(), Operations()
    for name, (projection, (rows, size, gated)) in itertools.product(
        FORMATS[1:], PROJECTIONS.items()
    ):
        weight = packed(name, rows, size)
        dense = reference.dequantize_weight(weight, torch.float32)
        compare(f"unpack {name} {projection}", dequantize_weight(weight, BF16), dense, 4e-3)
        for tokens in (1, 2, 16, 17, 64, 128, 256, 300):
            x = torch.randn(tokens, size, device="cuda", dtype=BF16)
            scale = Norm(torch.rand(size, device="cuda", dtype=BF16) + 0.5, 1e-6)
            bias = torch.randn(rows, device="cuda", dtype=BF16) / 10
            residual = None if gated else torch.randn(tokens, rows, device="cuda", dtype=BF16)
            residual_before = None if residual is None else residual.clone()
            output = triton.quantized_linear(
                x, weight, bias, norm=scale, residual=residual, gated=gated
            )
            wide = Norm(scale.weight.float(), scale.eps)
            expected = plain.linear(x.float(), dense, bias.float(), norm=wide)
            if gated:
                expected = plain.silu_mul(expected)
            elif residual_before is not None:
                expected = expected + residual_before.float()
            # Inputs are rounded to 8 bits as well from 17 tokens on, but for int4.
            rounded = tokens > 16 and name != "int4"
            compare(f"{name} {projection} x{tokens}", output, expected, 4e-2 if rounded else 1e-2)
    graph_check(triton, compare)
    return fine


def graph_check(triton: Any, compare: Callable[..., None]) -> None:
    """A recorded product reads its inputs anew at each replay."""
    for name, tokens in itertools.product(FORMATS[1:], (1, 16, 64)):
        weight = packed(name, 4096, 4096)
        x = torch.randn(tokens, 4096, device="cuda", dtype=BF16)
        triton.quantized_linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = triton.quantized_linear(x, weight)
        x.copy_(torch.randn_like(x))
        graph.replay()
        compare(f"recorded {name} x{tokens}", out, triton.quantized_linear(x, weight), 0.0)


# ---------------------------------------------------------------- kernels


def seconds(make: Callable[[], Callable[[], object]], copies: int) -> float:
    """Of one call, from a recorded run over `copies` sets of tensors: more than the L2 holds."""
    works = [make() for _ in range(copies)]
    for work in works:
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [work() for work in works]
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del results
    return statistics.median(times[2:]) / copies


def product(name: str, rows: int, size: int, gated: bool, tokens: int, config: Any = None) -> Any:
    """→ a maker of fresh tensors and the call on them; (norm) → product → gate."""
    from jackfield.core.nn.operations import Norm
    from jackfield.kernels.linear.gemv import gemv
    from jackfield.kernels.linear.small_m_matmul import MAX_TILES, SplitKWorkspace, small_m_matmul
    from jackfield.plugins.operations.triton import TritonOperations

    operations = TritonOperations()

    def make() -> Callable[[], object]:
        x = torch.randn(tokens, size, device="cuda", dtype=BF16)
        norm = Norm(torch.rand(size, device="cuda", dtype=BF16), 1e-6)
        if name == "bf16":
            dense = torch.randn(rows, size, device="cuda", dtype=BF16)
            call = operations.gated_linear if gated else operations.linear
            return lambda: call(x, dense, norm=norm)
        weight = packed(name, rows, size)
        if config is not None and tokens == 1:
            return lambda: gemv(x, weight, norm=norm, gated=gated, config=config)
        if config is not None:
            room = SplitKWorkspace(
                torch.empty(tokens * rows * config.split_k, device="cuda"),
                torch.zeros(MAX_TILES, device="cuda", dtype=torch.int32),
            )
            return lambda: small_m_matmul(x, weight, config=config, workspace=room)
        return lambda: operations.quantized_linear(x, weight, norm=norm, gated=gated)

    return make


BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}


def kernels(report: Report, sweep: bool, bandwidth: float) -> None:
    """Each projection; `bandwidth` in bytes per second is what the floor assumes."""
    for tokens, name in itertools.product((1, 4, 16, 64, 128, 256, 2048), FORMATS):
        whole = 0.0
        for projection, (rows, size, gated) in PROJECTIONS.items():
            size_bytes = rows * size * BYTES[name]
            copies = max(2, int(3e8 // size_bytes) + 1)
            took = seconds(product(name, rows, size, gated, tokens), copies)
            whole += took
            report.add(
                kernel=name, projection=projection, tokens=tokens, us=round(took * 1e6, 2),
                share_of_floor=round(size_bytes / bandwidth / took, 3),
            )  # fmt: skip
        report.add(kernel=name, projection="a layer", tokens=tokens, us=round(whole * 1e6, 2))
    for tokens, one_scale in itertools.product((64, 2048, 8192), (False, True)):
        scaled_products(report, tokens, one_scale)
    if sweep:
        for name, tokens in itertools.product(("fp8", "int8"), (1, 4, 16)):
            sweep_configs(report, name, tokens)


def scaled_products(report: Report, tokens: int, one_scale: bool) -> None:
    """torch's fp8 product alone: a scale a row and token, as used here, or one for all."""
    for projection, (rows, size, _) in PROJECTIONS.items():

        def make(rows: int = rows, size: int = size) -> Callable[[], object]:
            x = torch.randn(tokens, size, device="cuda").to(torch.float8_e4m3fn)
            weight = torch.randn(rows, size, device="cuda").to(torch.float8_e4m3fn)
            ones = [torch.ones(1, device="cuda") for _ in range(2)]
            if not one_scale:
                ones = [torch.ones(tokens, 1, device="cuda"), torch.ones(1, rows, device="cuda")]
            return lambda: torch._scaled_mm(
                x, weight.t(), scale_a=ones[0], scale_b=ones[1], out_dtype=BF16,
                use_fast_accum=True,
            )  # fmt: skip

        took = seconds(make, 4)
        report.add(
            kernel="scaled_mm", scales="one" if one_scale else "rows", projection=projection,
            tokens=tokens, us=round(took * 1e6, 2),
            tflops=round(2e-12 * tokens * rows * size / took, 1),
        )  # fmt: skip


def sweep_configs(report: Report, name: str, tokens: int) -> None:
    """The fastest tiles of a projection."""
    for projection, (rows, size, gated) in PROJECTIONS.items():
        copies = max(2, int(3e8 // (rows * size * BYTES[name])) + 1)
        timings = []
        for config in _configs(tokens):
            make = product(name, rows, size, gated and tokens == 1, tokens, config=config)
            try:
                timings.append((seconds(make, copies), config))
            except Exception as error:  # Tiles that do not fit the chip.
                report.add(
                    sweep=name, projection=projection, config=list(config), refused=str(error)[:80]
                )
        for took, config in sorted(timings)[:3]:
            report.add(
                sweep=name, projection=projection, tokens=tokens, us=round(took * 1e6, 2),
                config=config._asdict(),
            )  # fmt: skip


def _configs(tokens: int) -> Iterator[Any]:
    from jackfield.kernels.linear.gemv import GemvConfig
    from jackfield.kernels.linear.small_m_matmul import SmallMConfig

    if tokens == 1:
        widths = (512, 1024, 2048, 4096)
        for tile in itertools.product((1, 2, 4, 8, 16), widths, (1, 2, 4, 8)):
            yield GemvConfig(*tile)
        return
    for tile in itertools.product((16,), (32, 64, 128), (128, 256), (1, 2, 4), (4, 8), (3, 4, 5)):
        yield SmallMConfig(*tile)


# ---------------------------------------------------------------- model


async def model(report: Report, method: str, layers: int | None) -> None:
    """The engine, decoding and reading prompts."""
    from jackfield import AsyncEngine, EngineConfig

    with tempfile.TemporaryDirectory() as folder:
        config = dict(CONFIG, num_hidden_layers=layers or CONFIG["num_hidden_layers"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = EngineConfig(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=64, enable_prefix_caching=False, **METHODS[method],
        )  # fmt: skip
        start = time.monotonic()
        async with AsyncEngine(options) as engine:
            info = engine.info
            report.add(
                model=method, ready_s=round(time.monotonic() - start, 2),
                weight_gib=round(info.weight_bytes / 2**30, 2) if info else None,
            )  # fmt: skip
            for batch in (1, 16, 64):
                await decode(report, engine, method, batch)
            await prefill(report, engine, method)


async def decode(report: Report, engine: Any, method: str, batch: int) -> None:
    """Milliseconds per step: a long answer less a short one."""
    await together(engine, batch, 128, 16)
    short = [await together(engine, batch, 128, 8) for _ in range(3)]
    whole = [await together(engine, batch, 128, 136) for _ in range(3)]
    step = (statistics.median(whole) - statistics.median(short)) / 128
    report.add(
        model=method, batch=batch, ms_per_step=round(1e3 * step, 3),
        tokens_per_second=round(batch / step, 1),
    )  # fmt: skip


async def prefill(report: Report, engine: Any, method: str) -> None:
    """Prompt tokens per second: 32 prompts of 2,048 tokens, one token each."""
    await together(engine, 4, 2048, 1)
    took = statistics.median([await together(engine, 32, 2048, 1) for _ in range(3)])
    report.add(model=method, prompt_tokens_per_second=round(32 * 2048 / took, 1))


async def together(engine: Any, batch: int, prompt: int, output: int) -> float:
    """Seconds for `batch` requests at once."""
    from jackfield import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

    async def generate_one() -> None:
        tokens = [random.randrange(1000, 100000) for _ in range(prompt)]
        async for _ in engine.generate(tokens, params):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(generate_one() for _ in range(batch)))
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "kernels", "model"))
    parser.add_argument("--out", help="append JSON lines here")
    parser.add_argument("--sweep", action="store_true", help="kernels: try other tiles")
    parser.add_argument(
        "--bandwidth", type=float, default=4.58e12, help="kernels: bytes per second"
    )
    parser.add_argument("--method", choices=METHODS, default="fp8", help="model: which weights")
    parser.add_argument("--layers", type=int, help="model: fewer layers, for a quick look")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    report = Report(options.out)
    if options.what == "check":
        return 0 if check(report) else 1
    if options.what == "kernels":
        kernels(report, options.sweep, options.bandwidth)
    else:
        asyncio.run(model(report, options.method, options.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
