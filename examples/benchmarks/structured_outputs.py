"""What a JSON schema costs: tokens/s of a batch with and without one, for each backend.

    python examples/benchmarks/structured_outputs.py --out docs/benchmarks/structured.jsonl

The real architecture with random weights, and a made-up byte-level tokenizer with as many tokens,
words and pieces of JSON among them; nothing is downloaded. Both kinds of run draw at temperature 1
with `ignore_eos`, so both generate the same number of tokens. The schema's array is too long to
end before, and its strings are bounded, so that random tokens get around in it. Kinds alternate;
medians are compared. Each backend has a process of its own. Prints a JSON line for each, and
appends it to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from jackfield import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputsParams
from jackfield.core.text.token_bytes import ALPHABET
from jackfield.core.worker.serving_process import SWITCH_INTERVAL

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                 "vocab_size": 151936},
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                   "vocab_size": 151936, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 4096, "torch_dtype": "float32"},
}  # fmt: skip
END = "<|im_end|>"
BACKENDS = ("llguidance", "xgrammar")
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "role": {"enum": ["engineer", "teacher", "baker", None]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "score": {"type": "number", "minimum": 0, "maximum": 100},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "role", "tags", "score", "active"],
        "additionalProperties": False,
    },
}


def vocabulary(size: int) -> Iterator[bytes]:
    """Every byte, then words with and without a space, numbers and JSON's marks in combination."""
    draw = random.Random(0)
    marks = [
        '"',
        '",',
        '":',
        '": "',
        '", "',
        "{",
        "}",
        '{"',
        '"}',
        "[",
        "]",
        "],",
        "},",
        "\n",
        "  ",
    ]
    yield from (bytes([byte]) for byte in range(256))
    yield from ("".join(pair).encode() for pair in itertools.product(marks, repeat=2))
    yield from (str(number).encode() for number in range(10, 1000))
    while True:
        length = draw.choice((2, 3, 4, 5, 6, 7, 8, 10))
        word = "".join(draw.choice("etaoinshrdlucmfwypvbgkjqxz") for _ in range(length))
        yield (draw.choice(("", " ", " ", "é", "日")) + word).encode()


def save_checkpoint(folder: Path, model: str) -> None:
    """config.json and a tokenizer of that size; the weights are dummies."""
    config = {**QWEN3, **MODELS[model]}
    size = int(config["vocab_size"]) - 17  # A padded vocabulary, as most are.
    characters = {byte: character for character, byte in ALPHABET.items()}
    words: dict[str, int] = {}
    for token in vocabulary(size):
        words.setdefault("".join(characters[byte] for byte in token), len(words))
        if len(words) == size - 1:
            break
    end = {"id": size - 1, "content": END, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False, "special": True}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    tokenizer = {
        "version": "1.0", "added_tokens": [end], "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": size - 1}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


async def tokens_per_second(
    engine: AsyncEngine, batch: int, length: int, schema: StructuredOutputsParams | None
) -> float:
    """One batch, all at once: tokens that come once all have begun, by the time until the last."""

    async def stream_one(number: int) -> list[tuple[float, int]]:
        prompt = [random.Random(number).randrange(256, 1000) for _ in range(128)]
        params = SamplingParams(
            max_tokens=length, seed=number, ignore_eos=True, structured_outputs=schema
        )
        arrivals: list[tuple[float, int]] = []
        async for output in engine.generate(prompt, params):
            arrivals.append((time.perf_counter(), len(output.outputs[0].token_ids)))
        if output.error is not None or arrivals[-1][1] != length:
            raise RuntimeError(f"{arrivals[-1][1]} tokens instead of {length}: {output.error}")
        return arrivals

    rows = await asyncio.gather(*(stream_one(number) for number in range(batch)))
    start, end = max(row[0][0] for row in rows), max(row[-1][0] for row in rows)
    before = sum(max(total for moment, total in row if moment <= start) for row in rows)
    return (batch * length - before) / (end - start)


async def mask_microseconds(
    engine: AsyncEngine, schema: StructuredOutputsParams
) -> tuple[float, float]:
    """Accept a token and fill a mask, for one row on one thread, without the model: mean, p95."""
    params = SamplingParams(structured_outputs=schema)
    compiled = await engine.core.grammars.prepare(params, chat=False)
    assert compiled is not None
    matcher, draw, times = compiled.grammar.matcher(), random.Random(0), []
    row = np.empty(-(-engine.model_config.vocab_size // 32), dtype=np.int32)
    token: int | None = None
    for _ in range(300):
        begin = time.perf_counter()
        if token is not None and not matcher.accept([token]):
            raise RuntimeError("the grammar refuses what it allowed")
        matcher.fill_bitmask(row)
        times.append(time.perf_counter() - begin)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits)))
    return 1e6 * statistics.mean(times), 1e6 * sorted(times)[int(0.95 * len(times))]


async def measure(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Both kinds of run with one backend."""
    schema = StructuredOutputsParams(json=SCHEMA)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), args.model)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=max(2048, 256 + args.output),
            max_num_seqs=max(args.batch, 16),
            structured_outputs_config={"backend": backend},  # type: ignore[arg-type]
        )
        async with AsyncEngine(config) as engine:
            start = time.perf_counter()
            await tokens_per_second(engine, 1, 8, schema)
            first = time.perf_counter() - start
            for constrained in (False, True):  # Kernels, graphs.
                await tokens_per_second(
                    engine, args.batch, min(args.output, 48), schema if constrained else None
                )
            for number in range(args.repeats):
                for constrained in (False, True) if number % 2 == 0 else (True, False):
                    speeds[constrained].append(
                        await tokens_per_second(
                            engine, args.batch, args.output, schema if constrained else None
                        )
                    )
            mask, slow = await mask_microseconds(engine, schema)
            device = str(engine.info.device)
    plain, held_to = (statistics.median(speeds[kind]) for kind in (False, True))
    cuda = device.startswith("cuda")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "model": args.model,
        "workload": "structured outputs",
        "backend": f"{backend} {version(backend)}",
        "cores": os.cpu_count(),
        "at": {"batch": args.batch, "output": args.output, "prompt": 128},
        "measured": {
            "ratio": round(held_to / plain, 4),
            "plain_tokens_per_second": round(plain, 1),
            "schema_tokens_per_second": round(held_to, 1),
            "all_plain": [round(speed, 1) for speed in speeds[False]],
            "all_schema": [round(speed, 1) for speed in speeds[True]],
            "first_structured_request_s": round(first, 2),
            "mask_us_per_row": round(mask, 1),
            "mask_us_per_row_p95": round(slow, 1),
        },
    }


def in_processes(backends: list[str]) -> int:
    """This command again, once a backend: what one leaves on the device is not the other's."""
    failed = 0
    for backend in backends:
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend]
        failed += subprocess.run(command, check=False).returncode != 0
    return min(failed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", choices=("all", *BACKENDS), default="all")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.backend == "all":
        installed = [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
        if not installed:
            print("install one of " + ", ".join(BACKENDS), file=sys.stderr)
        return in_processes(installed) if installed else 1
    sys.setswitchinterval(SWITCH_INTERVAL)
    line = uvloop.run(measure(args, args.backend))
    print(json.dumps(line, indent=1), flush=True)
    if args.out is not None:
        with args.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
