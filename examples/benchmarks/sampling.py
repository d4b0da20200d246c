"""What sampling costs by kernels, for mixes of requests, and whether it gives what torch gives.

    python examples/benchmarks/sampling.py --out docs/benchmarks/sampling.jsonl

First every mix is sampled by the kernels and by the sampler in torch, on the same logits: tokens
have to be equal (a share of near ties may differ: float32 sums in another order), log-probabilities
close. Then each mix is timed in a recorded graph. Two kinds of logits: `peaked`, as trained models
make them (few tokens stand out of a normal crowd), and `flat`, normal, as weights at random do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from jackfield import SamplingParams
from jackfield.core.nn.operations import Operations
from jackfield.core.step import SlotStart
from jackfield.core.worker.sampling.logprobs import token_logprobs
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_state import SamplingState
from jackfield.plugins.operations.triton import TritonOperations

PROMPT = 400
OUTPUT = 60
STOPS = (7, 8)
WORDS = ((11,), (12, 13), (14, 15, 16))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k_top_p": {"top_k": 40, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {t: 1.5 for t in range(20, 60_000, 300)}},
    "allowed": {"allowed_token_ids": tuple(range(0, 100_000, 3))},
    "min_tokens": {"min_tokens": 5000},
    "bad_words": {},
    "logprobs": {"logprobs": 5},
    "logprobs_20": {"logprobs": 20},
}
CHANCES = {
    "top_k": 0.2, "top_p": 0.2, "min_p": 0.1, "penalties": 0.2, "bias": 0.05, "allowed": 0.05,
    "min_tokens": 0.1, "bad_words": 0.05, "logprobs": 0.15, "logprobs_20": 0.05,
}  # fmt: skip
"""Of the richest mix."""


def start(slot: int, names: list[str], vocab: int) -> SlotStart:
    """A request that asks for these options, some way into its output."""
    draw = random.Random(slot)
    params: dict[str, Any] = {"temperature": 0.8}
    for name in names:
        params.update(OPTIONS[name])
    if "allowed_token_ids" in params:
        params["allowed_token_ids"] = tuple(t for t in params["allowed_token_ids"] if t < vocab)
    if "logit_bias" in params:
        params["logit_bias"] = {t: b for t, b in params["logit_bias"].items() if t < vocab}
    return SlotStart(
        slot=slot,
        request_id=str(slot),
        token_ids=tuple(draw.randrange(vocab) for _ in range(PROMPT + OUTPUT)),
        num_prompt_tokens=PROMPT,
        num_computed_tokens=0,
        params=SamplingParams(**params),
        seed=slot,
        stop_token_ids=STOPS,
        bad_words_token_ids=WORDS if "bad_words" in names else (),
    )


def mixes(rows: int, vocab: int) -> dict[str, list[SlotStart]]:
    """Each option alone on every row, the richest mix, and everything everywhere."""
    mix = {name: [start(slot, [name], vocab) for slot in range(rows)] for name in OPTIONS}
    draw = random.Random(rows)
    mix["richest"] = [
        start(slot, [name for name, chance in CHANCES.items() if draw.random() < chance], vocab)
        for slot in range(rows)
    ]
    rich = [name for name in OPTIONS if name not in ("plain", "greedy", "allowed")]
    mix["everything"] = [start(slot, rich, vocab) for slot in range(rows)]
    return mix


def logits_of(kind: str, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """[rows, vocab] bfloat16"""
    logits = torch.randn(rows, vocab, device=device)
    if kind == "peaked":
        logits = logits * 2.2
        index = torch.randint(vocab, (rows, 40), device=device)
        logits.scatter_add_(1, index, torch.rand(rows, 40, device=device) * 14 + 6)
    return logits.bfloat16()


class Bench:
    """A sampler with the slots of a mix."""

    def __init__(
        self, starts: list[SlotStart], vocab: int, device: torch.device, operations: Operations
    ) -> None:
        rows = len(starts)
        history = torch.zeros((rows + 1, 1024), dtype=torch.int32, device=device)
        self.state = SamplingState(rows + 1, vocab, device, history, kernels=operations.samples)
        self.sampler = Sampler(self.state, operations=operations)
        start_time = time.perf_counter()
        for row in starts:
            tokens = torch.tensor(row.token_ids, dtype=torch.int32)
            history[row.slot, : len(tokens)] = tokens.to(device)
            self.state.start(row)
        self.state.upload()
        self.start_seconds = (time.perf_counter() - start_time) / rows
        self.slots = torch.arange(rows, device=device)
        self.rows_host = list(range(rows))
        self.lengths = torch.full((rows,), PROMPT + OUTPUT, device=device)

    def step(self, logits: torch.Tensor) -> None:
        """What a recorded step launches behind its logits."""
        out = self.sampler.outputs
        if self.sampler.is_plain(self.rows_host):
            self.sampler.sample_plain(logits, self.slots, self.lengths, out)
        else:
            self.sampler.sample_step(logits, self.slots, self.lengths, out)


def check(name: str, starts: list[SlotStart], logits: torch.Tensor) -> dict[str, Any]:
    """By kernels and in torch."""
    vocab, device = logits.shape[1], logits.device
    bench = Bench(starts, vocab, device, TritonOperations())
    bench.step(logits)
    out = bench.sampler.outputs.first(len(starts))
    twin = Bench(starts, vocab, device, Operations())
    expected = twin.sampler.in_torch.sample(logits, twin.slots, twin.rows_host, twin.lengths)
    different = int((out.chosen.long() != expected.token_ids).sum())
    failed = different > max(1, len(starts) // 50)
    scored = [row.slot for row in starts if row.params.logprobs is not None]
    worst = 0.0
    if scored:
        own = token_logprobs(logits[scored], out.chosen[scored].long(), 20)
        worst = float((own.logprob - out.logprob[scored]).abs().max())
        failed |= worst > 1e-3 or not torch.equal(own.rank, out.rank[scored].long())
        for row, slot in enumerate(scored):
            k = starts[slot].params.logprobs or 0
            failed |= not torch.equal(own.top_ids[row, :k], out.top_ids[slot, :k].long())
    return {"different": different, "logprob_error": worst, "failed": failed}


def graph_microseconds(function: Callable[[], None], seconds: float = 0.25) -> float:
    """Median of replays of what `function` launches."""
    function()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        function()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 10:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(5):
            graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 200)
    return statistics.median(times)


def torch_microseconds(bench: Bench, logits: torch.Tensor) -> float:
    """A step of the sampler in torch, launched."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        bench.sampler.in_torch.sample(logits, bench.slots, bench.rows_host, bench.lengths)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times[1:])


def main() -> int:
    """Check and time; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--seconds", type=float, default=0.15, help="of timing, a mix")
    args = parser.parse_args()
    device = torch.device("cuda")
    about = {
        "benchmark": "sampling",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "vocab": args.vocab,
    }
    print(json.dumps(about))
    torch.manual_seed(1)
    lines: list[dict[str, Any]] = []
    failed = False
    for kind in ("peaked", "flat"):
        print(f"\n{kind} logits, µs per step{'':12}" + "".join(f"{rows:>10}" for rows in args.rows))
        table: dict[str, list[str]] = {}
        for rows in args.rows:
            logits = logits_of(kind, rows, args.vocab, device)
            for name, starts in mixes(rows, args.vocab).items():
                checked = check(name, starts, logits)
                failed |= checked["failed"]
                bench = Bench(starts, args.vocab, device, TritonOperations())
                microseconds = graph_microseconds(lambda b=bench, t=logits: b.step(t), args.seconds)
                line = {
                    **about, "logits": kind, "rows": rows, "mix": name,
                    "microseconds": round(microseconds, 1), **checked,
                    "start_microseconds": round(bench.start_seconds * 1e6, 1),
                }  # fmt: skip
                if name in ("richest", "everything") and rows == args.rows[-1]:
                    twin = Bench(starts, args.vocab, device, Operations())
                    line["torch_microseconds"] = round(torch_microseconds(twin, logits), 1)
                lines.append(line)
                mark = "!" if checked["failed"] else "~" if checked["different"] else ""
                table.setdefault(name, []).append(f"{microseconds:.1f}{mark}")
        for name, cells in table.items():
            print(f"{name:32}" + "".join(f"{cell:>10}" for cell in cells))
    for line in lines:
        if "torch_microseconds" in line:
            print(f"in torch, {line['logits']} {line['mix']}: {line['torch_microseconds']:.0f} µs")
    starts_took = [line["start_microseconds"] for line in lines if line["rows"] == args.rows[-1]]
    print(f"starting a slot: {min(starts_took):.0f} to {max(starts_took):.0f} µs of the host")
    print("~: near ties differ from torch; !: more than those. " + ("FAILED" if failed else "ok"))
    if args.out is not None:
        with args.out.open("a") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
