"""KV compression through the whole engine: what stays was computed so, and blocks come back."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bare_attention import Bare
from rounded_cache import RoundedCache
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.operations import Operations
from jackfield.core.outputs import KVCompressionUsage
from jackfield.core.protocols import AttentionSpec, KVCompressor
from jackfield.core.recording.recording import PlanEntry, Recording
from jackfield.core.registry import load_plugins
from jackfield.core.scheduling.parts.kv_compression import KVCompression
from jackfield.core.step import SlotStart, StepPlan
from jackfield.core.worker.batch import PersistentBatch
from jackfield.core.worker.parts.compacted_layers import compacted_layers
from jackfield.core.worker.parts.compaction import load_compressor
from jackfield.core.worker.parts.query_ring import QueryRing
from jackfield.entrypoints.replay import replay, replay_config
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.kv_compressors.by_keys import RECENT, SINKS, KeyDiff, KeyNorm, Window
from jackfield.plugins.kv_compressors.by_queries import RKV, ExpectedAttention, SnapKV

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

BLOCK = 4
NAMES = {
    KeyNorm: "key_norm", KeyDiff: "key_diff", Window: "window", SnapKV: "snap_kv", RKV: "r_kv",
    ExpectedAttention: "expected_attention",
}  # fmt: skip
OUTPUT = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "attention_backend": "torch", "max_model_len": 96, "max_num_seqs": 8, "block_size": BLOCK,
        "num_gpu_blocks_override": 200, **options,
    })  # fmt: skip


async def run(engine: AsyncEngine, tokens: list[int], **params: Any) -> list[list[int]]:
    wanted = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUT, **params}
    )
    last: Any = None
    async for output in engine.generate(tokens, wanted):
        last = output
    return [completion.token_ids for completion in last.outputs]


async def outputs(folder: Path, prompts: list[list[int]], **options: Any) -> Any:
    """Run prompts together → their tokens, and the engine's statistics."""
    plugins = options.pop("plugins", None)
    params = options.pop("params", {})
    async with AsyncEngine(config(folder, **options), plugins=plugins) as engine:
        results = await at_once(engine, *(run(engine, one, **params) for one in prompts))
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
    assert stats.kv_blocks_used == 0
    return [tokens for (tokens,) in results], stats


@pytest.mark.parametrize("length", [16, 17, 19, 20])
async def test_keeping_all_in_fresh_blocks_changes_no_token(
    folder: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every place of a block: its last token, its first, the one before the last."""
    monkeypatch.setattr(KVCompression, "min_gain", 0)
    plain, _ = await outputs(folder, [prompt(length)])
    kept, stats = await outputs(
        folder, [prompt(length)], kv_compression="key_norm", kv_compression_ratio=1.0
    )
    assert stats.kv_compactions == 1 and stats.kv_blocks_returned == 0
    assert kept == plain


@pytest.mark.parametrize(
    "rule",
    [{"kv_compression_ratio": 1.0}, {"kv_compression_budget": 40}, {"kv_compression_budget": 90}],
)
async def test_a_budget_at_or_above_the_length_compacts_nothing(
    folder: Path, rule: dict[str, Any]
) -> None:
    """The same bits: the log-probability of each token, too."""

    async def run_all(**options: Any) -> list[tuple[list[int], float | None]]:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT, logprobs=1)
        async with AsyncEngine(config(folder, **options)) as engine:
            found = []
            for n in (1, 15, 40):
                async for output in engine.generate(prompt(n, n), params):
                    last = output
                (completion,) = last.outputs
                found.append((completion.token_ids, completion.cumulative_logprob))
            assert engine.stats().kv_compactions == 0
        return found

    assert await run_all(kv_compression="window", **rule) == await run_all()


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_batch_of_many_gives_the_tokens_of_each_alone(folder: Path, count: int) -> None:
    """All are compacted, again and again, many in one plan."""
    prompts = [prompt(20 + n % 25, n) for n in range(count)]
    options = {
        "kv_compression": "key_norm", "kv_compression_ratio": 0.4, "kv_compression_interval": 6,
        "max_num_seqs": 100, "num_gpu_blocks_override": 2000, "params": {"max_tokens": 20},
    }  # fmt: skip
    together, stats = await outputs(folder, prompts, **options)
    assert stats.kv_compactions > 2 * count
    for number in range(0, count, count // 5):
        (alone,), _ = await outputs(folder, [prompts[number]], **options)
        assert together[number] == alone


@torch.no_grad()
def pruned_reference(
    folder: Path,
    tokens: list[int],
    compressor: KVCompressor,
    places: dict[int, int],
    count: int,
    cache: RoundedCache | None = None,
) -> list[int]:
    """Greedy tokens of the `transformers` model, whose cache loses tokens with so many computed →
    so many kept, the last with the prompt: each KV head attends densely to those that are left."""
    model = reference_model(folder)
    normed: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_norm.register_forward_hook(lambda *args: normed.append(args[2]))
        for layer in model.model.layers
    ]
    begin, seen = 0, [torch.empty(0, 4, 32)] * len(model.model.layers)
    """Queries of each layer so far."""
    for end, kept in places.items():
        normed.clear()
        positions = torch.arange(begin, end)[None]
        output = model(
            torch.tensor([tokens[begin:end]]), use_cache=True, past_key_values=cache,
            position_ids=positions,
        )  # fmt: skip
        angles = model.model.rotary_emb(normed[0], positions)
        begin, cache = end, output.past_key_values
        for number, (layer, heads) in enumerate(zip(cache.layers, normed, strict=True)):
            more = {}
            if compressor.num_queries:
                turned, _ = apply_rotary_pos_emb(*[heads.transpose(1, 2)] * 2, *angles)
                seen[number] = torch.cat([seen[number], turned[0].transpose(0, 1)])
                more["queries"] = seen[number][-compressor.num_queries :]
            keys, values = (each[0].transpose(0, 1) for each in (layer.keys, layer.values))
            spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5)
            scores = compressor.scores(spec, keys, values, **more)
            # In the order that they had, as recent tokens are told by their places.
            index = torch.topk(scores, kept, dim=0).indices.sort(dim=0).values
            index = index[:, :, None].expand(-1, -1, keys.shape[2])
            layer.keys = keys.gather(0, index).transpose(0, 1)[None].contiguous()
            layer.values = values.gather(0, index).transpose(0, 1)[None].contiguous()
    for hook in hooks:
        hook.remove()
    chosen = [int(output.logits[0, -1].argmax())]
    while len(chosen) < count:
        position = torch.tensor([[len(tokens) + len(chosen) - 1]])
        output = model(
            torch.tensor([[chosen[-1]]]), past_key_values=cache, position_ids=position,
            use_cache=True,
        )  # fmt: skip
        chosen.append(int(output.logits[0, -1].argmax()))
    return chosen


@pytest.mark.parametrize(
    ("name", "policy", "count", "stored"),
    [
        ("torch", KeyNorm, OUTPUT, "auto"), ("torch", Window, OUTPUT, "auto"),
        ("torch", SnapKV, OUTPUT, "auto"), ("torch", RKV, OUTPUT, "auto"),
        pytest.param("torch", KeyNorm, OUTPUT, "fp8", marks=pytest.mark.slow),
        pytest.param("torch", SnapKV, OUTPUT, "int8", marks=pytest.mark.slow),
        ("torch", RKV, OUTPUT, "int8_int4"),
        pytest.param("torch", KeyNorm, OUTPUT, "int4", marks=pytest.mark.slow),
        pytest.param("triton", SnapKV, 3, "auto", marks=interpreted),
        pytest.param("triton", ExpectedAttention, 3, "auto", marks=interpreted),
        pytest.param("triton", KeyNorm, 3, "int8", marks=interpreted),
    ],
)  # fmt: skip
async def test_tokens_are_those_of_dense_attention_to_what_is_left(
    folder: Path, name: str, policy: type[KVCompressor], count: int, stored: str
) -> None:
    """With a prompt in chunks, and two others in the batch that are too short to be compacted; what
    is stored in fewer bits is moved as it is, and scored as attention sees it."""
    tokens = prompt(45)
    rounds = None if stored == "auto" else RoundedCache(stored)
    expected = pruned_reference(folder, tokens, policy(), {45: 18}, count, rounds)
    whole = greedy_reference(reference_model(folder), tokens, count)[0]
    assert name == "triton" or expected != whole, "nothing of importance was dropped"
    results, stats = await outputs(
        folder, [prompt(5, 1), tokens, prompt(9, 2)], attention_backend=name,
        kv_compression=NAMES[policy], kv_compression_ratio=0.4, kv_cache_dtype=stored,
        max_num_batched_tokens=16, params={"max_tokens": count},
    )  # fmt: skip
    assert results[1] == expected
    assert stats.kv_compactions == 1 and stats.kv_blocks_returned == 12 - 5
    assert stats.kv_tokens_compacted == 45 and stats.kv_tokens_dropped == 45 - 18
    assert stats.kv_compaction_seconds > 0


@pytest.mark.parametrize(
    ("name", "policy", "count"),
    [
        ("torch", KeyNorm, OUTPUT), ("torch", SnapKV, OUTPUT),
        pytest.param("triton", KeyDiff, 3, marks=interpreted),
    ],
)  # fmt: skip
async def test_later_tokens_of_a_prompt_attend_to_what_is_left(
    folder: Path, name: str, policy: type[KVCompressor], count: int
) -> None:
    """The cache loses tokens with each 25 of the prompt, beside another prompt, which decodes."""
    tokens = prompt(60)
    expected = pruned_reference(folder, tokens, policy(), {25: 16, 50: 20, 60: 24}, count)
    once = pruned_reference(folder, tokens, policy(), {60: 24}, count)
    assert name == "triton" or expected != once, "nothing of importance was dropped early"
    results, stats = await outputs(
        folder, [prompt(5, 1), tokens], attention_backend=name, kv_compression=NAMES[policy],
        kv_compression_ratio=0.4, kv_compression_prompt_interval=25,
        max_num_batched_tokens=16, params={"max_tokens": count},
    )  # fmt: skip
    assert results[1] == expected
    assert stats.kv_compactions == 3 and stats.kv_tokens_dropped == 60 - 24


async def test_a_sibling_of_a_prefix_is_unchanged(folder: Path) -> None:
    """The longer request is compacted while the shorter one holds blocks of both; what was computed
    after the compaction is no hit for a third."""
    short, long = prompt(15), prompt(15) + prompt(45, 1)
    plain, _ = await outputs(folder, [short, long])
    options = {"kv_compression": "key_norm", "kv_compression_ratio": 0.3}
    async with AsyncEngine(config(folder, **options)) as engine:
        first = asyncio.ensure_future(run(engine, short, max_tokens=30))
        while engine.stats().generation_tokens < 2:
            await asyncio.sleep(0)
        (compacted,) = await run(engine, long)
        assert engine.stats().kv_compactions == 1 and engine.stats().prefix_cache_hits == 12
        ((sibling),) = (await first)[:1]
        again = await run(engine, [*long, *compacted])
        assert engine.stats().prefix_cache_hits == 12 + 60, "only the prompt may be hit"
    expected, _ = await outputs(folder, [[*long, *compacted], short], params={"max_tokens": 1})
    assert compacted != plain[1], "the compaction had no effect"
    assert compacted[0] == plain[1][0] and sibling[:OUTPUT] == plain[0]
    assert again[0][0] == expected[0][0]


async def test_preempted_requests_and_siblings_finish(folder: Path) -> None:
    """In a cache that holds less than the prompts at once; one is aborted on the way."""
    options = {
        "kv_compression": "window", "kv_compression_ratio": 0.5, "num_gpu_blocks_override": 26,
        "max_num_batched_tokens": 16,
    }  # fmt: skip
    async with AsyncEngine(config(folder, **options)) as engine:
        jobs = await queued(engine, *(
            run(engine, prompt(n, n), max_tokens=40, n=many)
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
    assert [len(tokens) for result in results for tokens in result] == [40] * 4
    assert stats.num_preemptions and stats.kv_compactions > 2 and stats.kv_blocks_used == 0


def num_compactions(plan: StepPlan) -> int:
    part = plan.parts.get("kv_compression")
    return 0 if part is None else len(part.compactions)


async def test_several_requests_are_compacted_in_one_plan(folder: Path, tmp_path: Path) -> None:
    """Together, they get the tokens that each gets alone."""
    prompts = [prompt(n, n) for n in (40, 45, 33)]
    options = {"kv_compression": "key_norm", "kv_compression_ratio": 0.4}
    alone = [(await outputs(folder, [each], **options))[0][0] for each in prompts]
    file = tmp_path / "steps"
    together, stats = await outputs(folder, prompts, record_steps=str(file), **options)
    assert together == alone and stats.kv_compactions == 3
    plans = [each.plan for each in Recording(str(file)).entries() if isinstance(each, PlanEntry)]
    assert max(map(num_compactions, plans)) > 1


async def test_a_cache_is_compacted_again_and_again(folder: Path) -> None:
    """With 20, 32, 44 and 56 tokens computed, 16 are left; the first 12 tokens see all."""
    plain, _ = await outputs(folder, [prompt(8)], params={"max_tokens": 60})
    results, stats = await outputs(
        folder, [prompt(8)], kv_compression="window", kv_compression_budget=16,
        kv_compression_interval=12, params={"max_tokens": 60},
    )  # fmt: skip
    assert len(results[0]) == 60 and results[0][:12] == plain[0][:12]
    assert stats.kv_compactions == 4 and stats.kv_tokens_dropped == 4 + 3 * 12


async def test_in_place_and_in_fresh_blocks_give_the_same_tokens(folder: Path) -> None:
    options = {"kv_compression": "key_norm", "kv_compression_ratio": 0.4}
    fresh, _ = await outputs(folder, [prompt(45)], **options)
    starved, stats = await outputs(
        folder, [prompt(45)], **options, num_gpu_blocks_override=15, max_model_len=56
    )
    assert starved == fresh and stats.kv_compactions == 1


async def test_a_response_says_what_is_left_of_the_cache(folder: Path) -> None:
    """18 of 45 prompt tokens, and the generated ones but the last."""
    async with AsyncEngine(
        config(folder, kv_compression="key_norm", kv_compression_ratio=0.4)
    ) as engine:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT)
        async for output in engine.generate(prompt(45), params):
            last = output
        # 3 layers of 2 heads of 32 channels: keys and values of 4 tokens, in float32.
        block_bytes = 3 * 2 * 2 * 32 * BLOCK * 4
        saved = (12 - 5) * block_bytes
        assert last.kv_compression == KVCompressionUsage(18 + OUTPUT - 1, 45 - 18, 1, saved)
        assert engine.stats().kv_bytes_returned == saved
        async for output in engine.generate(prompt(5), params):
            last = output
        assert last.kv_compression is None
    one, other = KVCompressionUsage(27, 27, 1, 8), KVCompressionUsage(16, 40, 2, 9)
    assert KVCompressionUsage.total([one, None, other]) == KVCompressionUsage(43, 67, 3, 17)
    assert KVCompressionUsage.total([None]) is None


async def test_books_say_what_is_saved_now(folder: Path) -> None:
    """Of requests that run; a cache is compacted at a word, beside one that must not be."""
    options = {"kv_compression": "key_norm", "kv_compression_on_pressure": True}
    off: Any = "off"
    async with AsyncEngine(config(folder, **options)) as engine:
        jobs = await queued(engine, *(
            run(engine, prompt(40, n), max_tokens=50, **more)
            for n, more in enumerate(({}, {"kv_compression": off}))
        ))  # fmt: skip
        while engine.stats().generation_tokens < 8:
            await asyncio.sleep(0)
        assert engine.stats().kv_compression_ratio == 1 and not engine.stats().kv_bytes_saved
        assert await engine.compact_kv_cache() == 1
        while not engine.stats().kv_compactions:
            await asyncio.sleep(0)
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
        metrics = (await engine.render_metrics()).decode()
        assert stats.kv_bytes_saved == stats.kv_bytes_returned > 0
        assert stats.kv_tokens_missing == stats.kv_tokens_dropped
        assert 80 < stats.kv_tokens_computed < 130
        assert stats.kv_compression_ratio == 1 - stats.kv_tokens_missing / stats.kv_tokens_computed
        name = 'model_name="' + str(folder) + '"'
        assert f"jackfield:kv_saved_bytes{{{name}}} {float(stats.kv_bytes_saved)}" in metrics
        assert f"jackfield:kv_returned_bytes_total{{{name}}}" in metrics
        assert 0.6 < float(re.findall(r"kv_compression_ratio\{.*\} (.*)", metrics)[0]) < 0.9
        await asyncio.gather(*jobs)
        stats = engine.stats()
        assert (stats.kv_bytes_saved, stats.kv_tokens_missing) == (0, 0)
        assert stats.kv_bytes_returned > 0 and stats.kv_compression_ratio == 1
    async with AsyncEngine(config(folder)) as engine:
        with pytest.raises(InvalidRequest, match="compresses no caches"):
            await engine.compact_kv_cache()


async def test_under_pressure_nothing_is_preempted(folder: Path) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 26, "params": {"max_tokens": 30}}
    prompts = [prompt(n, n) for n in (36, 40)]
    _, whole = await outputs(folder, prompts, **options)
    results, pressed = await outputs(
        folder, prompts, **options, kv_compression="window", kv_compression_ratio=0.5,
        kv_compression_on_pressure=True,
    )  # fmt: skip
    assert whole.num_preemptions and not pressed.num_preemptions
    assert pressed.kv_compactions and [len(tokens) for tokens in results] == [30, 30]


async def test_requests_say_how_much_of_their_cache_stays(folder: Path) -> None:
    options = {"kv_compression": "key_norm", "kv_compression_ratio": 0.4}
    plain, _ = await outputs(folder, [prompt(45)])
    off, stats = await outputs(folder, [prompt(45)], **options, params={"kv_compression": "off"})
    assert off == plain and stats.kv_compactions == 0
    half, _ = await outputs(folder, [prompt(45)], **{**options, "kv_compression_ratio": 0.5})
    own, stats = await outputs(
        folder, [prompt(45)], **options, params={"kv_compression": {"budget": 23}}
    )
    assert own == half and stats.kv_tokens_dropped == 22
    with pytest.raises(InvalidRequest, match="kv_compression: this engine compresses no caches"):
        await outputs(folder, [prompt(45)], params={"kv_compression": {"ratio": 0.5}})


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("half", "kv_compression"),
        ({"share": 0.5}, "kv_compression.share"),
        ({"ratio": 0}, "kv_compression.ratio"),
        ({"ratio": float("nan")}, "kv_compression.ratio"),
        ({"budget": True}, "kv_compression.budget"),
        ({"budget": 2**31}, "kv_compression.budget"),
        ({"budget": 5, "ratio": 0.5}, "kv_compression.budget"),
    ],
)
def test_a_request_with_a_wrong_value_is_refused(value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(kv_compression=value)
    assert caught.value.param == field


# ---------------------------------------------------------------- parts


def test_policies_keep_first_and_last_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    spec = AttentionSpec(num_heads=4, num_kv_heads=3, head_dim=8, scale=1.0)
    keys, values = torch.randn(2, 40, 3, 8, generator=draw)
    kept = kept_tokens(Window().scores(spec, keys, values), 16)
    assert kept.T.tolist() == [[*range(SINKS), *range(28, 40)]] * 3
    kept = kept_tokens(KeyNorm().scores(spec, keys, values), 16)
    for head, chosen in enumerate(kept.T.tolist()):
        assert chosen[:SINKS] == list(range(SINKS)) and chosen[-RECENT:] == list(range(32, 40))
        middle = sorted(range(SINKS, 32), key=lambda i: float(keys[i, head].norm()))[:4]
        assert chosen[SINKS:-RECENT] == sorted(middle)


def test_rejected_drafts_leave_all_queries_of_a_ring() -> None:
    """The step before wrote 4 drafts at the places of later tokens."""
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    layers = compacted_layers([Attention(spec, build)], 96)
    ring = QueryRing(layers, 1, 8, torch.device("cpu"), torch.float32, num_drafts=4)
    batch = PersistentBatch(
        max_num_seqs=1, max_model_len=96, block_size=4, device=torch.device("cpu"), compacts=True
    )
    start = SlotStart(0, "r", tuple(range(30)), 30, 0, SamplingParams(), 0)
    ring.start(start)
    for step, count in enumerate((17, 5)):
        plan = StepPlan(
            step=step, slots=(0,), num_tokens=(count,), samples=(False,),
            starts=(start,) if step == 0 else (),
        )  # fmt: skip
        inputs = batch.apply(plan)
        tokens, places = ring.places(inputs)
        positions = inputs.positions if tokens is None else inputs.positions[tokens]
        written = layers[0].layer.query_ring
        assert written is not None
        written.index_copy_(0, places, positions.float()[:, None, None].expand(-1, 1, 2))
    (kept,) = ring.queries([0], 0, 18)
    assert kept[:, 0, 0].tolist() == list(range(10, 18))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_compression": "no_such"}, "kv_compression: .*no_such"),
        ({"kv_compression": "window", "kv_compression_ratio": 0.0}, "kv_compression_ratio"),
        ({"kv_compression": "window", "kv_compression_budget": 0}, "kv_compression_budget"),
        ({"kv_compression_ratio": 0.4}, "kv_compression_ratio: .*name one with kv_compression"),
        ({"kv_compression_budget": 64}, "kv_compression_budget: .*name one"),
        ({"kv_compression_interval": 8}, "kv_compression_interval: .*name one"),
        ({"kv_compression_prompt_interval": 8}, "kv_compression_prompt_interval: .*name one"),
        ({"kv_compression_on_pressure": True}, "kv_compression_on_pressure: .*name one"),
        ({"kv_compression": "window", "kv_compression_ratio": 0.4,
          "kv_compression_budget": 64}, "kv_compression_budget: .*leave one of them out"),
        ({"kv_compression": "window", "kv_compression_interval": 8,
          "kv_compression_on_pressure": True}, "kv_compression_interval"),
        ({"kv_compression": "window", "kv_compression_prompt_interval": 8,
          "kv_compression_on_pressure": True}, "kv_compression_prompt_interval: .*run out"),
        ({"kv_compression": "window", "kv_compression_prompt_interval": 8,
          "enable_chunked_prefill": False}, "kv_compression_prompt_interval: .*in one step"),
        ({"kv_compression_threshold": 0.5}, "kv_compression_threshold: .*name one"),
        ({"kv_compression": "window", "kv_compression_threshold": 0.5},
         "kv_compression_threshold: .*set kv_compression_on_pressure"),
        ({"kv_compression": "window", "attention_backend": "bare"}, "reads no compacted cache"),
        ({"kv_compression": "window", "runner": "pooling"}, "kv_compression: .* is pooled"),
    ],
)  # fmt: skip
async def test_what_does_not_go_together_is_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await outputs(folder, [prompt(5)], plugins=load_plugins(extra=[Bare()]), **options)


async def test_windows_in_all_layers_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral-window", tmp_path)
    with pytest.raises(ConfigError, match=r"kv_compression: all layers .* nothing to compact"):
        await outputs(folder, [prompt(5)], kv_compression="window")


def test_alibi_is_refused() -> None:
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    slopes = AttentionSpec(
        num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, alibi_slopes=(0.5, 0.25)
    )
    named = config(Path(), kv_compression="window")
    with pytest.raises(ConfigError, match=r"kv_compression: .*ALiBi"):
        load_compressor(load_plugins(), named, [Attention(slopes, build)], torch.float32, 96)


class OlderExecutor(InProcessExecutor):
    """An executor whose worker knows of no compactions."""

    async def start(self) -> Any:
        return msgspec.structs.replace(await super().start(), parts=())


class OneScore(KVCompressor):
    """Its scores are not those of each head."""

    def scores(self, spec: AttentionSpec, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return keys[:, 0, 0]


class OwnInputs(Operations):
    """Operations that lay out steps themselves, and know nothing of compacted caches."""

    name = "own_inputs"

    def step_inputs(self, *args: Any) -> Any:
        return super().step_inputs(*args)


class Outside:
    jackfield_api = 3

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        registry.add("own_inputs", f"{__name__}:OwnInputs")

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("older", f"{__name__}:OlderExecutor")

    @hookimpl
    def register_kv_compressors(self, registry: Any) -> None:
        registry.add("one_score", f"{__name__}:OneScore")


async def test_an_executor_that_compacts_nothing_is_refused(folder: Path) -> None:
    plugins = load_plugins(extra=[Outside()])
    with pytest.raises(ConfigError, match="kv_compression: executor 'older'"):
        await outputs(
            folder, [prompt(5)], plugins=plugins, kv_compression="window", executor="older"
        )


async def test_operations_without_the_option_are_refused(folder: Path) -> None:
    plugins = load_plugins(extra=[Outside()])
    message = r"kv_compression: operations 'own_inputs' .* step_inputs\.dropped"
    with pytest.raises(ConfigError, match=message):
        await outputs(
            folder, [prompt(5)], plugins=plugins, kv_compression="window", operations="own_inputs"
        )
    assert await outputs(folder, [prompt(5)], plugins=plugins, operations="own_inputs")


async def test_scores_of_a_wrong_shape_name_the_plugin(folder: Path) -> None:
    plugins = load_plugins(extra=[Outside()])
    options = {"kv_compression": "one_score", "kv_compression_prompt_interval": 16}
    async with AsyncEngine(config(folder, **options), plugins=plugins) as engine:
        async for output in engine.generate(prompt(40), SamplingParams(ignore_eos=True)):
            last = output
        assert last.error is not None
        assert "one_score" in last.error and "its scores are [32]" in last.error
        assert await run(engine, prompt(10)), "others go on"


async def test_a_recording_with_compactions_replays(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps"
    await outputs(
        folder, [prompt(40), prompt(20, 1)], kv_compression="key_norm", record_steps=str(file)
    )
    recording = Recording(str(file))
    plans = [each.plan for each in recording.entries() if isinstance(each, PlanEntry)]
    assert sum(map(num_compactions, plans)) == 2
    settings = replay_config(recording.header.config, recording.header.info)
    assert (await replay(Recording(str(file)), settings, load_plugins())).num_steps == len(plans)
