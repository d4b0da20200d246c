"""Do engines start, every time, when Triton's cache has all of their kernels?

    python examples/benchmarks/starts.py --starts 60
    python examples/benchmarks/starts.py --starts 4 --device cpu --output -

Small models of several families with made-up weights, in turn by `LLM` and by `jackfield serve`,
each in a process of its own, some at a time; each has to give tokens. A first round fills the
cache. Races between threads that load kernels show here.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment
from jackfield.entrypoints.bench.serve.servers import end_group, free_port
from jackfield.entrypoints.bench.workloads import ARCHITECTURES

SMALL: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"num_hidden_layers": 4, "max_window_layers": 4, "vocab_size": 4096},
    "Qwen2.5-7B": {"num_hidden_layers": 2, "max_window_layers": 2, "vocab_size": 4096},
    "Gemma-2-9B": {"num_hidden_layers": 2, "vocab_size": 4096},
    "Qwen3-30B-A3B": {
        "num_hidden_layers": 2, "max_window_layers": 2, "vocab_size": 4096, "num_experts": 16,
    },
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROGRAM = """
import sys
from jackfield import LLM, SamplingParams
options = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
               gpu_memory_utilization=0.05, device=sys.argv[2])
with LLM(model=sys.argv[1], **options) as llm:
    params = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)
    for output in llm.generate([{"prompt_token_ids": list(range(3, 60))}] * 3, params):
        assert len(output.outputs[0].token_ids) == 4
"""
WAIT_SECONDS = 240


def write_models(folder: Path) -> list[Path]:
    """→ their folders"""
    paths = []
    for name, changes in SMALL.items():
        target = folder / name
        target.mkdir()
        config = {**ARCHITECTURES[name], **changes, **TOKENS}
        (target / "config.json").write_text(json.dumps(config))
        paths.append(target)
    return paths


def start_llm(model: Path, device: str) -> str:
    """→ what went wrong, or nothing"""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), device], capture_output=True, text=True,
        timeout=WAIT_SECONDS,
    )  # fmt: skip
    return (
        "" if process.returncode == 0 else process.stderr[-2000:] or f"status {process.returncode}"
    )


def start_server(model: Path, device: str) -> str:
    """→ what went wrong, or nothing"""
    port = free_port()
    command = [
        sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", str(model),
        "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "1024",
        "--gpu-memory-utilization", "0.05", "--port", str(port), "--served-model-name", "m",
        "--device", device,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + WAIT_SECONDS
            body = json.dumps(
                {"model": "m", "prompt": list(range(3, 60)), "max_tokens": 4, "ignore_eos": True}
            ).encode()
            while time.monotonic() < end and server.poll() is None:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", body,
                    {"Content-Type": "application/json"},
                )  # fmt: skip
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        usage = json.load(response)["usage"]
                    return "" if usage["completion_tokens"] == 4 else f"usage: {usage}"
                except urllib.error.HTTPError as error:
                    return f"status {error.code}: {error.read()[:500]!r}"
                except OSError:
                    time.sleep(0.1)
            log.seek(0)
            return f"no answer (exit {server.poll()}): {log.read()[-2000:]}"
        finally:
            end_group(server)


def main(argv: list[str] | None = None) -> int:
    """→ exit status"""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--device", default="auto")
    add_output_options(parser)
    args = parser.parse_args(argv)
    emitter = Emitter(args.output, environment(args.device))
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        models = write_models(Path(folder))
        list(pool.map(lambda model: start_llm(model, args.device), models))
        ways = (start_llm, start_server)
        jobs = [(ways[n % 2], models[n // 2 % len(models)]) for n in range(args.starts)]
        start = time.monotonic()
        for (way, model), error in zip(
            jobs, pool.map(lambda job: job[0](job[1], args.device), jobs), strict=True
        ):
            if error:
                failures.append(f"{way.__name__} {model.name}: {error}")
        seconds = time.monotonic() - start
    counts = collections.Counter(model.name for _, model in jobs)
    measured = {"started": args.starts - len(failures), "starts": args.starts, "seconds": seconds}
    emitter.emit({"workload": "starts", "at": {"models": dict(counts)}, "measured": measured})
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    print(f"{args.starts - len(failures)} of {args.starts} starts gave tokens")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
