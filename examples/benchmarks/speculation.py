"""What speculative decoding by prompt lookup gives: tokens per second with drafts and without.

    python examples/benchmarks/speculation.py
    python examples/benchmarks/speculation.py --model Qwen3-8B --texts forced random
    python examples/benchmarks/speculation.py --requests 1 --output-tokens 32 --device cpu

Texts, the same ones for both engines:

`copied`: greedy continuations of a prompt that repeats itself. With the embedded model, which is
trained, so that drafts are accepted as far as it copies; made-up weights show nothing here.
`forced`: only one token is allowed, so all drafts are accepted: the most that drafts can give.
`random`: sampled from nearly equal probabilities, so little repeats: what the search costs.

`--model` other than the embedded one: its shapes, with made-up weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.step import PrepareAhead
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, say, table
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, write_model

TEXTS = ("copied", "forced", "random")
COLUMNS = ("tokens_per_second", "ratio", "tokens_per_step", "acceptance")


def requests_of(text: str, args: argparse.Namespace) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts and parameters: the same in each engine."""
    draw = random.Random(1)
    options: dict[str, Any] = {"temperature": 0.0}
    if text == "forced":
        options["allowed_token_ids"] = [7]
    if text == "random":
        options = {"temperature": 50.0}
    params = [
        SamplingParams(
            max_tokens=args.output_tokens, ignore_eos=True, detokenize=False, seed=number,
            output_kind=OutputKind.FINAL_ONLY, **options,
        )
        for number in range(args.requests)
    ]  # fmt: skip
    prompts = []
    for _ in params:
        part = [draw.randrange(10, 900) for _ in range(args.period)]
        prompts.append((part * -(-args.tokens // args.period))[: args.tokens])
    return list(zip(prompts, params, strict=True))


async def generate(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of one request."""
    async for output in engine.generate(prompt, params):
        last = output
    assert last.error is None, last.error
    return list(last.outputs[0].token_ids)


async def measure(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, let it record its steps, and serve each text."""
    measured: dict[str, Any] = {}
    async with AsyncEngine(config) as engine:
        for text in args.texts:
            requests = requests_of(text, args)
            await asyncio.gather(*(generate(engine, *each) for each in requests))
            while await engine.core.executor.ask(PrepareAhead()):  # type: ignore[attr-defined]
                pass
            await engine.reset_prefix_cache()
            before, began = engine.stats(), time.perf_counter()
            outputs = await asyncio.gather(*(generate(engine, *each) for each in requests))
            seconds, after = time.perf_counter() - began, engine.stats()
            drafts = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
            accepted = (
                after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
            )
            tokens, steps = sum(map(len, outputs)), after.steps - before.steps
            measured[text] = {
                "tokens_per_second": round(tokens / seconds, 1),
                "tokens_per_step": round(tokens / steps / args.requests, 2),
                "acceptance": round(accepted / drafts, 3) if drafts else None,
                "outputs": outputs,
            }
    return measured


def run(args: argparse.Namespace, emitter: Emitter) -> None:
    """Measure both engines, and compare them."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "device": args.device, "max_model_len": args.tokens + args.output_tokens + 1,
            "max_num_seqs": max(args.requests, 1), **args.options,
        }  # fmt: skip
        if args.model:
            model = str(write_model(args.model, Path(folder)))
            options |= {"model": model, "load_format": "dummy", "skip_tokenizer_init": True}
        say("without drafts")
        plain = asyncio.run(measure(EngineConfig.from_options(options), args))
        for num_drafts in args.drafts:
            say(f"with {num_drafts} drafts")
            options["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": num_drafts,
                "prompt_lookup_max": 4, "prompt_lookup_min": 2,
                **args.speculative,
            }  # fmt: skip
            drafted = asyncio.run(measure(EngineConfig.from_options(options), args))
            for text in args.texts:
                one, other = plain[text], drafted[text]
                same = sum(map(list.__eq__, one["outputs"], other["outputs"]))
                result = {name: other[name] for name in COLUMNS if name in other}
                result["ratio"] = round(other["tokens_per_second"] / one["tokens_per_second"], 3)
                result["without"] = one["tokens_per_second"]
                result["same_outputs"] = f"{same} of {args.requests}"
                at = {
                    "text": text, "drafts": num_drafts, "requests": args.requests,
                    "tokens": args.tokens, "output_tokens": args.output_tokens,
                }  # fmt: skip
                model_name = args.model or "embedded"
                emitter.emit(
                    {"workload": "speculation", "model": model_name, "at": at, "measured": result}
                )
                cells = [result[name] for name in COLUMNS]
                rows.append([text, num_drafts, result["without"], *cells, result["same_outputs"]])
    say(table(rows, ["text", "drafts", "without", *COLUMNS, "same"]))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="", choices=["", *ARCHITECTURES])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 5])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--period", type=int, default=20, help="tokens after which it repeats")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="more engine options"
    )
    parser.add_argument(
        "--speculative", type=json.loads, default={}, metavar="JSON",
        help="more fields of speculative_config",
    )  # fmt: skip
    add_output_options(parser)
    args = parser.parse_args()
    run(args, Emitter(args.output, environment(args.device)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
