"""Throughput with adapters: this engine, or vLLM, on one GPU with random weights.

    python -m jackfield.examples.benchmarks.adapters --engine jackfield --rank 16 --output a.jsonl
    python -m jackfield.examples.benchmarks.adapters --engine vllm --rank 16 --output a.jsonl

Random adapters of all seven linear layers of Qwen3-8B. `--cases`: rows x adapters x prompt x
output; 0 adapters: the engine serves adapters, and no request has one. `--base`: first the same
engine without adapters enabled. Each case runs `--repeats` times; the median counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, say
from jackfield.entrypoints.bench.workloads import ARCHITECTURES

CASES = "1x0x128x128,1x1x128x128,64x0x128x128,64x1x128x128,64x8x128x128,64x64x128x128,8x8x4000x1"
SEED = 7
VOCAB = 150000
"""Of prompts."""
ZIPF_REQUESTS = 512


def make_adapters(folder: Path, model: dict[str, Any], rank: int, count: int) -> list[Path]:
    """Write random adapters in PEFT's form; all but the first are links to it."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    head = model["head_dim"]
    queries, keys = model["num_attention_heads"] * head, model["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    torch.manual_seed(SEED)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (width, out) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width).bfloat16() * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank).bfloat16() * 0.01
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "base",
        "target_modules": sorted({name.rpartition(".")[2] for name in sizes}), "bias": "none",
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    paths = [folder / f"adapter-{number}" for number in range(count)]
    for path in paths:
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(config))
    first = paths[0] / "adapter_model.safetensors"
    save_file(tensors, first)
    for path in paths[1:]:
        os.link(first, path / first.name)
    return paths


class Engine:
    """One of the two engines, by its class `LLM`."""

    def __init__(self, args: argparse.Namespace, folder: str, *, adapters: bool) -> None:
        options: dict[str, Any] = {
            "model": folder, "load_format": "dummy", "dtype": "bfloat16",
            "skip_tokenizer_init": True, "max_model_len": args.max_model_len,
            "gpu_memory_utilization": args.gpu_memory_utilization,
        }  # fmt: skip
        if adapters:
            options |= {
                "enable_lora": True, "max_loras": args.max_loras, "max_lora_rank": args.rank,
                "max_cpu_loras": max(args.max_loras, args.zipf, args.cold),
            }  # fmt: skip
        options |= args.options
        if args.engine == "vllm":
            import vllm
            from vllm.lora.request import LoRARequest

            self.version, self._params = vllm.__version__, vllm.SamplingParams
            self._llm: Any = vllm.LLM(**options)
        else:
            import jackfield
            from jackfield import LLM, LoRARequest, SamplingParams

            self.version, self._params = jackfield.__version__, SamplingParams
            self._llm = LLM(**options)
        self._request: Any = LoRARequest

    def run(self, prompts: Sequence[list[int]], output: int, adapters: Sequence[Path]) -> float:
        """Return the seconds of a batch; request i has adapter i of those, in turn."""
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        more = {}
        if adapters:
            turns = itertools.islice(itertools.cycle(adapters), len(prompts))
            more["lora_request"] = [
                self._request(path.name, 1 + int(path.name.rpartition("-")[2]), str(path))
                for path in turns
            ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False, **more)
        seconds = time.perf_counter() - began
        assert all(len(each.outputs[0].token_ids) == output for each in outputs)
        return seconds

    def close(self) -> None:
        """End the engine."""
        for name in ("shutdown", "close"):
            with contextlib.suppress(AttributeError):
                getattr(self._llm, name)()
        del self._llm


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["jackfield", "vllm"], default="jackfield")
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-loras", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4352)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--zipf", type=int, default=0, metavar="N",
                        help="requests over N adapters, the k-th as often as 1 / k")  # fmt: skip
    parser.add_argument("--cold", type=int, default=0, metavar="N",
                        help="first tokens of N adapters in turn, beside those of one")  # fmt: skip
    parser.add_argument("--base", action="store_true", help="measure without adapters, too")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="more engine options"
    )
    add_output_options(parser)
    args = parser.parse_args()
    emitter = Emitter(args.output, environment("cuda"))
    model = ARCHITECTURES[args.model]
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model))
        count = max(args.zipf, args.cold, *(case[1] for case in cases))
        paths = make_adapters(Path(scratch), model, args.rank, count) if count else []
        for enabled in (False, True) if args.base else (True,):
            began = time.perf_counter()
            engine = Engine(args, str(folder), adapters=enabled)
            say(f"{args.engine}: ready in {time.perf_counter() - began:.1f} s")
            for rows, num_adapters, prompt, output in cases:
                if not enabled and num_adapters:
                    continue
                rng, seconds = random.Random(SEED), []
                for _ in range(args.repeats + 1):
                    prompts = [[rng.randrange(VOCAB) for _ in range(prompt)] for _ in range(rows)]
                    seconds.append(engine.run(prompts, output, paths[:num_adapters]))
                median = statistics.median(seconds[1:])
                emitter.emit({
                    "workload": "adapters", "engine": args.engine, "version": engine.version,
                    "model": args.model, "enabled": enabled, "rank": args.rank, "rows": rows,
                    "adapters": num_adapters, "prompt": prompt, "output": output,
                    "seconds": round(median, 4), "first_seconds": round(seconds[0], 4),
                    "tokens_per_second": round(rows * (output if output > 1 else prompt) / median),
                })  # fmt: skip
            if enabled:
                traffic(args, engine, paths, emitter)
            engine.close()


def traffic(args: argparse.Namespace, engine: Engine, paths: list[Path], emitter: Emitter) -> None:
    """Measure many adapters that do not fit on the device together."""
    rng = random.Random(SEED)
    facts = {"engine": args.engine, "version": engine.version, "model": args.model,
             "rank": args.rank, "max_loras": args.max_loras}  # fmt: skip

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(VOCAB) for _ in range(128)] for _ in range(count)]

    if args.zipf:
        own = paths[: args.zipf]
        engine.run(prompts(len(own)), 1, own)  # Into host memory.
        weights = [1 / (rank + 1) for rank in range(len(own))]
        drawn = rng.choices(own, weights, k=ZIPF_REQUESTS)
        one, many = (
            statistics.median(engine.run(prompts(ZIPF_REQUESTS), 64, adapters) for _ in range(2))
            for adapters in (own[:1], drawn)
        )
        emitter.emit({
            "workload": "adapters zipf", **facts, "adapters": args.zipf, "requests": ZIPF_REQUESTS,
            "output": 64, "seconds": round(many, 4), "seconds_of_one": round(one, 4),
        })  # fmt: skip
    if args.cold:
        own = paths[: args.cold]
        engine.run(prompts(len(own)), 1, own)
        warm = [engine.run(prompts(1), 1, own[:1]) for _ in range(len(own))]
        cold = [engine.run(prompts(1), 1, [path]) for path in own]
        emitter.emit({
            "workload": "adapters cold", **facts, "adapters": args.cold,
            "first_token_ms": round(1000 * statistics.median(cold), 2),
            "first_token_warm_ms": round(1000 * statistics.median(warm), 2),
        })  # fmt: skip


if __name__ == "__main__":
    main()
