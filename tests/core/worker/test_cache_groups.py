"""Layers with windows and chunks in groups of their own: the same tokens from fewer blocks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from replaying import RecordingExecutor

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.cache.groups import CacheGroup, sequence_blocks
from jackfield.core.cache.reach import Reach
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.attention import Attention
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.request import Request
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepResult
from jackfield.core.worker.graphs.decode_graphs import DecodeKey
from jackfield.core.worker.graphs.endings import Ending
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.policies.builtin import FirstComeFirstServed

from helpers import VOCAB, at_once, edit_json, interpreted, make_checkpoint

REACHES = {
    "gemma2": Reach(24), "gemma3": Reach(24), "gpt-oss": Reach(12), "llama4": Reach(chunk_size=14),
    "mistral-window": Reach(24), "olmo3": Reach(24), "phi3": Reach(24),
}  # fmt: skip
"""Of a model's layers that do not see all tokens."""
BY_DAY = ("gemma3", "mistral-window")
"""Windows in some layers and in all layers; chunks are replayed by day, which is compared with the
same. The others differ in what is no matter of the cache, as sinks are, and run by night."""


class WholeTorch(TorchAttention):
    """A backend that knows of no groups: every layer keeps everything."""

    cache_groups = False


class StaticTorch(TorchAttention):
    """Fit to be called again and again with the same metadata: lengths are the device's, and the
    host's upper bounds say nothing of where a window begins."""

    graph_safe = True

    def _decode_chunk(self, spec: Any, metadata: Any, first: int, end: int) -> Any:
        whole = msgspec.structs.replace(
            spec, sliding_window=None, attention_chunk_size=None, chunk_lookback=0
        )
        chunk = super()._decode_chunk(whole, metadata, first, end)
        visible = chunk.visible
        if spec.reach is not None:
            positions = torch.arange(visible.shape[1])
            own = metadata.layout.seq_lens[first:end, None] - 1
            visible = visible & (positions >= spec.reach.first_visible(own))
        return replace(chunk, visible=visible, num_shared=0)

    def forward(self, spec: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any,
                **more: Any) -> Any:  # fmt: skip
        metadata.chunks.clear()
        return super().forward(spec, query, key, value, kv_cache, metadata, **more)


class CountingOperations(Operations):
    calls: Counter[str] = Counter()

    def decode_inputs(self, *args: Any) -> Any:
        self.calls["decode_inputs"] += 1
        return super().decode_inputs(*args)

    def slot_mappings(self, *args: Any) -> Any:
        self.calls["slot_mappings"] += 1
        return super().slot_mappings(*args)

    def scatter(self, *args: Any) -> Any:
        self.calls["scatter"] += 1
        return super().scatter(*args)


class Plugin:
    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("whole", WholeTorch)
        registry.add("static", StaticTorch)

    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", RecordingExecutor)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        registry.add("counting", CountingOperations)


def plugins() -> Any:
    outputs = load_plugins()
    outputs.add_plugin(Plugin(), Provenance("tests", "0", "groups"))
    return outputs


class Folders(dict[str, Path]):
    """Random checkpoints, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        self[name] = make_checkpoint(name, self.root / name)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


COMMON: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128,
    "max_num_seqs": 5, "max_num_batched_tokens": 40, "block_size": 4, "operations": "torch",
}  # fmt: skip


GROW = 9
"""The first of the requests that begin small and grow."""


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Of many lengths, some with a beginning in common, some with several answers."""
    draw = random.Random(4)
    shared = [draw.randrange(3, VOCAB) for _ in range(70)]
    outputs = []
    for number in range(GROW):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 90))]
        if number % 3 == 0:
            prompt = shared[: draw.randrange(20, 70)] + prompt[:20]
        params = SamplingParams(
            max_tokens=draw.randrange(2, 36), ignore_eos=True, detokenize=False,
            temperature=0.0 if number % 4 else 0.8, seed=number, n=2 if number % 5 == 0 else 1,
        )  # fmt: skip
        outputs.append((prompt, params))
    for number in range(4):
        # They begin small and grow.
        params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs.append(([5 + number, 6], params))
    return outputs


async def answers(
    config: EngineConfig, *, together: bool, first: int = 0
) -> tuple[list[Any], Any, Any]:
    """→ tokens of each request from `first`, twice if `together`; statistics; what the executor
    said"""

    async def run_one(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
        async for out in engine.generate(prompt, params):
            last = out
        assert last.error is None
        return sorted(choice.token_ids for choice in last.outputs)

    async with AsyncEngine(config, plugins=plugins()) as engine:
        outputs = []
        if together:
            for _ in range(2):
                outputs += await at_once(
                    engine, *(run_one(engine, *each) for each in requests()[first:])
                )
        else:
            outputs += [await run_one(engine, *each) for each in requests()[first:]]
        engine.core.scheduler.check_invariants()
        while engine.stats().kv_blocks_used:  # A connector's saves come to their end.
            await asyncio.sleep(0.01)
        return outputs, engine.stats(), engine.info


_expected: dict[tuple[Path, int], list[Any]] = {}


async def expected(folder: Path, first: int = 0) -> list[Any]:
    """One request after the other, with a cache that keeps everything."""
    if (folder, first) not in _expected:
        config = EngineConfig(
            **COMMON, model=str(folder), attention_backend="whole", enable_prefix_caching=False
        )
        once, _, info = await answers(config, together=False, first=first)
        _expected[folder, first] = once * 2
        assert len(info.cache_groups) == 1 and info.cache_groups[0].reach is None
    return _expected[folder, first]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.slow) for name in REACHES],
)
async def test_tokens_are_the_same(name: str, folders: Folders) -> None:
    """With chunks, prefix hits, several answers, preemption, and blocks that go back."""
    config = EngineConfig(
        **COMMON, model=str(folders[name]), attention_backend="torch", num_gpu_blocks_override=74,
    )  # fmt: skip
    outputs, stats, info = await answers(config, together=True)
    assert {group.reach for group in info.cache_groups} - {None} == {REACHES[name]}
    assert outputs == await expected(folders[name])
    assert stats.prefix_cache_hits > 0
    if len(info.cache_groups) > 1:
        assert stats.num_preemptions > 0


async def test_a_cache_smaller_than_a_sequence_serves_it_where_all_layers_have_windows(
    folders: Folders,
) -> None:
    config = EngineConfig(
        **{**COMMON, "max_num_batched_tokens": 8, "max_num_seqs": 2},
        model=str(folders["mistral-window"]), attention_backend="torch",
        num_gpu_blocks_override=20,
    )  # fmt: skip
    outputs, stats, _ = await answers(config, together=True, first=GROW - 2)
    assert outputs == await expected(folders["mistral-window"], GROW - 2)
    assert stats.kv_blocks_total == 19 < 88 // 4


@pytest.mark.parametrize(
    "name", ["gemma3", "llama4", pytest.param("mistral-window", marks=pytest.mark.slow)]
)
async def test_replayed_steps_give_the_same(name: str, folders: Folders) -> None:
    """Recorded decode steps write several tables' blocks, and see no released one."""
    config = EngineConfig(
        **COMMON, model=str(folders[name]), attention_backend="static", executor="recording"
    )
    outputs, _, info = await answers(config, together=True)
    assert any(group.reach for group in info.cache_groups)
    assert RecordingExecutor.recorders[-1].replays > 20
    assert outputs == await expected(folders[name])


@interpreted
@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama4", marks=pytest.mark.slow)])
async def test_kernels_give_the_same_with_recorded_prompts(name: str, folders: Folders) -> None:
    pytest.importorskip("triton")
    short = requests()[:3]

    async def tokens(**more: Any) -> list[Any]:
        config = EngineConfig(**{**COMMON, **more}, model=str(folders[name]))
        async with AsyncEngine(config, plugins=plugins()) as engine:

            async def run_one(prompt: list[int], params: SamplingParams) -> list[int]:
                stream = engine.generate(prompt, SamplingParams(
                    max_tokens=min(params.max_tokens or 4, 4), temperature=0.0, ignore_eos=True,
                    detokenize=False,
                ))  # fmt: skip
                async for out in stream:
                    last = out
                return list(last.outputs[0].token_ids)

            return await asyncio.gather(*(run_one(*each) for each in short))

    launched = await tokens(attention_backend="whole")
    assert await tokens(attention_backend="triton") == launched
    assert await tokens(attention_backend="triton", executor="recording") == launched
    assert RecordingExecutor.recorders[-1].replays > 0


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("gemma2", {"decode_inputs": 1, "slot_mappings": 1, "scatter": 1}),
        ("mistral-window", {"decode_inputs": 1}),
    ],
)
async def test_a_recorded_step_of_one_group_launches_nothing_more(
    name: str, calls: dict[str, int], folders: Folders
) -> None:
    config = EngineConfig(
        **{**COMMON, "operations": "counting"}, model=str(folders[name]),
        attention_backend="static", executor="recording",
    )  # fmt: skip
    async with AsyncEngine(config, plugins=plugins()) as engine:
        executor: Any = engine.core.executor
        graphs = executor._worker.runner.decode.graphs

        @torch.inference_mode()
        def step() -> dict[str, int]:
            graphs._inputs.fill_scratch(4)
            CountingOperations.calls.clear()
            graphs._step(DecodeKey(4, Ending.PLAIN))
            return dict(CountingOperations.calls)

        assert await executor._thread.call(step) == calls


async def test_a_connector_keeps_whole_prompts(folders: Folders, tmp_path: Path) -> None:
    config = EngineConfig(
        **COMMON, model=str(folders["gemma3"]), attention_backend="torch",
        kv_transfer_config={
            "kv_connector": "file_store", "kv_connector_extra_config": {"path": str(tmp_path)},
        },
    )  # fmt: skip
    outputs, _, info = await answers(config, together=True)
    assert [group.reach for group in info.cache_groups] == [None]
    assert outputs == await expected(folders["gemma3"])


async def test_32768_tokens_hold_a_third_of_what_whole_layers_hold(
    tmp_path: Path, folders: Folders
) -> None:
    """Five windows of 1,024 to one full layer, as Gemma 3 has them."""
    length, block_size, budget = 32768, 16, 2048
    folder = make_checkpoint("gemma3", tmp_path)
    edit_json(
        folder / "config.json",
        num_hidden_layers=6, sliding_window=1024, max_position_embeddings=length,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        load_format="dummy", max_num_batched_tokens=budget, max_num_seqs=2, block_size=block_size,
        attention_backend="torch", num_gpu_blocks_override=4000,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        info = engine.info
        executor: Any = engine.core.executor
        modules = executor._worker.runner.model.modules()
        caches = [layer.kv_cache for layer in modules if isinstance(layer, Attention)]
    page = info.kv_cache_bytes // info.num_blocks
    assert {cache[:, 0].nbytes for cache in caches} == {page}, "every group's blocks are of a size"
    assert len({cache.data_ptr() for cache in caches}) == 1, "and of one pool"
    groups = info.cache_groups
    assert groups == (CacheGroup((5,)), *(CacheGroup((n,), Reach(1024)) for n in range(5)))

    scheduler = Scheduler(
        max_num_seqs=2, max_num_batched_tokens=budget, max_model_len=length,
        num_blocks=info.num_blocks, block_size=block_size, enable_prefix_caching=True,
        enable_chunked_prefill=True, policy=FirstComeFirstServed(), groups=groups,
    )  # fmt: skip
    prompt = length - 200
    request = Request("r", [7] * prompt, SamplingParams(), max_tokens=199, seed=0)
    scheduler.add_requests(request)
    today = 6 * page * scheduler.kv.blocks_for(length)
    most = 0
    while not request.finished:
        plan = scheduler.schedule()
        assert plan is not None
        most = max(most, page * scheduler.kv.num_used_blocks)
        counts = list(map(int, plan.samples))
        scheduler.update(plan, StepResult(plan.step, counts, [7] * sum(counts)))
    assert len(request.output_token_ids) == 199
    assert most < today / 3
    assert most <= page * sequence_blocks(groups, length, block_size, budget)
