"""What a JSON schema costs: tokens/s of a batch with and without one, in one engine.

    python examples/benchmarks/structured_outputs.py --out docs/benchmarks/structured.jsonl

The real architecture with random weights, and a made-up byte-level tokenizer with as many tokens,
words and pieces of JSON among them. Both runs draw at temperature 1 with `ignore_eos`, so both
generate the same number of tokens; the schema's array is too long to end before. Runs alternate;
medians are compared. Prints what it ran on and appends a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputsParams
from jackfield.core.text.token_bytes import ALPHABET

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
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "role": {"enum": ["engineer", "teacher", "baker", None]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "score": {"type": "number"},
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
    for written in vocabulary(size):
        words.setdefault("".join(characters[byte] for byte in written), len(words))
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
    """One batch, all at once, from the first token of the last to start to the end."""

    async def one(number: int) -> tuple[float, float]:
        prompt = [random.Random(number).randrange(256, 1000) for _ in range(128)]
        params = SamplingParams(
            max_tokens=length, seed=number, ignore_eos=True, structured_outputs=schema
        )
        times: list[float] = []
        async for output in engine.generate(prompt, params):
            last = output
            times.append(time.perf_counter())
        made = len(last.outputs[0].token_ids)
        if last.error is not None or made != length:
            raise RuntimeError(f"{made} tokens instead of {length}: {last.error}")
        return times[0], times[-1]

    times = await asyncio.gather(*(one(number) for number in range(batch)))
    began, ended = max(first for first, _ in times), max(last for _, last in times)
    return batch * (length - 1) / (ended - began)


async def mask_microseconds(engine: AsyncEngine, schema: StructuredOutputsParams) -> float:
    """Accept a token and fill a mask, for one row, on this machine's CPU, without the model."""
    params = SamplingParams(structured_outputs=schema)
    start = await engine._grammars.prepare(params, chat=False)
    assert start is not None
    matcher, draw, taken = start.grammar.matcher(), random.Random(0), []
    row = np.empty(-(-engine.model_config.vocab_size // 32), dtype=np.int32)
    token: int | None = None
    for _ in range(300):
        began = time.perf_counter()
        if token is not None and not matcher.accept([token]):
            raise RuntimeError("the grammar refuses what it allowed")
        matcher.fill_bitmask(row)
        taken.append(time.perf_counter() - began)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits)))
    return 1e6 * statistics.mean(taken)


async def run(args: argparse.Namespace) -> None:
    schema = StructuredOutputsParams(json=SCHEMA)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), args.model)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=max(2048, 256 + args.output),
            max_num_seqs=max(args.batch, 16),
            structured_outputs_config={"backend": args.backend},  # type: ignore[arg-type]
        )
        async with AsyncEngine(config) as engine:
            began = time.perf_counter()
            await tokens_per_second(engine, 1, 8, schema)
            first = time.perf_counter() - began
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for number in range(args.repeats + 1):
                for held in (False, True):
                    speed = await tokens_per_second(
                        engine, args.batch, args.output, schema if held else None
                    )
                    if number:  # The first round warms up: kernels, graphs.
                        speeds[held].append(speed)
            mask = await mask_microseconds(engine, schema)
            device = str(engine.info.device)
    plain, held = (statistics.median(speeds[kind]) for kind in (False, True))
    cuda = device.startswith("cuda")
    line = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "model": args.model,
        "workload": "structured outputs",
        "backend": args.backend,
        "batch": args.batch,
        "output": args.output,
        "plain_tokens_per_second": round(plain, 1),
        "schema_tokens_per_second": round(held, 1),
        "ratio": round(held / plain, 4),
        "first_structured_request_s": round(first, 2),
        "mask_us_per_row": round(mask, 1),
        "all_plain": [round(speed, 1) for speed in speeds[False]],
        "all_schema": [round(speed, 1) for speed in speeds[True]],
    }
    print(json.dumps(line, indent=1))
    if args.out is not None:
        with args.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
