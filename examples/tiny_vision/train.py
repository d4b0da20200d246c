"""Trains the embedded model of pictures on a CPU, in minutes.

    python train.py --out FIRST
    python train.py --start FIRST --seed 3 --rate 1e-3 --steps 1000 --out DIR
    python evaluate.py DIR

Writes a checkpoint folder in the form of `transformers`: LLaVA, a tower of SigLIP and a Llama.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pictures import COLOURS, QUESTIONS, SHAPES, Example, examples
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

SIDE, PATCH = 48, 8
ROWS = (SIDE // PATCH) ** 2
SPECIAL = ("<pad>", "<bos>", "<end>", "<image>", "<user>", "<assistant>", "<unk>")
TEMPLATE = """\
{{- '<bos>' }}
{%- for message in messages %}
{{- '<' + ('assistant' if message.role == 'assistant' else 'user') + '>' }}
{%- if message.content is string %}
{{- ' ' + message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- ' ' + part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- if message.role == 'assistant' %}{{- '<end>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}
"""


def make_tokenizer() -> Tokenizer:
    """A word, or a mark, a token."""
    texts = [question for group in QUESTIONS.values() for question in group]
    words = {word for text in texts for word in text.split()}
    words |= {*COLOURS, *SHAPES, *"a at the in top bottom left right middle ? . yes no".split()}
    vocab = {word: number for number, word in enumerate((*SPECIAL, *sorted(words)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> LlavaConfig:
    text = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=96, intermediate_size=256,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=24,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    return LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=SPECIAL.index("<image>"),
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=ROWS,
        tie_word_embeddings=True,
    )  # fmt: skip


def batch_of(
    batch: Sequence[Example], tokenizer: Tokenizer, images: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ token ids [B, T], which are learned [B, T], pixels [B, 3, SIDE, SIDE]"""
    rows = []
    for example in batch:
        question = f"<bos><user><image> {example.question} ?<assistant>"
        prompt = tokenizer.encode(question, add_special_tokens=False).ids
        at = prompt.index(3)
        prompt = [*prompt[:at], *[3] * ROWS, *prompt[at + 1 :]]
        answer = tokenizer.encode(f"{example.answer} .<end>", add_special_tokens=False).ids
        rows.append((prompt + answer, len(prompt)))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    learned = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, (row, start) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        learned[number, start : len(row)] = True
    made = images(images=[example.picture for example in batch], return_tensors="np")
    return ids, learned, torch.from_numpy(np.asarray(made["pixel_values"]))


def loss_of(model: Any, ids: torch.Tensor, learned: torch.Tensor, pixels: torch.Tensor) -> Any:
    """Mean over learned tokens."""
    logits = model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pixels).logits[
        :, :-1
    ]
    wanted = ids[:, 1:][learned[:, 1:]]
    return F.cross_entropy(logits[learned[:, 1:]], wanted)


def train(args: argparse.Namespace) -> None:
    start = time.monotonic()
    tokenizer = make_tokenizer()
    images = SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    torch.manual_seed(0)
    kind: Any = LlavaForConditionalGeneration
    model: Any = kind(model_config(tokenizer))
    if args.start is not None:
        model = kind.from_pretrained(args.start, dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98))

    def rate(step: int) -> float:
        warm, done = step / 100, step / args.steps
        return min(warm, 0.5 * (1 + math.cos(math.pi * done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    source = examples(args.seed)
    for step in range(args.steps):
        batch = batch_of([*itertools.islice(source, args.batch)], tokenizer, images)
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{time.monotonic() - start:5.0f} s {step:5d} loss {loss:.3f}", flush=True)
    save(model, tokenizer, images, args.out)


def save(model: Any, tokenizer: Tokenizer, images: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    images.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    names = {name.strip("<>"): name for name in SPECIAL}
    settings = {
        "bos_token": names["bos"], "eos_token": names["end"], "pad_token": names["pad"],
        "unk_token": names["unk"], "add_bos_token": False, "model_max_length": 512,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="go on from this checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="of the pictures")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rate", type=float, default=2e-3)
    train(parser.parse_args())
