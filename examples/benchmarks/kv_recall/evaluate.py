"""Recall of a model whose cache is compressed, through the whole engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jackfield.core.config import EngineConfig, KVCacheDType
from jackfield.core.engine.async_engine import AsyncEngine
from jackfield.core.registry import load_plugins
from jackfield.core.sampling_params import OutputKind, SamplingParams

from .forced import FREE, Plugin
from .tasks import Sample, copy, recall
from .train import POSITIONS

PAIRS = 16
"""Pairs in a context."""
ASKED = 8
"""Questions that are asked one after another."""
DICTATED = 160
"""Tokens of the context that is dictated as output."""
INTERVAL = 48
"""Tokens of output between two compactions."""
WHOLE = "none"
"""The policy that keeps everything."""


@dataclass(frozen=True)
class Trial:
    """One request: the prompt is compacted, then the output is dictated but for the answers."""

    task: str
    prompt: list[int]
    output: list[int]
    """FREE where the model answers."""
    answers: dict[int, int]
    """Place in the output → the token that is right."""
    depth: float
    """Where the context says the first answer: 0 to 1."""


TASKS = {
    "question before": "asked at the end of the prompt, and again after the compaction",
    "question after": "asked for the first time after the compaction",
    "second question": "another question than the one at the end of the prompt",
    "many questions": f"{ASKED} questions after the compaction, one after another",
    "copy": "a passage goes on whose beginning is at the end of the prompt",
    "long output": f"{ASKED} questions about the output, compacted every {INTERVAL} tokens",
}


def asked(sample: Sample, output: list[int]) -> tuple[list[int], dict[int, int]]:
    """Return an output with many questions at its end, and where each answer is."""
    output, answers = list(output), {}
    pairs = zip(sample.questions[:ASKED], sample.answers[:ASKED], strict=True)
    for question, (answer,) in pairs:
        output += question
        answers[len(output)] = answer
        output.append(FREE)
    return output, answers


def trials_of(sample: Sample, passage: Sample, dictated: Sample) -> list[Trial]:
    """Return one trial per task. sample, dictated: of `recall`; passage: of `copy`."""
    ((ask, key), (_, second)), (value,) = sample.questions[:2], sample.answers[0]
    seen = [*sample.context, ask, key]
    depth, second_depth = sample.depths[:2]
    (rest,) = passage.answers
    return [
        Trial("question before", seen, [ask, key, FREE], {2: value}, depth),
        Trial("question after", sample.context, [ask, key, FREE], {2: value}, depth),
        Trial(
            "second question", seen, [value, ask, second, FREE],
            {3: sample.answers[1][0]}, second_depth,
        ),
        Trial("many questions", sample.context, *asked(sample, []), depth),
        # The first token comes from the whole cache.
        Trial(
            "copy", [*passage.context, *passage.questions[0]], [FREE] * len(rest),
            dict(list(enumerate(rest))[1:]), passage.depths[0],
        ),
        Trial(
            "long output", dictated.context[:1], *asked(dictated, dictated.context[1:]),
            dictated.depths[0],
        ),
    ]  # fmt: skip


def draw(length: int, count: int, seed: int) -> list[Trial]:
    """Return the trials of `count` samples of `length` tokens."""
    random = np.random.default_rng([seed, length])
    return [
        trial
        for _ in range(count)
        for trial in trials_of(
            recall(random, length, PAIRS), copy(random, length), recall(random, DICTATED, PAIRS)
        )
    ]


async def evaluate(
    model: Path,
    policy: str,
    ratios: Sequence[float],
    trials: Sequence[Trial],
    stored: KVCacheDType = "auto",
    prompt_interval: int = 0,
) -> list[dict[str, Any]]:
    """Return one result per ratio and task. policy: a KV compressor, or `WHOLE`; stored: as
    `EngineConfig.kv_cache_dtype`; prompt_interval: as `kv_compression_prompt_interval` there."""
    compression: dict[str, Any] = {}
    if policy != WHOLE:
        compression = {
            "kv_compression": policy, "kv_compression_interval": INTERVAL,
            "kv_compression_prompt_interval": prompt_interval,
        }  # fmt: skip
    config = EngineConfig(
        model=str(model), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=POSITIONS, max_num_seqs=16, max_num_batched_tokens=POSITIONS,
        enable_prefix_caching=False, logits_processors=("forced_tokens",), kv_cache_dtype=stored,
        **compression,
    )  # fmt: skip
    results = []
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:

        async def right(trial: Trial, ratio: float) -> list[bool]:
            params = SamplingParams(
                temperature=0.0, max_tokens=len(trial.output), ignore_eos=True, detokenize=False,
                output_kind=OutputKind.FINAL_ONLY, extra_args={"forced_tokens": trial.output},
                kv_compression=None if policy == WHOLE else {"ratio": ratio},  # type: ignore[arg-type]
            )  # fmt: skip
            outputs = [each async for each in engine.generate(list(trial.prompt), params)]
            if outputs[-1].error is not None:
                raise RuntimeError(outputs[-1].error)
            tokens = outputs[-1].outputs[0].token_ids
            return [tokens[place] == answer for place, answer in trial.answers.items()]

        for ratio in ratios:
            before = engine.stats()
            answers = await asyncio.gather(*(right(trial, ratio) for trial in trials))
            after = engine.stats()
            counts = {
                name: getattr(after, name) - getattr(before, name)
                for name in ("kv_compactions", "kv_tokens_compacted", "kv_tokens_dropped",
                             "kv_blocks_returned")
            }  # fmt: skip
            for task in TASKS:
                pairs = zip(trials, answers, strict=True)
                own = [(trial.depth, each) for trial, each in pairs if trial.task == task]
                results.append({
                    "policy": policy, "ratio": ratio, "task": task, **_recall(own), **counts,
                })  # fmt: skip
    return results


def _recall(answers: Sequence[tuple[float, Sequence[bool]]]) -> dict[str, Any]:
    """Return the share of right answers, its standard error, and the share by depth, in fifths of
    the context."""
    flat = [one for _, each in answers for one in each]
    share = sum(flat) / len(flat)
    fifths: list[list[bool]] = [[] for _ in range(5)]
    for depth, each in answers:
        fifths[min(4, int(depth * 5))] += each[:1]
    return {
        "recall": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / len(flat)), 4),
        "num_answers": len(flat),
        "by_depth": [round(sum(own) / len(own), 3) if own else None for own in fifths],
    }
