"""A long prefix restored from host memory (cpu_offload) against computing it again.

    python examples/benchmarks/kv_restore.py --model Qwen3-8B --tokens 32768
    python examples/benchmarks/kv_restore.py --tokens 1024 --device cpu --output -

One request at a time, `max_tokens=1`: what is timed is the whole way from `generate` to the token.
Each round has a prompt of its own: computed by an engine without a connector; computed by one with
`cpu_offload`; then, with the prefix cache emptied, restored by it. Weights of Qwen3-8B are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.outputs import RequestOutput
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, table
from jackfield.entrypoints.bench.workloads import ARCHITECTURES, write_model

PARAMS = SamplingParams(
    temperature=0, max_tokens=1, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
)
GIB = 1 << 30


async def timed(engine: AsyncEngine, prompt: list[int]) -> tuple[float, RequestOutput]:
    """→ seconds from asking to the token, and the output."""
    start = time.perf_counter()
    async for output in engine.generate(prompt, PARAMS):
        last = output
    assert last.error is None, last.error
    return time.perf_counter() - start, last


async def emptied(engine: AsyncEngine) -> float:
    """Wait for the pending saves, and empty the prefix cache. → seconds waited"""
    start = time.perf_counter()
    while engine.stats().kv_blocks_used:
        await asyncio.sleep(0.001)
    wait_seconds = time.perf_counter() - start
    assert await engine.reset_prefix_cache()
    return wait_seconds


async def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """All rounds. The first one warms up and does not count."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, 1000) for _ in range(args.tokens)] for _ in range(args.rounds + 1)
    ]
    recompute, with_save, saving, restore = [], [], [], []
    tokens: list[list[int]] = []
    async with AsyncEngine(EngineConfig(**options)) as engine:
        for prompt in prompts:
            seconds, output = await timed(engine, prompt)
            recompute.append(seconds)
            tokens.append(output.outputs[0].token_ids)
            await emptied(engine)
    transfer = {
        "kv_connector": "cpu_offload",
        "kv_connector_extra_config": {"kv_offloading_size": args.offload_gib},
    }
    same = 0
    async with AsyncEngine(EngineConfig(**options, kv_transfer_config=transfer)) as engine:
        layout = engine.info.kv_layout
        assert layout is not None
        for prompt, expected in zip(prompts, tokens, strict=True):
            with_save.append((await timed(engine, prompt))[0])
            saving.append(await emptied(engine))
            seconds, output = await timed(engine, prompt)
            restore.append(seconds)
            restored = output.num_cached_tokens
            num_tokens = (args.tokens - 1) // layout.block_size * layout.block_size
            assert restored == num_tokens, f"{restored} of {num_tokens} tokens were restored"
            same += output.outputs[0].token_ids == expected
            await emptied(engine)
        num_bytes = restored // layout.block_size * layout.block_bytes
    middle = {
        name: statistics.median(values[1:])
        for name, values in (
            ("recompute_s", recompute),
            ("compute_with_connector_s", with_save),
            ("save_after_token_s", saving),
            ("restore_s", restore),
        )
    }
    return {
        **middle,
        "speedup": middle["recompute_s"] / middle["restore_s"],
        "restored_bytes": num_bytes,
        "restored_bytes_per_second": num_bytes / middle["restore_s"],
        "same_tokens": same / len(prompts),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", choices=["", *ARCHITECTURES])
    parser.add_argument("--tokens", type=int, default=1024, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offload-gib", type=float, default=12.0, help="host memory, in GiB")
    parser.add_argument("--device", default="auto")
    add_output_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"device": args.device, "max_model_len": args.tokens + 16}
        if args.model:
            options["model"] = str(write_model(args.model, Path(folder)))
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        measured = asyncio.run(measure(args, options))
    emitter = Emitter(args.output, environment(args.device))
    emitter.emit(
        {
            "engine": "jackfield",
            "model": args.model or "embedded",
            "workload": "kv_restore",
            "options": {"max_model_len": args.tokens + 16},
            "at": {"tokens": args.tokens, "rounds": args.rounds, "offload_gib": args.offload_gib},
            "measured": measured,
        }
    )
    print(table([[k, v] for k, v in measured.items()], ["number", "value"]), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
