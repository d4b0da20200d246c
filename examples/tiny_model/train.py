"""Trains the embedded model from generated text, on one GPU, in minutes.

    python train.py --out DIR            (then: python evaluate.py DIR)

Writes a checkpoint folder: bfloat16 safetensors, configuration, tokenizer, chat template.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from generator import examples
from text import encode, save_tokenizer, segments, train_tokenizer
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = Path(__file__).resolve().parents[2] / "plugins/models/embedded/chat_template.jinja"
MAX_LENGTH = 2048
BUCKETS = (96, 160, 256, 448)
BATCH_TOKENS = 65536


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def make_part(job: tuple[int, int, str]) -> dict[int, np.ndarray]:
    """One process's share: bucket length → [n, length] int16, answers marked by the sign.

    A token t that is learned is stored as t, one that is not as -t - 1.
    """
    seed, count, tokenizer_json = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rows: dict[int, list[np.ndarray]] = {length: [] for length in BUCKETS}
    for example in itertools.islice(examples(seed, "train"), count):
        token_ids, learned = encode(tokenizer, example)
        length = next((b for b in BUCKETS if len(token_ids) <= b), None)
        if length is None:
            continue
        row = np.full(length, -1, dtype=np.int16)  # id 0, not learned
        ids = np.asarray(token_ids, dtype=np.int16)
        row[: len(ids)] = np.where(learned, ids, -ids - 1)
        rows[length].append(row)
    return {length: np.stack(part) for length, part in rows.items() if part}


def make_data(tokenizer: Tokenizer, count: int, processes: int) -> dict[int, torch.Tensor]:
    jobs = [(1000 + i, count // (4 * processes), tokenizer.to_str()) for i in range(4 * processes)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = pool.map(make_part, jobs, chunksize=1)
    return {
        length: torch.from_numpy(np.concatenate([p[length] for p in parts if length in p]))
        for length in BUCKETS
    }


def batches(data: dict[int, torch.Tensor], seed: int):
    """Endless shuffled batches of about BATCH_TOKENS tokens, one length each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        plan = []
        for length, rows in data.items():
            order = torch.randperm(len(rows), generator=generator)
            size = BATCH_TOKENS // length
            plan += [(length, part) for part in order.split(size) if len(part) == size]
        if not plan:
            raise ValueError("too few examples: no length fills a batch")
        for index in torch.randperm(len(plan), generator=generator).tolist():
            length, part = plan[index]
            yield data[length][part.to(data[length].device)]


def train(args: argparse.Namespace) -> None:
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    sample = itertools.islice(examples(7, "train"), args.tokenizer_examples)
    tokenizer = train_tokenizer("".join(t for t, _ in segments(e)) for e in sample)
    save_tokenizer(tokenizer, args.out, MAX_LENGTH)
    shutil.copy(TEMPLATE, args.out / "chat_template.jinja")
    data = make_data(tokenizer, args.examples, args.processes)
    tokens = sum(rows.numel() for rows in data.values())
    print(f"{time.monotonic() - start:.0f} s: {tokens / 1e6:.0f} M tokens", flush=True)
    data = {length: rows.to(device) for length, rows in data.items()}

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(model_config(tokenizer)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    body = torch.compile(model.model, dynamic=False) if device == "cuda" else model.model
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98), fused=device == "cuda",
    )  # fmt: skip
    started, losses = time.monotonic(), []
    for step, rows in enumerate(batches(data, seed=1)):
        progress = max(step / args.steps, (time.monotonic() - started) / args.max_seconds)
        if progress >= 1:
            break
        rate = args.rate * min(1, (step + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = rows.long()
        learned = rows >= 0
        ids = torch.where(learned, rows, -rows - 1)
        with torch.autocast(device, torch.bfloat16):
            hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[learned[:, 1:]])
        loss = F.cross_entropy(logits.float(), ids[:, 1:][learned[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0:
            losses.append(loss.item())
            print(
                f"{time.monotonic() - start:.0f} s: step {step}, loss {losses[-1]:.4f}", flush=True
            )
        if step % 2500 == 2499:
            export(model, args.out)
    export(model, args.out)
    print(f"{time.monotonic() - start:.0f} s: done after {step} steps", flush=True)


def export(model: Qwen3ForCausalLM, folder: Path) -> None:
    """bfloat16 safetensors, and how to generate."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=2_400_000)
    parser.add_argument("--tokenizer-examples", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=14_000)
    parser.add_argument("--max-seconds", type=float, default=1e9)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    train(parser.parse_args())


if __name__ == "__main__":
    main()
