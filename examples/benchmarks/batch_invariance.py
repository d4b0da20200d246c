"""What `batch_invariant` promises, and what it costs, on a device with random weights.

    python -m jackfield.examples.benchmarks.batch_invariance check --model Qwen3-8B --layers 4
    python -m jackfield.examples.benchmarks.batch_invariance cost --model Qwen3-8B

`check` answers some requests alone, and then in mixed batches of any of them: it counts those whose
tokens, or bits of log-probabilities, differ. Batches have prompts in chunks and from the cache of
prefixes. It does so with the option, where the count must be 0 (the exit status says so), and for
fewer batches without it, to show that the batches would change bits. `cost` compares the tokens per
second of both engines, at several numbers of rows. `--model`: one of the benches' architectures, or
a checkpoint; without it, the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, say
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, write_model

SEED = 7
LENGTHS = (1, 7, 30, 120, 300, 900)
"""Of prompts; the longest are computed in chunks."""


def config_of(args: argparse.Namespace, folder: Path, *, invariant: bool, **more: Any) -> Any:
    options: dict[str, Any] = {
        "device": args.device, "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len, "max_num_seqs": 64, "batch_invariant": invariant,
    }  # fmt: skip
    if args.model in ARCHITECTURES:
        options |= {"model": str(write_model(args.model, folder)), "load_format": "dummy"}
    elif args.model:
        options["model"] = args.model
    if args.layers:
        options["hf_overrides"] = {"num_hidden_layers": args.layers}
    if args.speculative:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    return EngineConfig(**options | more)


def draw_requests(args: argparse.Namespace) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of all lengths, half of which begin alike, with any sampling parameters."""
    rng = random.Random(SEED)
    most = args.max_model_len - args.output_tokens
    shared = [rng.randrange(3, args.vocab) for _ in range(200)]
    requests = []
    for number in range(args.requests):
        prompt = [rng.randrange(3, args.vocab) for _ in range(LENGTHS[number % len(LENGTHS)])]
        prompt = (shared * (number % 2) + prompt)[:most]
        params = SamplingParams(
            temperature=(0.0, 0.8)[number // 2 % 2], top_p=(1.0, 0.9)[number // 4 % 2], seed=number,
            max_tokens=rng.randrange(1, args.output_tokens + 1), ignore_eos=True, logprobs=2,
        )  # fmt: skip
        requests.append((prompt, params))
    return requests


async def answer(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
    """Return tokens and log-probabilities."""
    *_, last = [output async for output in engine.generate(prompt, params)]
    (completion,) = last.outputs
    return completion.token_ids, [
        {token: found.logprob for token, found in position.items()}
        for position in completion.logprobs or ()
    ]


async def check(args: argparse.Namespace, folder: Path, emitter: Emitter) -> bool:
    """Return whether the batches changed nothing with the option."""
    requests, sound = draw_requests(args), True
    for invariant, batches in ((True, args.batches), (False, args.control)):
        if not batches:
            continue
        config = config_of(args, folder, invariant=invariant, max_num_batched_tokens=512)
        differing_tokens = differing_bits = answers = 0
        async with AsyncEngine(config) as engine:
            alone = [await answer(engine, *request) for request in requests]
            rng, began = random.Random(SEED), time.perf_counter()
            for _ in range(batches):
                chosen = [rng.randrange(len(requests)) for _ in range(rng.randrange(1, args.rows))]
                got = await asyncio.gather(*(answer(engine, *requests[n]) for n in chosen))
                for number, (tokens, scores) in zip(chosen, got, strict=True):
                    answers += 1
                    differing_tokens += tokens != alone[number][0]
                    differing_bits += scores != alone[number][1]
            seconds = time.perf_counter() - began
            backend = engine.info.attention_backend
        emitter.emit({
            "workload": "batch invariance", "model": args.model, "layers": args.layers,
            "batch_invariant": invariant, "attention_backend": backend, "batches": batches,
            "answers": answers, "differing_tokens": differing_tokens,
            "differing_logprobs": differing_bits, "seconds": round(seconds, 1),
        })  # fmt: skip
        if invariant:
            sound = not differing_tokens and not differing_bits
    return sound


async def cost(args: argparse.Namespace, folder: Path, emitter: Emitter) -> None:
    for invariant in (False, True):
        began = time.perf_counter()
        async with AsyncEngine(config_of(args, folder, invariant=invariant)) as engine:
            say(f"batch_invariant={invariant}: ready in {time.perf_counter() - began:.1f} s")
            for rows in args.row_counts:
                rng, best = random.Random(SEED), 0.0
                params = SamplingParams(
                    temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True
                )
                for _ in range(args.repeats):
                    prompts = [
                        [rng.randrange(3, args.vocab) for _ in range(args.prompt_tokens)]
                        for _ in range(rows)
                    ]
                    began = time.perf_counter()
                    await asyncio.gather(*(answer(engine, each, params) for each in prompts))
                    seconds = time.perf_counter() - began
                    best = max(best, rows * args.output_tokens / seconds)
                emitter.emit({
                    "workload": "batch invariance, cost", "model": args.model,
                    "layers": args.layers, "batch_invariant": invariant, "rows": rows,
                    "prompt": args.prompt_tokens, "output": args.output_tokens,
                    "tokens_per_second": round(best, 1),
                })  # fmt: skip


def main() -> int:
    """Return 1 if batches have changed bits although they must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["check", "cost"])
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--vocab", type=int, default=150000, help="tokens of prompts are below it")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--rows", type=int, default=24, help="most requests of a batch")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--control", type=int, default=100, help="batches without the option")
    parser.add_argument("--speculative", action="store_true", help="with drafts by n-grams")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=12)
    parser.add_argument("--row-counts", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    add_output_options(parser)
    args = parser.parse_args()
    emitter = Emitter(args.output, environment(args.device))
    with tempfile.TemporaryDirectory() as scratch:
        if args.what == "cost":
            asyncio.run(cost(args, Path(scratch), emitter))
        elif not asyncio.run(check(args, Path(scratch), emitter)):
            say("batch_invariant: batches have changed bits")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
