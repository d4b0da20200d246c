"""What a step's masks cost without a model: 64 rows through one schema, each at its own place.

    python examples/benchmarks/structured_masks.py --backend xgrammar --out lines.jsonl

The schema and the vocabulary of `structured_outputs.py`; every row takes random tokens that its
mask allows. `launch_thread` is processor time of the thread that would launch the model's steps,
`process` that of all threads. Medians and means of a step: taking the tokens, and filling masks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from structured_outputs import BACKENDS, MODELS, SCHEMA, vocabulary

from jackfield import SamplingParams
from jackfield.core.protocols.grammars import GrammarSpec, Vocabulary
from jackfield.core.registry import load_plugins
from jackfield.core.step import CompiledGrammar, GrammarStart, InProcess, SlotStart
from jackfield.core.worker.sampling.masks import GrammarMasks


class Step:
    """A launched step, done at once."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def kept_tokens(self) -> list[list[int]]:
        """One for each row."""
        return [[token] for token in self._tokens]

    def proposals(self) -> None:
        """No row has drafts."""


def made_up(size: int) -> Vocabulary:
    """As many tokens as the model has; the last but the padding ends an output."""
    words: dict[bytes, None] = {}
    for word in vocabulary(size):
        words.setdefault(word)
        if len(words) == size - 18:
            break
    return Vocabulary(
        token_bytes=[*words, *[b""] * 18],
        size=size,
        eos_token_ids=(size - 18,),
        encode=lambda text: list(text.encode()),
    )


def measure(backend: str, batch: int, steps: int) -> dict[str, float]:
    """Microseconds per step; `masks_crc32` is the same wherever the masks are."""
    words = made_up(int(MODELS["Qwen3-8B"]["vocab_size"]))
    kind = load_plugins()["structured_backend"].load(backend)
    grammar = kind(words).compile(GrammarSpec("json", json.dumps(SCHEMA)))
    masks = GrammarMasks(vocab_size=words.size, device=torch.device("cpu"), mask_timeout=5.0)
    start = GrammarStart(words.eos_token_ids)
    for slot in range(batch):
        masks.start(
            SlotStart(
                slot=slot, request_id=str(slot), token_ids=(1,), num_prompt_tokens=1,
                num_computed_tokens=0, params=SamplingParams(ignore_eos=True), seed=0,
                grammar=start,
            ),
            InProcess({slot: CompiledGrammar(start, grammar, words.token_bytes.__getitem__)}),
        )  # fmt: skip
    draw, crc = random.Random(0), 0
    microseconds: dict[str, list[float]] = {"wall": [], "launch_thread": [], "process": []}
    for number in range(steps):
        clocks_before = time.perf_counter(), time.thread_time(), time.process_time()
        rows = masks.rows(range(batch))
        bits = masks.fill(rows, batch).bits.numpy()
        clocks_after = time.perf_counter(), time.thread_time(), time.process_time()
        if number >= 10:
            for name, start, end in zip(microseconds, clocks_before, clocks_after, strict=True):
                microseconds[name].append(1e6 * (end - start))
        crc = zlib.crc32(bits.tobytes(), crc)
        if failures := masks.failures(rows):
            raise RuntimeError(str(failures))
        allowed = (np.unpackbits(row.view(np.uint8), bitorder="little") for row in bits)
        masks.sampled(Step([int(draw.choice(np.flatnonzero(row))) for row in allowed]), rows)
    measured: dict[str, float] = {"masks_crc32": crc}
    for name, times in microseconds.items():
        measured[f"{name}_us"] = round(statistics.median(times))
        measured[f"{name}_us_mean"] = round(statistics.mean(times))
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="llguidance")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    line: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        "device": "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "workload": f"masks of {args.batch} rows, without a model",
        "backend": f"{args.backend} {version(args.backend)}",
        "cores": os.cpu_count(),
        "at": {"batch": args.batch, "steps": args.steps, "vocab_size": 151936},
        "measured": measure(args.backend, args.batch, args.steps),
    }
    print(json.dumps(line), flush=True)
    if args.out is not None:
        with args.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
