"""Levels of running caches through the whole engine: tokens are those of a `transformers` model
whose cache is rounded and cut by hand, and blocks come back."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_cache import rounded

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols import AttentionSpec, KVCompressor
from jackfield.core.registry import load_plugins
from jackfield.plugins.attention import triton
from jackfield.plugins.kv_compressors.by_keys import KeyNorm

from helpers import (
    VOCAB,
    at_once,
    greedy_reference,
    interpreted,
    kept_tokens,
    make_checkpoint,
    queued,
    reference_model,
)

BLOCK, HEAD_DIM = 4, 32
SIZES = {32: BLOCK, 8: 14, 4: 25}
"""Bits → tokens of a block, whose channels have 4 bytes if whole; a scale and zero take 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "attention_backend": "torch", "max_model_len": 256, "max_num_seqs": 8, "block_size": BLOCK,
        "num_gpu_blocks_override": 200, **options,
    })  # fmt: skip


async def ask(engine: AsyncEngine, tokens: list[int], count: int, **params: Any) -> Any:
    wanted = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, **params)
    async for output in engine.generate(tokens, wanted):
        last = output
    assert last.error is None, last.error
    return last


async def outputs(
    folder: Path, prompts: list[list[int]], count: int, *, whole: int | None = None, **options: Any
) -> tuple[list[list[int]], Any]:
    """whole: the prompt whose cache stays as it is."""
    async with AsyncEngine(config(folder, **options)) as engine:
        results = await at_once(engine, *(
            ask(engine, one, count, kv_compression="off" if number == whole else None)
            for number, one in enumerate(prompts)
        ))  # fmt: skip
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
    assert stats.kv_blocks_used == 0
    return [result.outputs[0].token_ids for result in results], stats


class Level:
    """Tokens of all layers in a level of the twin."""

    def __init__(self, bits: int, share: float, age: int) -> None:
        self.bits, self.share, self.age = bits, share, age
        self.keys: list[list[torch.Tensor]] = []
        """Per layer, [num_kv_heads, head_dim] of each token."""
        self.values: list[list[torch.Tensor]] = []
        self.positions = 0.0

    @property
    def blocks(self) -> int:
        return -(-len(self.keys[0]) // SIZES[self.bits])


class Twin:
    """A cache of `transformers` whose tokens move to levels, as the documentation says."""

    def __init__(self, model: Any, levels: list[Level], compressor: KVCompressor | None) -> None:
        self.model, self.compressor = model, compressor
        self.levels = levels
        for level in levels:
            level.keys = [[] for _ in model.model.layers]
            level.values = [[] for _ in model.model.layers]
        self.computed = 0
        self.gained = 0

    @torch.no_grad()
    def feed(self, tokens: list[int]) -> int:
        """Compute tokens → the next one."""
        cache: Any = None
        for number in range(len(self.model.model.layers)):
            parts = []
            for name in ("keys", "values"):
                own = [each for level in self.levels[::-1] for each in getattr(level, name)[number]]
                parts.append(torch.stack(own, dim=1)[None] if own else None)
            if parts[0] is not None:
                from transformers import DynamicCache

                cache = cache or DynamicCache()
                cache.update(parts[0], parts[1], number)
        positions = torch.arange(self.computed, self.computed + len(tokens))[None]
        output = self.model(
            torch.tensor([tokens]), past_key_values=cache, position_ids=positions, use_cache=True
        )
        newest = self.levels[0]
        for number, layer in enumerate(output.past_key_values.layers):
            newest.keys[number] += layer.keys[0, :, -len(tokens) :].unbind(1)
            newest.values[number] += layer.values[0, :, -len(tokens) :].unbind(1)
        newest.positions += len(tokens)
        self.computed += len(tokens)
        return int(output.logits[0, -1].argmax())

    def move(self) -> None:
        """Move what is old enough, in whole blocks, if blocks come back."""
        ages = sorted({level.age for level in self.levels})
        for target in range(len(ages) - 1, 0, -1):
            group = [level for level in self.levels if level.age == ages[target]]
            for age in ages[target - 1 :: -1] if target > 1 else ages[:1]:
                (source,) = [level for level in self.levels if level.age == age]
                self._move(source, group)

    def _move(self, source: Level, group: list[Level]) -> None:
        newer = sum(each.positions for each in self.levels if each.age < source.age)
        old = min(newer + source.positions - group[0].age, source.positions)
        count = len(source.keys[0])
        if old <= 0 or not count:
            return
        size = SIZES[source.bits]
        moved = int(old * count / source.positions) // size * size
        kept, before = [], source.blocks + sum(level.blocks for level in group)
        for level in group:
            kept.append(max(1, round(level.share / source.share * moved)))
        after = (
            (count - moved) // size
            + bool((count - moved) % size)
            + sum(
                -(-(len(level.keys[0]) + more) // SIZES[level.bits])
                for level, more in zip(group, kept, strict=True)
            )
        )
        if not moved or after >= before:
            return
        self.gained += before - after
        for number in range(len(source.keys)):
            keys = torch.stack(source.keys[number][:moved])
            values = torch.stack(source.values[number][:moved])
            del source.keys[number][:moved], source.values[number][:moved]
            scores = torch.zeros(keys.shape[:2])
            if self.compressor is not None:
                spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=32**-0.5)
                scores = self.compressor.scores(spec, keys, values)
            first = kept_tokens(scores, kept[0]).long()
            both = kept_tokens(scores, sum(kept)).long()
            chosen = [first]
            if len(kept) == 2:
                heads = [
                    [place for place in own if place not in set(best)]
                    for own, best in zip(both.T.tolist(), first.T.tolist(), strict=True)
                ]
                chosen.append(torch.tensor(heads).T)
            for level, index in zip(group, chosen, strict=True):
                for numbers, target in ((keys, level.keys), (values, level.values)):
                    stayed = numbers.gather(0, index[..., None].expand(-1, -1, HEAD_DIM))
                    if level.bits < 16:
                        stayed = rounded(stayed, level.bits)
                    target[number] += stayed.unbind(0)
        share = moved / count * source.positions
        source.positions -= share
        group[0].positions += share


def twin_tokens(
    folder: Path,
    tokens: list[int],
    count: int,
    levels: list[tuple[int, float, int]],
    compressor: KVCompressor | None,
    interval: int,
    prompt_interval: int,
) -> tuple[list[int], int]:
    """Greedy tokens, and the blocks that came back."""
    model = reference_model(folder)
    twin = Twin(model, [Level(32, 1.0, 0), *(Level(*level) for level in levels)], compressor)
    step = prompt_interval or len(tokens)
    for begin in range(0, len(tokens), step):
        token = twin.feed(tokens[begin : begin + step])
        twin.move()
    found = [token]
    while len(found) < count:
        found.append(twin.feed([found[-1]]))
        if len(found) % interval == 1 and len(found) < count:
            twin.move()
    return found, twin.gained


@pytest.mark.parametrize(
    ("backend", "text", "levels", "policy", "count", "prompt_interval"),
    [
        pytest.param("torch", "8@16", [(8, 1.0, 16)], None, 36, 0, marks=pytest.mark.slow),
        ("torch", "16:1.0@0, 8@16, 4@48", [(8, 1.0, 16), (4, 1.0, 48)], None, 36, 32),
        ("torch", "4:0.5@24", [(4, 0.5, 24)], "key_norm", 36, 0),
        pytest.param(
            "torch", "8:.75@16,4:0.5@40", [(8, 0.75, 16), (4, 0.5, 40)], "key_norm", 36, 0,
            marks=pytest.mark.slow,
        ),
        ("torch", "8:0.5@16,4:0.25@16", [(8, 0.5, 16), (4, 0.25, 16)], "key_norm", 36, 32),
        pytest.param(
            "triton", "8:.75@16,4:0.5@40", [(8, 0.75, 16), (4, 0.5, 40)], "key_norm", 4, 32,
            marks=interpreted,
        ),
    ],
)  # fmt: skip
async def test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand(
    folder: Path, backend: str, text: str, levels: Any, policy: str | None, count: int,
    prompt_interval: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a prompt in chunks, beside a request without levels. Decode steps are fused."""
    fused: list[Any] = []
    if backend == "triton":
        decode = triton.fused_decode_attention
        monkeypatch.setattr(
            triton, "fused_decode_attention",
            lambda *own, **more: fused.append(more["levels"]) or decode(*own, **more),
        )  # fmt: skip
    tokens, interval = prompt(101), 16
    expected, gained = twin_tokens(
        folder, tokens, count, levels, KeyNorm() if policy else None, interval, prompt_interval
    )
    whole = greedy_reference(reference_model(folder), tokens, count)[0]
    assert policy is None or backend == "triton" or expected != whole, "no token mattered"
    results, stats = await outputs(
        folder, [prompt(7, 1), tokens], count, whole=0, attention_backend=backend,
        kv_compression=policy, kv_compression_levels=text, kv_compression_interval=interval,
        kv_compression_prompt_interval=prompt_interval, max_num_batched_tokens=24,
    )  # fmt: skip
    assert results[1] == expected
    assert results[0] == greedy_reference(reference_model(folder), prompt(7, 1), count)[0][:count]
    assert stats.kv_blocks_returned == gained > 0
    assert (None not in fused and len(fused) > 0) is (backend == "triton")


async def test_more_requests_run_at_once_in_the_same_bytes(folder: Path) -> None:
    """Two whole requests of 140 tokens fit; what moves to 4 bits makes room for others."""
    prompts = [prompt(100, n) for n in range(8)]

    async def most_at_once(**options: Any) -> tuple[int, Any]:
        most = 0
        async with AsyncEngine(config(folder, num_gpu_blocks_override=80, **options)) as engine:
            jobs = await queued(engine, *(ask(engine, each, 40) for each in prompts))
            while not all(job.done() for job in jobs):
                await asyncio.sleep(0.001)
                most = max(most, engine.stats().num_requests_running)
            results = await asyncio.gather(*jobs)
            stats = engine.stats()
        assert stats.kv_blocks_used == 0
        return most, (results, stats, engine.info.kv_cache_bytes)

    whole, (_, plain, size) = await most_at_once()
    most, (results, stats, leveled_size) = await most_at_once(
        kv_compression_levels="8@16,4@32", kv_compression_interval=8
    )
    assert whole <= 3 and most >= 2 * whole and size == leveled_size
    assert not plain.kv_compactions and not stats.num_preemptions and not stats.kv_tokens_dropped
    # Each prompt has 17 blocks or so less, of 4 tokens for 2 layers with 2 heads of 32 channels.
    usage = results[0].kv_compression
    assert usage.dropped_tokens == 0 and usage.kept_tokens == 139
    assert usage.saved_bytes == stats.kv_bytes_returned / 8 > 8 * 4 * 2 * 2 * 2 * 32 * 4


async def test_bytes_are_counted_by_level(folder: Path) -> None:
    """128 tokens of a prompt: 16 stay whole; 32 take 8 bits, 14 of them the room of 4 whole ones;
    the half of 80 takes 4 bits, 25 of them that room."""
    levels = {"kv_compression_levels": "8@16,4:0.5@48", "kv_compression": "key_norm"}
    async with AsyncEngine(config(folder, **levels)) as engine:
        job = asyncio.ensure_future(ask(engine, prompt(128), 60))
        while not engine.stats().kv_compactions:
            await asyncio.sleep(0)
        stats, block = engine.stats(), engine.info.block_bytes
        assert stats.kv_level_bytes_saved == {
            "8:1@16": (32 // 4 - 3) * block, "4:0.5@48": (80 // 4 - 2) * block
        }  # fmt: skip
        assert sum(stats.kv_level_bytes_saved.values()) == stats.kv_bytes_saved
        metrics = (await engine.render_metrics()).decode()
        found = re.findall(r'kv_level_saved_bytes\{level="4:0.5@48",.*\} (.*)', metrics)
        assert found == [str(float(18 * block))]
        await job
        assert set(engine.stats().kv_level_bytes_saved.values()) == {0}


async def test_a_sibling_of_a_prefix_is_unchanged(folder: Path) -> None:
    """The longer request's tokens move while the shorter one holds blocks of both; what was
    computed from them is no hit for a third."""
    short, long = prompt(15), prompt(15) + prompt(85, 1)
    plain, _ = await outputs(folder, [short, long], 10)
    options = {"kv_compression": "key_norm", "kv_compression_levels": "4:0.2@12"}
    async with AsyncEngine(config(folder, **options)) as engine:
        first = asyncio.ensure_future(ask(engine, short, 30, kv_compression="off"))
        while engine.stats().generation_tokens < 2:
            await asyncio.sleep(0)
        moved = (await ask(engine, long, 10)).outputs[0].token_ids
        assert engine.stats().kv_compactions == 1 and engine.stats().prefix_cache_hits == 12
        sibling = (await first).outputs[0].token_ids
        again = (await ask(engine, [*long, *moved], 1, kv_compression="off")).outputs[0].token_ids
        assert engine.stats().prefix_cache_hits == 12 + 100, "only the prompt may be hit"
    expected, _ = await outputs(folder, [[*long, *moved]], 1)
    assert moved != plain[1], "no token mattered"
    assert moved[0] == plain[1][0] and sibling[:10] == plain[0] and again == expected[0]


async def test_preempted_and_aborted_requests_leave_no_block(folder: Path) -> None:
    """On pressure, in a cache that holds less than the prompts at once."""
    options = {
        "kv_compression": "window", "kv_compression_levels": "8@8,4:0.5@24",
        "kv_compression_on_pressure": True, "num_gpu_blocks_override": 26,
        "max_num_batched_tokens": 16,
    }  # fmt: skip
    async with AsyncEngine(config(folder, **options)) as engine:
        jobs = await queued(engine, *(
            ask(engine, prompt(n, n), 40, n=many)
            for n, many in ((40, 1), (36, 2), (33, 1), (50, 1))
        ))  # fmt: skip
        while engine.stats().kv_compactions < 1:
            await asyncio.sleep(0.001)
            engine.core.scheduler.check_invariants()
        jobs[0].cancel()
        while not all(job.done() for job in jobs):
            await asyncio.sleep(0.001)
            engine.core.scheduler.check_invariants()
        stats = engine.stats()
        results = [job.result() for job in jobs[1:]]
    lengths = [len(each.token_ids) for result in results for each in result.outputs]
    assert lengths == [40] * 4 and stats.kv_compactions > 2 and stats.kv_blocks_used == 0
    assert stats.kv_bytes_saved == 0


async def test_drafts_see_levels(folder: Path) -> None:
    """Verified in rows of several tokens, over lengths that the host only bounds."""
    tokens = [*prompt(12, 3)] * 8
    options = {"kv_compression_levels": "8@16", "kv_compression_interval": 16}
    alone, _ = await outputs(folder, [tokens], 50, **options)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    drafted, stats = await outputs(folder, [tokens], 50, speculative_config=drafts, **options)
    assert drafted == alone and stats.kv_compactions > 1 and stats.spec_decode_num_accepted_tokens


async def test_windows_see_whole_tokens(tmp_path: Path) -> None:
    """Gemma 3: two layers with a window of 24 tokens in groups of their own, one that sees all."""
    folder = make_checkpoint("gemma3", tmp_path)
    tokens = prompt(120)

    async def log_probability(**options: Any) -> float:
        async with AsyncEngine(config(folder, **options)) as engine:
            result = await ask(engine, tokens, 40, logprobs=0)
            if options:
                assert engine.stats().kv_blocks_returned > 8
            engine.core.scheduler.check_invariants()
        return float(result.outputs[0].cumulative_logprob)

    whole = await log_probability()
    rounded_once = await log_probability(kv_compression_levels="8@24", kv_compression_interval=8)
    coarse = await log_probability(
        kv_compression_levels="4:0.02@24", kv_compression="key_norm", kv_compression_interval=8
    )
    assert abs(rounded_once - whole) < 0.05 * abs(coarse - whole)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "kv_compression_levels"), ("8", "'8' is not BITS:SHARE@AGE"),
        ("8@-3", "'8@-3' is not"), ("8@1e3", "'8@1e3' is not"), ("6@8", "'6@8' has 6 bits"),
        ("8:1.5@8", "'8:1.5@8' keeps a share of 1.5"), ("8:0@8", "'8:0@8' keeps a share of 0"),
        ("8@0", "'8@0' begins at age 0"), ("16@0", "no level is older"),
        ("8@64,4@32", "age 32 follows age 64"), ("4@8,8@16", "from age 16 tokens have 8 bits"),
        ("8:0.5@8,4@16", "from age 16 a share of 1 is kept"), ("8@8,8@16", "nothing changes"),
        ("8:0.4@8,4:0.4@8,4:0.1@16", "several share the last age"),
        ("4:0.5@8,8:0.5@8", "levels from age 8 have 4 and 8 bits"),
        ("16:.9@8,8:.8@16,4:.7@32,4:.6@64", "4 levels after the newest tokens"),
        ("8@8,", "'' is not"),
    ],
)  # fmt: skip
def test_levels_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(kv_compression="key_norm", kv_compression_levels=text)
    assert refused.value.param == "kv_compression_levels" and said in str(refused.value)


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"kv_compression_levels": "8:0.5@64"}, "kv_compression_levels", "name a KV compressor"),
        (
            {"kv_compression_levels": "8@64", "kv_compression": "key_norm"}, "kv_compression",
            "would choose nothing",
        ),
        ({"kv_compression_levels": "8@64", "kv_compression_ratio": 0.3}, "kv_compression_ratio",
         "the levels say"),
        ({"kv_compression_levels": "8@64", "kv_cache_dtype": "int8"}, "kv_compression_levels",
         "kv_cache_dtype is int8"),
        ({"kv_compression_interval": 8}, "kv_compression_interval", "kv_compression_levels"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_with_levels(options: Any, param: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        EngineConfig(**options)
    assert refused.value.param == param


async def test_models_that_cannot_have_levels(tmp_path: Path) -> None:
    async def refusal(name: str, **options: Any) -> str:
        folder = make_checkpoint(name, tmp_path / name)
        with pytest.raises(ConfigError) as refused:
            await AsyncEngine(config(folder, **options)).start()
        return str(refused.value)

    said = await refusal("gemma3", kv_compression_levels="8@23")
    assert "kv_compression_levels" in said and "window of 24 tokens" in said and "age 23" in said
    said = await refusal("qwen3", kv_compression_levels="8:0.5@16", kv_compression="snap_kv_merge")
    assert "kv_compression: 'snap_kv_merge'" in said and "changes values" in said


class Raising(KeyNorm):
    """Fails for long prompts."""

    def scores(self, spec: AttentionSpec, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if len(keys) > 90:
            raise ValueError("too many tokens for this one")
        return super().scores(spec, keys, values)


class Outside:
    jackfield_api = 3

    @hookimpl
    def register_kv_compressors(self, registry: Any) -> None:
        registry.add("raising", f"{__name__}:Raising")


async def test_a_compressor_that_raises_ends_its_request_alone(folder: Path) -> None:
    options = {"kv_compression": "raising", "kv_compression_levels": "8:0.5@16"}
    plugins = load_plugins(extra=[Outside()])
    async with AsyncEngine(config(folder, **options), plugins=plugins) as engine:
        well = asyncio.ensure_future(ask(engine, prompt(60), 20))
        async for output in engine.generate(prompt(140), SamplingParams(ignore_eos=True)):
            last = output
        assert last.error is not None and "raising" in last.error
        assert "too many tokens for this one" in last.error
        assert len((await well).outputs[0].token_ids) == 20 and engine.healthy
        engine.core.scheduler.check_invariants()
        assert engine.stats().kv_blocks_used == 0


async def test_a_request_may_turn_levels_off_and_nothing_else(folder: Path) -> None:
    async with AsyncEngine(config(folder, kv_compression_levels="8@16")) as engine:
        with pytest.raises(InvalidRequest, match="levels say how many tokens stay"):
            await ask(engine, prompt(20), 2, kv_compression={"ratio": 0.5})
        result = await ask(engine, prompt(80), 2, kv_compression="off")
        assert result.kv_compression is None and engine.stats().kv_compactions == 0
