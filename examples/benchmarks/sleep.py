"""Measure sleep and wake-up on a GPU: what comes back, how fast, and that steps are still right.

    python examples/benchmarks/sleep.py --model Qwen3-8B --output sleep.jsonl

Writes a checkpoint of random weights, whose files stay in the page cache, and starts an engine with
`enable_sleep_mode` that records its steps. Each round sleeps, asks another program (nvidia-smi) how
much memory is in use, wakes up, and compares the tokens with those of before. Prints one line of
JSON per round. The bound of level 1 is the weights' bytes over the bus; of level 2 the reading of
files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.entrypoints.bench.workloads import write_model

SHARD_BYTES = 4 << 30


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write a model's configuration, and weights of small random numbers."""
    target = write_model(name, folder)
    config = transformers.AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    size = number = 0
    for key, meta in [*model.state_dict().items(), ("", torch.empty(0))]:
        if shard and (not key or size + meta.nbytes > SHARD_BYTES):
            number += 1
            save_file(shard, target / f"model-{number:05}.safetensors", metadata={"format": "pt"})
            places |= dict.fromkeys(shard, f"model-{number:05}.safetensors")
            shard, size = {}, 0
        if key:
            numbers = torch.randn(meta.shape, device="cuda", dtype=torch.bfloat16)
            shard[key] = (numbers * 0.02 if numbers.ndim > 1 else numbers.fill_(1)).cpu()
            size += meta.nbytes
    index = {"metadata": {}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.cuda.empty_cache()
    return target


def used_mib() -> int:
    """Return the first device's memory in use, as another program sees it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, check=True, text=True).stdout)


async def said(engine: AsyncEngine) -> list[list[int]]:
    """Return the tokens of some requests, of which steps of several sizes are recorded."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)

    async def one(number: int) -> list[int]:
        prompt = [(7 * number * at) % 1000 + 3 for at in range(1, 20 + number)]
        async for output in engine.generate(prompt, params):
            last = output
        return list(last.outputs[0].token_ids)

    return list(await asyncio.gather(*map(one, range(8))))


async def measure(folder: Path, rounds: list[int], utilization: float) -> list[dict[str, Any]]:
    config = EngineConfig(
        model=str(folder), enable_sleep_mode=True, skip_tokenizer_init=True, max_model_len=4096,
        gpu_memory_utilization=utilization, enable_prefix_caching=False,
    )  # fmt: skip
    lines = []
    async with AsyncEngine(config) as engine:
        worker: Any = engine.core.executor._worker  # type: ignore[attr-defined]
        await said(engine)
        want = await said(engine)
        for level in rounds:
            line: dict[str, Any] = {"level": level, "awake_mib": used_mib()}
            start = time.perf_counter()
            answer = await engine.sleep(level)
            line["sleep_s"] = round(time.perf_counter() - start, 3)
            line["freed_mib"], line["asleep_mib"] = answer["freed_bytes"] >> 20, used_mib()
            start = time.perf_counter()
            await engine.wake_up(["weights"])
            line["weights_s"] = round(time.perf_counter() - start, 3)
            await engine.wake_up()
            line["wake_s"] = round(time.perf_counter() - start, 3)
            line["woken_mib"] = used_mib()
            line["same"] = await said(engine) == want
            line["recorded"] = worker.runner.decode.graphs.num_recorded
            line["gpu"] = torch.cuda.get_device_name()
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="Qwen3-8B", help="shape, of jackfield bench")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 1, 2, 2, 1])
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--output", type=Path, help="file to which lines are added")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(args.model, Path(folder))
        lines = asyncio.run(measure(checkpoint, args.rounds, args.gpu_memory_utilization))
    if args.output is not None:
        with args.output.open("a") as file:
            file.writelines(json.dumps({"benchmark": "sleep", **line}) + "\n" for line in lines)
    assert all(line["same"] for line in lines), "tokens differ after a sleep"


if __name__ == "__main__":
    main()
