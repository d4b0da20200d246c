"""First measurements on a GPU: time to ready, and 64 concurrent HTTP streams on Qwen3-8B.

    python examples/benchmarks/serve_baseline.py --out docs/benchmarks/baseline.jsonl

The real architecture with random weights; token ids in, `ignore_eos`. Prints what it ran on
and appends a JSON line for each workload.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936,
    "max_position_embeddings": 40960, "head_dim": 128, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645, "num_key_value_heads": 8,
}  # fmt: skip
MODELS = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip


def environment(commit: str) -> dict[str, Any]:
    import torch
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


async def one_stream(
    session: aiohttp.ClientSession, url: str, prompt: list[int], output: int
) -> dict[str, Any]:
    """One streamed completion: times of its pieces."""
    body = {
        "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True,
        "temperature": 0, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start = time.perf_counter()
    times: list[float] = []
    tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                times.append(time.perf_counter())
                tokens += len(choice["token_ids"])
    if tokens != output:
        raise RuntimeError(f"{tokens} tokens instead of {output}")
    return {"ttft": times[0] - start, "e2e": times[-1] - start, "tokens": tokens}


async def load(url: str, streams: int, prompt: int, output: int) -> dict[str, Any]:
    """`streams` at once; → throughput and latencies."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 100000) for _ in range(prompt)] for _ in range(streams)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        results = await asyncio.gather(*(one_stream(session, url, p, output) for p in prompts))
        seconds = time.perf_counter() - start
    ttft = sorted(r["ttft"] for r in results)
    tpot = [(r["e2e"] - r["ttft"]) / (output - 1) for r in results]
    return {
        "streams": streams, "prompt": prompt, "output": output, "errors": 0,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(streams * output / seconds, 1),
        "ttft_p50_ms": round(1e3 * statistics.median(ttft), 1),
        "ttft_p99_ms": round(1e3 * ttft[int(0.99 * (len(ttft) - 1))], 1),
        "tpot_p50_ms": round(1e3 * statistics.median(tpot), 2),
    }  # fmt: skip


async def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def run(args: argparse.Namespace) -> None:
    facts = environment(args.commit)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = {**QWEN3, **MODELS[args.model]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        server = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", folder, "--port",
             str(port), "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len",
             "8192", "--served-model-name", args.model],
            env={**os.environ},
        )  # fmt: skip
        try:
            await wait_ready(url, server)
            ready = time.perf_counter() - start
            first = await load(url, 1, 128, 2)
            started = {"ready_s": round(ready, 2), "first_token_s": round(
                time.perf_counter() - start, 2)}  # fmt: skip
            rows = [{"workload": "start", **started, "first_request_ttft_ms": first["ttft_p50_ms"]}]
            await load(url, args.streams, 512, 16)
            for streams, prompt, output in ((1, 128, 128), (args.streams, 512, 128)):
                rows.append(
                    {"workload": "http streams", **await load(url, streams, prompt, output)}
                )
        finally:
            server.terminate()
            server.wait(30)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as lines:
        for row in rows:
            line = {**facts, "model": args.model, "dtype": "bfloat16", **row}
            print(json.dumps(line), flush=True)
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/baseline.jsonl"))
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
