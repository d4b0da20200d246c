"""Perplexity, recall and attention's outputs of a model whose cache is compressed."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from ....core.config import EngineConfig
from ....core.engine.async_engine import AsyncEngine
from ....core.errors import ConfigError
from ....core.outputs import RequestOutput
from ....core.registry import load_plugins
from ....core.sampling_params import OutputKind, SamplingParams
from ..report import Record
from .attention_similarity import Plugin
from .similarities import COMPARED, NAME, REFERENCE

WHOLE = "none"
"""The policy that keeps everything."""
CUE, COPIED = 8, 24
"""Tokens of a passage that are repeated, and those after them that the model should say."""
DEPTHS = (0.1, 0.35, 0.6, 0.85)
"""Where passages are in the text: 0 to 1."""


class Sizes(msgspec.Struct, frozen=True):
    """Of what is measured, in tokens."""

    context: int
    """Of a text, before its cache is compacted."""
    scored: int
    """After that, whose log-probabilities count."""
    samples: int
    """Texts."""


class Scores(msgspec.Struct):
    """Sums over all samples of a policy and ratio."""

    log_probability: float = 0.0
    num_tokens: int = 0
    num_right: int = 0
    num_copied: int = 0


async def measure(
    options: dict[str, Any],
    policy: str,
    ratios: Sequence[float],
    text: str,
    sizes: Sizes,
) -> AsyncIterator[Record]:
    """Yield a result per ratio, of one engine. options: of `EngineConfig`; policy: a KV compressor,
    or levels (`leveled`), or `WHOLE`. Raises ConfigError if the text is too short, or the model's
    context.
    """
    context, length = sizes.context, sizes.context + max(sizes.scored, CUE + COPIED)
    compression: dict[str, Any] = {}
    if policy != WHOLE:
        compression = {"kv_compression": policy, "kv_compression_prompt_interval": context}
        compression |= leveled(policy)
    config = EngineConfig(**{
        "max_num_seqs": 1, "enable_prefix_caching": False, "enforce_eager": True,
        "parts": {NAME: {"first": context, "count": sizes.scored}}, **compression, **options,
    })  # fmt: skip
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:
        if (most := engine.model_config.max_model_len) <= length:
            raise ConfigError(
                f"--context and --scored: {length} tokens and one more are over the model's {most}",
                param="context",
            )
        texts = drawn(tokens_of(engine, text), length, sizes.samples)
        for ratio in ratios:
            total, before = Scores(), engine.stats()
            for tokens in texts:
                # The reference comes just before what is compared with it.
                if policy != WHOLE:
                    await scored(engine, tokens, sizes, None)
                add(total, await scored(engine, tokens, sizes, ratio if policy != WHOLE else None))
                for depth in DEPTHS:
                    add(total, await copied(engine, tokens, sizes, depth, policy, ratio))
            whole = -(-context // config.block_size)
            yield record(policy, ratio, total, before, engine.stats(), whole)


def leveled(policy: str) -> dict[str, str | None]:
    """Return the options of levels, [COMPRESSOR=]LEVELS; {} for the name of a compressor."""
    compressor, _, levels = policy.rpartition("=")
    if "@" not in levels:
        return {}
    return {"kv_compression": compressor or None, "kv_compression_levels": levels}


def tokens_of(engine: AsyncEngine, text: str) -> list[int]:
    """Raises ConfigError without a tokenizer."""
    if engine.tokenizer is None:
        raise ConfigError("--model: it has no tokenizer, which texts need", param="model")
    return list(engine.tokenizer.encode(text, add_special_tokens=False))


def drawn(tokens: list[int], length: int, samples: int) -> list[list[int]]:
    """Return parts of a text that do not overlap, evenly spread. Raises ConfigError."""
    if len(tokens) < length * samples:
        raise ConfigError(
            f"--text: it has {len(tokens)} tokens, and {samples} samples of {length} are "
            f"{length * samples}",
            param="text",
        )
    stride = len(tokens) // samples
    return [tokens[n * stride : n * stride + length] for n in range(samples)]


async def scored(
    engine: AsyncEngine, tokens: list[int], sizes: Sizes, ratio: float | None
) -> Scores:
    """Score what follows the context. ratio: None keeps all, as a reference for later ones."""
    end = sizes.context + sizes.scored
    output = await ask(engine, tokens[:end], ratio, REFERENCE if ratio is None else COMPARED)
    logprobs = list(positions(output, sizes.context))
    return Scores(sum(each.logprob for each in logprobs), len(logprobs))


async def copied(
    engine: AsyncEngine, tokens: list[int], sizes: Sizes, depth: float, policy: str, ratio: float
) -> Scores:
    """Repeat a passage of the context after it, and count the tokens that the model would say."""
    first = int(depth * (sizes.context - CUE - COPIED))
    passage = tokens[first : first + CUE + COPIED]
    prompt = tokens[: sizes.context] + passage
    output = await ask(engine, prompt, None if policy == WHOLE else ratio, None)
    logprobs = list(positions(output, sizes.context + CUE))
    return Scores(0.0, 0, sum(each.rank == 1 for each in logprobs), len(logprobs))


async def ask(
    engine: AsyncEngine, tokens: list[int], ratio: float | None, role: str | None
) -> RequestOutput:
    """Return the output of a prompt whose log-probabilities are wanted."""
    config = engine.config
    compression: Any = None
    if config.compresses_kv:
        has_levels = config.kv_compression_levels is not None
        compression = "off" if ratio is None else None if has_levels else {"ratio": ratio}
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0,
        output_kind=OutputKind.FINAL_ONLY,
        kv_compression=compression,
        extra_args=None if role is None else {NAME: role},
    )  # fmt: skip
    outputs = [output async for output in engine.generate(tokens, params)]
    if outputs[-1].error is not None:
        raise RuntimeError(outputs[-1].error)
    return outputs[-1]


def positions(output: RequestOutput, first: int) -> Any:
    """Yield what the model says of each prompt token from `first` on."""
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    for token, token_logprobs in list(pairs)[first:]:
        assert token_logprobs is not None
        yield token_logprobs[token]


def add(total: Scores, other: Scores) -> None:
    for name in Scores.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(other, name))


def record(
    policy: str, ratio: float, total: Scores, before: Any, after: Any, num_blocks: int
) -> Record:
    """Return what is printed of one policy and ratio. num_blocks: of a whole context"""

    def counted(name: str) -> float:
        full = f"{NAME}.{name}"
        return float(after.part_counts.get(full, 0) - before.part_counts.get(full, 0))

    num_layers = sum(name.startswith(f"{NAME}.layer_") for name in after.part_counts)
    num_tokens = counted("tokens")
    cosines = [1.0] if policy == WHOLE else []
    if num_tokens and policy != WHOLE:
        cosines = [round(counted(f"layer_{n}") / num_tokens, 4) for n in range(num_layers)]
    dropped = after.kv_tokens_dropped - before.kv_tokens_dropped
    compacted = after.kv_tokens_compacted - before.kv_tokens_compacted
    returned = after.kv_blocks_returned - before.kv_blocks_returned
    whole = (after.kv_compactions - before.kv_compactions) * num_blocks
    return {
        "benchmark": "kv_compression_text", "policy": policy,
        "ratio": round(1 - dropped / compacted, 4) if compacted and leveled(policy) else ratio,
        "perplexity": round(math.exp(-total.log_probability / total.num_tokens), 4),
        "recall": round(total.num_right / total.num_copied, 4),
        "num_scored": total.num_tokens, "num_copied": total.num_copied,
        "cosines": cosines, "cosine_mean": round(sum(cosines) / len(cosines), 4),
        "cosine_least": min(cosines), "dropped": round(dropped / compacted, 4) if compacted else 0,
        "bytes": round(1 - returned / whole, 4) if whole else 1.0,
    }  # fmt: skip
