"""Speculative decoding: the tokens of one step at a time, from fewer steps."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_attention import Bare

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.hooks import hookimpl
from jackfield.core.outputs import EngineStats
from jackfield.core.parts.speculation import DraftPlan
from jackfield.core.protocols import Drafts, KnownTokens, Speculator
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.scheduling.parts.draft_widths import DraftWidths
from jackfield.core.step import SlotStart, StepPlan
from jackfield.core.worker.batch import PersistentBatch
from jackfield.core.worker.graphs.endings import Ending
from jackfield.core.worker.parts.drafted_route import DraftedRoute
from jackfield.core.worker.parts.speculation import Speculation
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_state import SamplingState

from helpers import VOCAB, at_once, interpreted, make_checkpoint

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    "adaptive_width": False,
}  # fmt: skip
LENGTH = 96
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: Folders = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def config_of(folder: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": LENGTH,
        "max_num_seqs": 4, "max_num_batched_tokens": 40, "block_size": 4, "operations": "torch",
        "attention_backend": "torch", "num_gpu_blocks_override": 200, "max_logprobs": -1,
        **options,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings)


Asked = list[tuple[list[int], SamplingParams]]


async def serve(
    config: EngineConfig, asked: Asked, plugins: Any = None
) -> tuple[list[Any], EngineStats]:
    """The tokens and log-probabilities of all completions, and what the engine counted."""

    async def run_one(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
        async for out in engine.generate(prompt, params):
            last = out
        assert last.error is None, last.error
        return [
            (
                choice.token_ids,
                choice.finish_reason,
                choice.stop_reason,
                [
                    {token: pytest.approx(p.logprob, abs=1e-3) for token, p in position.items()}
                    for position in choice.logprobs or []
                ],
            )
            for choice in last.outputs
        ]

    async with AsyncEngine(config, plugins=plugins) as engine:
        outputs = await at_once(engine, *(run_one(engine, *each) for each in asked))
        stats = engine.stats()
        await asyncio.sleep(0)
        engine.core.check_idle()  # type: ignore[attr-defined]
        assert stats.kv_blocks_used == 0
    return list(outputs), stats


async def compare(
    folder: Path, asked: Asked, plugins: Any = None, **options: Any
) -> tuple[EngineStats, EngineStats]:
    """Serve without drafts and with them: the same outputs. Return both engines' counts."""
    # The same drafts however long steps take.
    fixed = {"adaptive_width": False}
    speculative = {**fixed, **options.pop("speculative_config", NGRAM)}
    plain, before = await serve(config_of(folder, **options), asked, plugins)
    config = config_of(folder, speculative_config=speculative, **options)
    drafted, after = await serve(config, asked, plugins)
    assert drafted == plain
    assert before.spec_decode_num_drafts == 0
    assert after.spec_decode_num_accepted_tokens > 0, "no draft was accepted: nothing is shown"
    return before, after


def greedy(**more: Any) -> SamplingParams:
    options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**options, **more})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of many lengths, most of them with repetitions, some with a beginning in common."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCAB) for _ in range(9)]
    made = []
    for number in range(count):
        part = [draw.randrange(3, VOCAB) for _ in range(2 + draw.randrange(7))]
        made.append((shared if number % 3 == 0 else []) + part * (1 + number % 4))
    return made


FEW = (11, 40, 63)
"""The only tokens that some requests may get, so that they repeat themselves."""


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param("qwen3", "snap_kv", marks=pytest.mark.slow),
        ("gemma3", "snap_kv"),
        ("gemma3", "key_norm"),
    ],
)
async def test_compacted_caches_give_the_same_tokens(name: str, policy: str, folders: Any) -> None:
    """Compacted again and again, where they are without drafts; rejected drafts leave no query
    behind."""
    asked: Asked = [([7 * n + 3, *[5, 6, 7, 8 + n] * 10], greedy(max_tokens=40)) for n in range(3)]
    asked += [
        ([9 * n + 4, *range(20, 45)], greedy(max_tokens=40, allowed_token_ids=list(FEW)))
        for n in range(2)
    ]
    before, after = await compare(
        folders(name), asked, kv_compression=policy, kv_compression_ratio=0.5,
        kv_compression_interval=9,
    )  # fmt: skip
    assert after.kv_compactions == before.kv_compactions > len(asked)
    assert after.kv_tokens_dropped == before.kv_tokens_dropped
    assert after.steps < before.steps


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss", "llama4"])
async def test_greedy_tokens_are_the_same(name: str, folders: Any) -> None:
    """With prompts in parts, shared prefixes, siblings, and windows and chunks whose blocks go
    back."""
    asked: Asked = [(prompt, greedy()) for prompt in prompts(5)]
    asked += [(prompt, greedy(allowed_token_ids=list(FEW))) for prompt in prompts(3, 1)]
    asked.append(([5, 6, 7] * 4, greedy(n=3, max_tokens=12)))
    before, after = await compare(folders(name), asked)
    assert after.steps < before.steps
    assert after.prefix_cache_hits > 0
    per_place = list(after.spec_decode_num_accepted_tokens_per_pos.values())
    assert per_place == sorted(per_place, reverse=True)
    assert sum(per_place) == after.spec_decode_num_accepted_tokens
    assert after.spec_decode_num_accepted_tokens <= after.spec_decode_num_draft_tokens
    assert per_place[0] <= after.spec_decode_num_drafts


async def test_few_blocks_preempt_and_the_tokens_are_the_same(folders: Any) -> None:
    asked: Asked = [
        (prompt, greedy(allowed_token_ids=list(FEW), max_tokens=40)) for prompt in prompts(6)
    ]
    _, after = await compare(folders("qwen3"), asked, num_gpu_blocks_override=26)
    assert after.num_preemptions > 0


async def test_what_requests_ask_for_is_kept(folders: Any) -> None:
    """Sampled ones draw the same tokens, whatever they ask for."""
    few = list(FEW)
    extras: list[dict[str, Any]] = [
        {},
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"logit_bias": {11: 1.5}},
        {"logprobs": 3},
        {"temperature": 0.0, "logprobs": 0},
        {"logprobs": 21, "temperature": 1.7},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"min_tokens": 9, "stop_token_ids": [11]},
        {"stop_token_ids": [63]},
        {"n": 2, "max_tokens": 9},
    ]
    asked: Asked = [
        (
            [7, 8, 9] * 3 + [number],
            greedy(**{"temperature": 0.8, "seed": number, "allowed_token_ids": few, **extra}),
        )
        for number, extra in enumerate(extras)
    ]
    await compare(folders("qwen3"), asked)


async def test_every_limit_of_the_output_cuts_where_it_does_without_drafts(folders: Any) -> None:
    """Stop tokens in the middle of accepted drafts, max_tokens from 1 on, and a full context."""
    few = list(FEW)
    asked: Asked = [
        ([11, 40, 63] * 3, greedy(allowed_token_ids=few, max_tokens=most)) for most in range(1, 9)
    ]
    asked += [
        ([start, 40, 63] * 3, greedy(allowed_token_ids=few, stop_token_ids=[stop]))
        for start in (11, 12)
        for stop in FEW
    ]
    asked += [
        ([5, 6] * (LENGTH // 2 - left), greedy(allowed_token_ids=few, max_tokens=2 * left))
        for left in (1, 2, 4)
    ]
    _, after = await compare(folders("qwen3"), asked, max_num_batched_tokens=200)
    assert after.spec_decode_num_accepted_tokens < after.generation_tokens


async def test_aborted_requests_leave_nothing(folders: Any) -> None:
    """check_idle and the blocks in use are looked at in `serve`."""
    config = config_of(folders("qwen3"), speculative_config=NGRAM)
    params = greedy(allowed_token_ids=list(FEW), max_tokens=60)
    async with AsyncEngine(config) as engine:

        async def leave_early(number: int) -> None:
            async for out in engine.generate([7, 8, 9] * (1 + number), params):
                if len(out.outputs[0].token_ids) > 3 * number:
                    break

        await asyncio.gather(*map(leave_early, range(6)))
        await asyncio.sleep(0)
        engine.core.check_idle()  # type: ignore[attr-defined]
        assert engine.stats().kv_blocks_used == 0


# ---------------------------------------------------------------- speculators


class Planned(Speculator):
    """Proposes whatever it is told to, of which the model says little."""

    mode = "padding"

    def __init__(self, setup: Any) -> None:
        self.setup = setup
        self.calls = 0

    def propose(self, tokens: KnownTokens) -> Drafts:
        self.calls += 1
        rows, most = len(tokens.slots), self.setup.num_drafts
        last = tokens.history[tokens.slots, tokens.lengths - 1]
        if self.mode == "raises" and self.calls > 3:
            raise RuntimeError("bang")
        if self.mode == "misshapen" and self.calls > 3:
            return Drafts(last[:, None], torch.ones(rows, dtype=torch.int32))
        token_ids = last[:, None].repeat(1, most)
        counts = torch.full((rows,), most)
        if self.mode == "outside":
            token_ids[:, 1] = (self.setup.vocab_size, -1)[self.calls % 2]
        if self.mode == "changing":
            token_ids = (token_ids + torch.arange(most)) % self.setup.vocab_size
            counts = tokens.lengths % (most + 1)
        return Drafts(token_ids, counts)


def plugins_with(mode: str) -> Any:
    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_speculators(self, registry: Any) -> None:
            registry.add("planned", type("OwnPlanned", (Planned,), {"mode": mode}))

    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("bad-dist", "2.0", "speculators"))
    return plugins


@pytest.mark.parametrize("mode", ["padding", "changing", "outside", "raises", "misshapen"])
async def test_no_speculator_changes_the_tokens(
    mode: str, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails is named in the log, and the engine goes on without drafts."""
    asked: Asked = [(prompt, greedy(allowed_token_ids=list(FEW))) for prompt in prompts(4)]
    speculative = {"method": "planned", "num_speculative_tokens": 3}
    plugins = plugins_with(mode)
    await compare(folders("qwen3"), asked, plugins, speculative_config=speculative)
    failed = [r for r in caplog.records if "goes on without drafts" in r.getMessage()]
    assert len(failed) == (mode in ("raises", "misshapen"))
    assert all("of bad-dist 2.0" in record.getMessage() for record in failed)


# ---------------------------------------------------------------- recorded steps, kernels


@interpreted
@pytest.mark.parametrize(
    ("operations", "method"),
    [
        ("torch", "ngram"),
        pytest.param("torch", "draft_model", marks=pytest.mark.slow),
        ("torch", "rejection"),
        pytest.param("triton", "ngram", marks=pytest.mark.slow),
    ],
)
async def test_recorded_forward_passes_and_kernels_give_the_same(
    operations: str, method: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with drafts have recorded steps of their own, and go through those of prompts where
    others are among them; rows without go through those of decode rows, whose blocks are written by
    column. What each costs is measured before, and told with the first result."""
    pytest.importorskip("triton")
    from test_mixed_graphs import CountingExecutor

    replayed: Counter[int] = Counter()
    foreseen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        DraftWidths, "foresee",
        lambda widths, rows, drafts, seconds: foreseen.append((rows, drafts)),
    )  # fmt: skip

    class DraftingExecutor(CountingExecutor):
        async def start(self) -> Any:
            info = await super().start()
            routes = self._worker.runner.routes  # type: ignore[union-attr]
            route = next(r for r in routes if isinstance(r, DraftedRoute))
            for graphs in route.graphs.values():
                await self.watch(graphs)
            assert self._thread is not None
            await self._thread.call(self.measure)
            return info

        @torch.inference_mode()
        def measure(self) -> None:
            steps = self._worker._started.graphs  # type: ignore[union-attr]
            assert steps is not None
            if 3 not in steps.decode.row_counts:
                steps.decode.record(3, Ending.PLAIN)
            while steps.measure_next():
                pass

        async def watch(self, graphs: Any) -> None:
            graphs._counts = graphs._counts[-1:]  # So that others are padded.

            @torch.inference_mode()
            def record() -> None:
                while missing := graphs.missing():
                    graphs.record(*missing[0])

            assert self._thread is not None
            await self._thread.call(record)
            plain = graphs.launch

            def launch(plan: Any, num_drafts: Any, ending: Any) -> bool:
                served = bool(plain(plan, num_drafts, ending))
                replayed[graphs.width] += served
                return served

            graphs.launch = launch

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("recording", DraftingExecutor)

    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    asked: Asked = [
        ([7, 8] * 4, greedy(max_tokens=30)),
        ([30 + n for n in range(11)], greedy(max_tokens=9)),
        ([5] * 6, greedy(temperature=0.9, seed=4, max_tokens=10)),
    ]
    if operations == "triton":
        few = greedy(temperature=0.9, allowed_token_ids=list(FEW), top_k=2, logprobs=2)
        asked.append(([7, 8, 9] * 2, few))
    if method == "rejection":  # A seed does not say which tokens are chosen: others are certain.
        certain = greedy(temperature=0.9, seed=4, max_tokens=10, top_k=1)
        asked[2:] = [([5] * 6, certain), ([5] * 6, greedy(temperature=0.001, max_tokens=10))]
    shared: dict[str, Any] = {
        "max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 8,
        "attention_backend": "triton", "num_gpu_blocks_override": 40,
    }  # fmt: skip
    plain, _ = await serve(config_of(folders("gemma3"), **shared), asked)
    shared |= {"operations": operations, "executor": "recording"}
    speculative: dict[str, Any] = NGRAM
    if method != "ngram":  # What it reads of a step is kept by the recorded one.
        model = str(folders("gemma3"))
        speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    if method == "rejection":
        speculative["rejection_sample_method"] = "standard"
    config = config_of(folders("gemma3"), **shared, speculative_config=speculative)
    drafted, stats = await serve(config, asked, plugins)
    assert drafted == plain
    if method != "ngram":
        assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens
    assert stats.spec_decode_num_accepted_tokens > 0
    counts = CountingExecutor.counts
    assert counts["replayed"] and not counts["launched"], counts
    assert sum(replayed.values()) > 2, replayed
    assert foreseen == [(3, drafts) for drafts in (0, *config.speculative_config.widths)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
async def test_kernels_and_graphs_on_a_gpu(name: str, folders: Any) -> None:
    """A near tie may be chosen otherwise by other kernels: in one request of all, at most."""
    few = list(FEW)
    asked: Asked = [(prompt, greedy(allowed_token_ids=few)) for prompt in prompts(5)]
    asked += [(prompt, greedy()) for prompt in prompts(4, 1)]
    asked += [
        (prompt, greedy(temperature=0.9, seed=3, top_k=9, allowed_token_ids=few))
        for prompt in prompts(3, 2)
    ]
    shared = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 64}
    plain, _ = await serve(config_of(folders(name), **shared, enforce_eager=True), asked)
    kernels = {"operations": "triton", "attention_backend": "triton", "speculative_config": NGRAM}
    drafted, stats = await serve(config_of(folders(name), **{**shared, **kernels}), asked)
    assert stats.spec_decode_num_accepted_tokens > 20
    assert sum(a == b for a, b in zip(drafted, plain, strict=True)) >= len(asked) - 1


# ---------------------------------------------------------------- the distribution


def test_drafts_leave_the_distribution_as_it_is() -> None:
    """The first two tokens of many requests over a model of four tokens, whose next depends on the
    last: each pair as often as its probability says, whatever was proposed. Chi-square at 0.1 %
    over 15 degrees of freedom is 37.7."""
    generator = torch.Generator().manual_seed(3)
    model = torch.randn(4, 4, generator=generator)
    probs = model.softmax(-1)
    first_token, draws, slots = 1, 150, 64
    batch = PersistentBatch(
        max_num_seqs=slots, max_model_len=8, block_size=4, device=torch.device("cpu"), num_drafts=2
    )
    state = SamplingState(slots + 1, 4, torch.device("cpu"), batch.table.token_history)
    sampler = Sampler(state, rows_per_slot=3)
    seen: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for draw in range(draws):
        proposals = torch.randint(0, 4, (slots, 2), generator=generator)

        class Fixed(Speculator):
            def __init__(self) -> None: ...

            def propose(self, tokens: KnownTokens, proposals: torch.Tensor = proposals) -> Drafts:
                return Drafts(proposals, torch.full((len(proposals),), 2))

        drafting = Speculation(
            Fixed(), "fixed", table=batch.table, sampling=state, operations=batch.operations,
            num_drafts=2,
        )  # fmt: skip
        starts = tuple(
            SlotStart(
                slot=slot, request_id=str(slot), token_ids=(0, first_token), num_prompt_tokens=2,
                num_computed_tokens=1, params=SamplingParams(temperature=1.0),
                seed=slots * draw + slot,
            )
            for slot in range(slots)
        )  # fmt: skip
        rows_host = list(range(slots))
        batch.write(StepPlan(draw, (), (), (), starts=starts))
        for start in starts:
            sampler.start(start)
        sampler.upload()
        each = (1,) * slots
        drafting.sampled(StepPlan(draw, tuple(rows_host), each, (True,) * slots), {}, rows_host)

        def step(num_drafts: int, drafting: Speculation = drafting) -> tuple[Any, Any, Any]:
            plan = StepPlan(
                0, tuple(range(slots)), (1 + num_drafts,) * slots, (True,) * slots,
                parts={"speculation": DraftPlan((num_drafts,) * slots)},
            )  # fmt: skip
            rows = batch.rows(plan)
            lengths = batch.table.lengths[:slots].long()
            batch.table.lengths[:slots] += 1 + num_drafts
            drafted = drafting.verifier.rows(plan, rows)
            assert torch.equal(drafted.lengths.view(slots, -1)[:, 0], lengths + 1)
            before = batch.table.token_history[drafted.slots, drafted.lengths - 1].long()
            host = [slot for slot in range(slots) for _ in range(1 + num_drafts)]
            chosen, _ = sampler.sample_eagerly(model[before], drafted.slots, host, drafted.lengths)
            verdicts = drafting.verifier.verify(drafted, chosen)
            return lengths, chosen.view(slots, -1).clone(), verdicts[:, 0]

        lengths, chosen, kept = step(2)
        accepted += int(kept.sum())
        assert torch.equal(batch.table.lengths[:slots], (lengths + 1 + kept).int())
        _, second, _ = step(0)
        pairs = torch.where(kept > 0, chosen[:, 1], second[:, 0])
        for pair in zip(chosen[:, 0].tolist(), pairs.tolist(), strict=True):
            seen[pair] += 1
    total = draws * slots
    expected = {
        (a, b): total * float(probs[first_token, a] * probs[a, b])
        for a, b in itertools.product(range(4), repeat=2)
    }
    chi_square = sum((seen[pair] - count) ** 2 / count for pair, count in expected.items())
    assert chi_square < 37.7
    assert 0.2 * total < accepted < 0.4 * total


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"method": "ngram"}, "speculative_config"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative_config"),
        ({"num_speculative_tokens": 3}, "speculative_config"),
        ({**NGRAM, "method": "medusae"}, "speculative_config"),
        ({**NGRAM, "prompt_lookup_min": 4}, "speculative_config"),
        ({**NGRAM, "prompt_lookup_max": 0}, "speculative_config"),
        ({**NGRAM, "fly_window_size": 2}, "speculative_config.fly_window_size"),
        ({**NGRAM, "rejection_sample_method": "block"}, "speculative_config"),
        ({**NGRAM, "draft_sample_method": "gumbel"}, "speculative_config"),
        ("ngram", "speculative_config"),
    ],
)
async def test_bad_options_are_refused_by_name(config: Any, field: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as error:
        await AsyncEngine(EngineConfig(speculative_config=config)).start()
    assert error.value.param == field


async def test_an_attention_backend_that_needs_exact_lengths_is_refused(folders: Any) -> None:
    config = config_of(folders("qwen3"), speculative_config=NGRAM, attention_backend="bare")
    with pytest.raises(ConfigError, match="lengths that only the device knows"):
        await AsyncEngine(config, plugins=load_plugins(extra=[Bare()])).start()


async def test_a_model_that_is_pooled_is_refused(folders: Any) -> None:
    config = config_of(folders("qwen3"), speculative_config=NGRAM, runner="pooling")
    with pytest.raises(ConfigError, match="generates no tokens"):
        await AsyncEngine(config).start()


# ---------------------------------------------------------------- the search rests


async def test_a_search_whose_drafts_are_not_wanted_rests(folders: Any) -> None:
    """It is asked now and then, and rows are as without drafts meanwhile. The schedule wants none:
    nothing depends on time."""
    asked: Asked = [([7, 8] * 4, greedy(max_tokens=80)), ([5] * 6, greedy(max_tokens=70))]
    searches = []

    class Counted(Speculator):
        def __init__(self, setup: Any) -> None:
            self.num_drafts = setup.num_drafts

        def propose(self, tokens: KnownTokens) -> Drafts:
            rows = len(tokens.slots)
            searches.append(rows)
            return Drafts(
                torch.full((rows, self.num_drafts), 9), torch.full((rows,), self.num_drafts)
            )

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_speculators(self, registry: Any) -> None:
            registry.add("counted", Counted)

    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "counted"))
    shared: dict[str, Any] = {"max_num_seqs": 2}
    plain, _ = await serve(config_of(folders("qwen3"), **shared), asked)
    own = {"method": "counted", "num_speculative_tokens": 3, "adaptive_width": False}
    own["num_speculative_tokens_per_batch_size"] = [[1, 9, 0]]
    config = config_of(folders("qwen3"), speculative_config=own, **shared)
    drafted, stats = await serve(config, asked, plugins)
    assert drafted == plain
    assert stats.spec_decode_num_draft_tokens == 0
    assert 4 < len(searches) < 45, "of 80 steps"
