"""Training of the tiny models: two layers that learn to look things up, in minutes on a CPU.

Short sequences come first, since the circuit that finds an earlier token and reads the one after it
forms sooner in them; their positions are spread over the whole range that later prompts have, with
gaps between facts, so that the model matches tokens instead of distances. Long ones come last, so
that attention stays sharp among thousands of other tokens.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from .tasks import COPIED, COPY, VOCAB_SIZE, Sample, copy, recall

logger = logging.getLogger("jackfield.bench")

POSITIONS = 4352
"""Positions of the longest prompt with its questions."""
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LOOK_BACK = 7.0
"""Size of the biases that make a head look at the previous token."""
ACCURATE = 0.995
"""Share of right answers that ends a stage."""


@dataclass(frozen=True)
class Stage:
    """Sequences of one length."""

    length: int
    pairs: int
    batch: int
    most_steps: int
    rate: float = 2e-3


STAGES = (
    Stage(24, 6, 64, 3000),
    Stage(64, 12, 48, 1500),
    Stage(160, 16, 32, 800),
    Stage(512, 24, 8, 300, 1e-3),
    Stage(1536, 32, 3, 120, 7e-4),
    Stage(3968, 32, 1, 80, 5e-4),
)


@dataclass(frozen=True)
class Batch:
    """All [batch, tokens] int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    """The token that must follow; -100 where anything may."""


def make_batch(random: np.random.Generator, stage: Stage) -> Batch:
    """Return samples of a stage with all their questions, one in four to copy."""
    copies = max(1, stage.batch // 4) if stage.batch > 1 else int(random.integers(2))
    samples = [copy(random, max(stage.length, COPIED + 4)) for _ in range(copies)]
    samples += [recall(random, stage.length, stage.pairs) for _ in range(stage.batch - copies)]
    rows = [_row(random, sample) for sample in samples]
    width = max(len(tokens) for tokens, _, _ in rows)
    padded = [
        [np.pad(part, (0, width - len(part)), constant_values=fill) for part, fill in
         zip(row, (0, POSITIONS - 1, -100), strict=True)]
        for row in rows
    ]  # fmt: skip
    return Batch(*(torch.from_numpy(np.stack(parts)) for parts in zip(*padded, strict=True)))


def _row(random: np.random.Generator, sample: Sample) -> tuple[np.ndarray, ...]:
    """Return tokens, positions and targets of a sample with its questions."""
    tokens, targets = list(sample.context), [-100] * (len(sample.context))
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        tokens += question + answer
        targets += [-100] * (len(question) - 1) + answer + [-100]
    spare = POSITIONS - len(tokens)
    gaps = np.zeros(len(tokens), dtype=np.int64)
    if spare > 0:
        gaps[0] = random.integers(spare // 2)
        # No gap within a pair, whose first token is at an odd place, nor within a copy.
        places = np.arange(1, len(sample.context) - 1, 2)
        if sample.questions[0][0] == COPY:
            places = places[:0]
        many = random.choice(places, min(len(places), 8), replace=False) if len(places) else places
        gaps[many] = random.integers(0, 1 + (spare - gaps[0]) // 9, len(many))
    positions = np.arange(len(tokens)) + gaps.cumsum()
    return np.asarray(tokens), positions, np.asarray(targets)


def train(folder: Path, seed: int = 0, stages: tuple[Stage, ...] = STAGES) -> float:
    """Train a model into a folder, as a checkpoint → share of right answers in its last stage."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    look_back(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began, accuracy = time.monotonic(), 0.0
    for stage in stages:
        accuracy = _run(model, optimizer, random, stage)
        logger.info("%s: %.3f after %.0f s", stage, accuracy, time.monotonic() - began)
    half: Any = model.half()  # type: ignore[no-untyped-call]
    half.save_pretrained(folder)
    (folder / "trained.json").write_text(json.dumps({"seed": seed, "accuracy": accuracy}))
    return accuracy


@torch.no_grad()
def look_back(model: Qwen2ForCausalLM) -> None:
    """Begin with a head that attends to the previous token, by its biases: by itself, it
    forms much later. What it passes on, and the head that looks for it, are learned.

    Each pair of channels adds cos(frequency * (distance - 1)) to the logits.
    """
    attention = model.model.layers[0].self_attn
    frequencies = model.model.rotary_emb.inv_freq
    half = len(frequencies)
    attention.k_proj.bias[:half] = LOOK_BACK
    attention.q_proj.bias[:half] = LOOK_BACK * frequencies.cos()
    attention.q_proj.bias[half : 2 * half] = -LOOK_BACK * frequencies.sin()


def _run(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    random: np.random.Generator,
    stage: Stage,
) -> float:
    accuracy = 0.0
    for step in range(stage.most_steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min(1.0, (step + 1) / 50)
        batch = make_batch(random, stage)
        # Without a mask, a gap between positions would begin another sequence.
        states = model.model(
            batch.tokens,
            position_ids=batch.positions,
            attention_mask=torch.ones_like(batch.tokens),
        ).last_hidden_state
        questions = batch.targets >= 0
        logits, targets = model.lm_head(states[questions]), batch.targets[questions]
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = float((logits.argmax(-1) == targets).float().mean())
        accuracy = 0.95 * accuracy + 0.05 * right
        if step % 50 == 0:
            logger.info("step %d of %s: loss %.3f, %.3f right", step, stage, loss, accuracy)
        if accuracy > ACCURATE:
            break
    return accuracy
