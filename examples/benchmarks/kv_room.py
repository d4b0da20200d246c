"""How many requests of a model's shape have room at once, by the scheduler's own books.

    python -m jackfield.examples.benchmarks.kv_room
    python -m jackfield.examples.benchmarks.kv_room --models Gemma-3-27B --chunk 2048

Needs no device: blocks are counted, and nothing is computed. For each share of tokens that stays:
the most requests that run while others wait, that number against none's, and what the blocks that
a request holds while it decodes would allow (`ceiling`). Layers with a sliding window hold as many
blocks whatever is dropped, so that the ceiling is below 1 / share: `windows` is their part of a
whole request's blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jackfield.core.cache.groups import CacheGroup, CachePart, TokenCache, form_groups
from jackfield.core.cache.reach import Reach
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.kv_compression import CompressionRule, KVCompression
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepResult
from jackfield.entrypoints.bench.report import say, table
from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.plugins.policies.builtin import FirstComeFirstServed

BLOCK_SIZE = 16
MODELS = ("Qwen3-8B", "GPT-OSS-20B", "DeepSeek-V2-Lite", "Gemma-3-27B")


class Load(NamedTuple):
    tokens: int = 32768
    output_tokens: int = 512
    fitting: int = 8
    """Whole requests of layers that see all tokens, which the pool has blocks for."""
    requests: int = 40
    chunk: int = 8192
    """Most tokens of a step."""
    prompt_interval: int = 4096

    @property
    def length(self) -> int:
        return self.tokens + self.output_tokens

    @property
    def num_blocks(self) -> int:
        return self.fitting * -(-(self.length + 1) // BLOCK_SIZE)


class Room(NamedTuple):
    most: int
    """Requests that ran at once while others waited."""
    fits: float
    """Requests that the pool has blocks for while all decode."""
    windows: float
    """Part of a request's blocks that layers with a window hold then."""


def groups_of(config: Mapping[str, Any], length: int) -> tuple[CacheGroup, ...]:
    """Return the block tables of a model, by its configuration."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    whole = [True] * count
    if types := config.get("layer_types"):
        whole = [kind == "full_attention" for kind in types]
    elif pattern := config.get("sliding_window_pattern"):
        whole = [(layer + 1) % pattern == 0 for layer in range(count)]
    part = CachePart("kv", (8, 128), "bfloat16")
    specs = [TokenCache((part,), None if sees_all else Reach(window)) for sees_all in whole]
    return form_groups(specs, max_model_len=length + 1, block_size=BLOCK_SIZE)


def room(config: Mapping[str, Any], ratio: float | None, load: Load) -> Room:
    """Run the scheduler until the first request ends. ratio: share that stays; None: all"""
    groups = groups_of(config, load.length)
    parts = []
    if ratio is not None:
        rule = CompressionRule(ratio=ratio, prompt_interval=load.prompt_interval)
        parts.append(KVCompression.maker(rule))
    scheduler = Scheduler(
        max_num_seqs=load.requests, max_num_batched_tokens=load.chunk,
        max_model_len=load.length + 1, num_blocks=1 + load.num_blocks, block_size=BLOCK_SIZE,
        enable_prefix_caching=False, enable_chunked_prefill=True, policy=FirstComeFirstServed(),
        groups=groups, parts=parts,
    )  # fmt: skip
    for number in range(load.requests):
        params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True)
        request = Request(
            f"{number}", [number] * load.tokens, params, max_tokens=load.output_tokens, seed=0
        )
        scheduler.add_requests(request)
    most, ended = 0, False
    while not ended and (plan := scheduler.schedule()) is not None:
        if scheduler.num_waiting:
            most = max(most, scheduler.num_running)
        counts = [int(samples) for samples in plan.samples]
        updates = scheduler.update(plan, StepResult(plan.step, counts, [7] * sum(counts)))
        ended = any(update.finished for update in updates)
    kept = load.length if ratio is None else int(ratio * load.tokens) + load.output_tokens
    blocks = {
        group: group.most_blocks(load.length if group.reach else kept, BLOCK_SIZE, 1)
        for group in groups
    }
    total = sum(blocks[group] for group in groups)
    windows = sum(blocks[group] for group in groups if group.reach)
    return Room(most, load.num_blocks / total, windows / total)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=[*ARCHITECTURES])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25])
    for name, default in Load()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    load = Load(*(getattr(args, name) for name in Load._fields))
    rows = []
    for model in args.models:
        whole = room(ARCHITECTURES[model], None, load)
        rows.append([model, "none", whole.most, "", "", f"{whole.windows:.0%}"])
        for ratio in args.ratios:
            own = room(ARCHITECTURES[model], ratio, load)
            rows.append([
                model, ratio, own.most, f"{own.most / whole.most:.2f}",
                f"{own.fits / whole.fits:.2f}", f"{own.windows:.0%}",
            ])  # fmt: skip
    say(table(rows, ["model", "share", "at once", "× none", "ceiling", "windows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
