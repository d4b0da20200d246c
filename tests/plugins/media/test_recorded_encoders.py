"""Encodings that are recorded give what launched ones give; what they take from the host is found
out once, and must not depend on what is encoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeing_models
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.worker.graphs.constants import DependsOnContents, HostConstants
from jackfield.core.worker.graphs.encoder_graphs import EncoderGraphs
from jackfield.core.worker.graphs.recorder import WORTH_RECORDING
from jackfield.core.worker.parts.input_embeds import InputEmbeds
from jackfield.plugins.conformance.tape import recorded
from jackfield.plugins.executors.inprocess import InProcessExecutor

from helpers import interpreted

pytest.importorskip("triton")

LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"
OFTEN = int(WORTH_RECORDING)


def encodings(function: Callable[[], None]) -> Callable[[], None]:
    """Record encodings; of steps, calls are replays."""
    return recorded(function) if function.__qualname__.startswith("EncoderGraphs") else function


class RecordingExecutor(InProcessExecutor):
    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        super().__init__(config, model_config, plugins)
        self._worker._recorder = lambda: encodings  # type: ignore[method-assign]


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", RecordingExecutor)


def engine_of(folder: Path, **options: Any) -> AsyncEngine:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", attention_backend="triton",
        max_model_len=64, max_num_seqs=4, block_size=8, num_gpu_blocks_override=100,
        limit_mm_per_prompt={"image": 4}, **{"max_num_batched_tokens": 160, **options},
    )  # fmt: skip
    return AsyncEngine(config, plugins=plugins)


async def answer(engine: AsyncEngine, architecture: str, *seeds: int) -> list[int]:
    """Return the tokens for pictures of one size."""
    images = [seeing_models.picture(seed, 32, 32) for seed in seeds]
    written = seeing_models.FAMILIES[architecture].written * len(images)
    prompt: Any = {"prompt": f"{written}?", "multi_modal_data": {"image": images}}
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    outputs = [output async for output in engine.generate(prompt, params)]
    assert outputs[-1].error is None
    return list(outputs[-1].outputs[0].token_ids)


def part_of(engine: AsyncEngine) -> Any:
    worker: Any = engine.core.executor._worker  # type: ignore[attr-defined]
    return worker.runner.parts.find(InputEmbeds)


async def prepare(engine: AsyncEngine) -> None:
    """Let spare time pass."""
    executor: Any = engine.core.executor
    while await executor._thread.call(executor._worker.prepare_ahead):
        pass


@interpreted
@pytest.mark.parametrize("architecture", [pytest.param(LLAVA, marks=pytest.mark.slow), QWEN])
async def test_what_comes_again_is_replayed(architecture: str, tmp_path: Path) -> None:
    seeing_models.save(architecture, tmp_path)
    asked = [(seed,) for seed in range(OFTEN + 2)] + [(20, 21, 22), (23, 24), (25, 26, 27)]
    expected, replayed = [], []
    async with engine_of(tmp_path, executor="inprocess", enforce_eager=True) as engine:
        expected = [await answer(engine, architecture, *seeds) for seeds in asked]
        assert part_of(engine).graphs is None
    async with engine_of(tmp_path, executor="recording") as engine:
        part, counts = part_of(engine), []
        encode = part._encoder.encode

        def counted(items: Any) -> Any:
            counts.append(len(items))
            return encode(items)

        graphs: EncoderGraphs = part.graphs
        graphs._encode = counted
        for seeds in asked[:-1]:
            replayed.append(await answer(engine, architecture, *seeds))
        # Recording finds constants, then records: the last launch of the first four is a replay.
        assert counts[: OFTEN + 1] == [1] * (OFTEN + 1)
        assert graphs.num_recorded == 1, counts
        assert counts[OFTEN + 1 :] == [2, 2], "two of the three, then two"
        counts.clear()
        await prepare(engine)
        assert graphs.num_recorded == 2 and counts == [2, 2], "what came twice"
        replayed.append(await answer(engine, architecture, *asked[-1]))
        assert counts == [2, 2]
        assert replayed == expected
        part.weights_changed()
        await answer(engine, architecture, 30)
        assert counts == [2, 2, 1]


@interpreted
@pytest.mark.parametrize(
    ("architecture", "budget", "counts"),
    [(LLAVA, 160, {1, 2}), (LLAVA, 32, {1}), (QWEN, 32, set())],
)
async def test_pictures_of_the_only_size_are_expected(
    architecture: str, budget: int, counts: set[int], tmp_path: Path
) -> None:
    """A quarter of the rows of a plan is recorded, or one picture."""
    seeing_models.save(architecture, tmp_path)
    options: Any = {"executor": "recording", "max_num_batched_tokens": budget}
    async with engine_of(tmp_path, **options) as engine:
        executor: Any = engine.core.executor
        warmup, part = executor._worker._started.warmup, part_of(engine)
        for work in (warmup.run_largest_parts, warmup.run_largest_recorded_parts):
            await executor._thread.call(torch.inference_mode()(work))
        graphs = part.encoder_graphs(recorded)
        while await executor._thread.call(torch.inference_mode()(graphs.record_next)):
            pass
        assert {number for _, number in graphs._graphs} == counts


async def test_graphs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that served longest ago go."""
    from jackfield.core.parts.media import MediaTensor
    from jackfield.core.worker.graphs import encoder_graphs

    monkeypatch.setattr(encoder_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(encoder_graphs, "MAX_KINDS", 3)

    def encode(items: Any) -> list[torch.Tensor]:
        return [item["x"].sum(dim=1, keepdim=True) for item in items]

    graphs = EncoderGraphs(encode, recorded, torch.device("cpu"), 8)

    def once(rows: int) -> None:
        x = torch.randn(rows, 5)
        kind = encoder_graphs.Kind.of({"x": MediaTensor.of(x.numpy())}, rows)
        [out] = graphs.encode([{"x": x}], [kind])
        assert torch.equal(out, x.sum(dim=1, keepdim=True))

    with torch.inference_mode():
        for rows in (1, 2, 3, 9):
            for _ in range(OFTEN):
                once(rows)
        assert [kind.num_rows for kind, _ in graphs._graphs] == [2, 3]
        for rows in (4, 5, 6, 7):
            once(rows)
    assert [kind.num_rows for kind, _ in graphs._launches] == [5, 6, 7]


def indexed(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(len(x)) < sizes[0]
    x = x.clone()
    x[mask] = x[mask] * 2
    return x


def split(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    parts = x.split([int(size) for size in sizes])
    return torch.cat([part.flip(0) for part in parts])


def written(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Writes to what it has read."""
    places = sizes.nonzero()[:, 0]
    places += 1
    listed = torch.tensor([3.0, 4.0])
    listed *= 2
    return x * places.sum() + listed.sum()


def repeated(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(2.0).repeat_interleave(sizes)


@pytest.mark.parametrize("work", [indexed, split, written, repeated])
@torch.inference_mode()
def test_what_work_reads_of_sizes_is_constant(work: Any) -> None:
    x, sizes, out = torch.randn(5), torch.tensor([3, 2]), torch.zeros(5)
    constants = HostConstants([x])
    constants.find(lambda: out.copy_(work(x, sizes)))
    replay = recorded(lambda: constants.use(lambda: out.copy_(work(x, sizes))))
    for _ in range(2):
        x.copy_(torch.randn(5))
        replay()
        assert torch.equal(out, work(x, sizes))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + (x > 0).cumsum(0).max().item(),
        lambda x: x.to("meta"),
        lambda x: torch.empty(2).copy_(x[:2]).sum().item(),
        lambda x: torch.empty(2, device="meta").sum().item(),
    ],
)
@torch.inference_mode()
def test_work_that_reads_contents_is_refused(work: Any) -> None:
    x = torch.randn(5)
    with pytest.raises(DependsOnContents):
        HostConstants([x]).find(lambda: work(x))


@torch.inference_mode()
def test_what_comes_from_another_device_is_constant_and_stays() -> None:
    x, held = torch.randn(2), {"table": torch.ones(2)}
    storage = StorageWeakRef(held["table"].untyped_storage())
    constants = HostConstants([x])

    def work() -> None:
        x.mul_(held["table"])
        torch.arange(2).to("meta")
        torch.empty(2, device="meta").copy_(torch.arange(2.0))

    constants.find(work)
    assert [own.device.type for own in constants._results] == ["meta", "meta"]
    constants.use(work)
    held.clear()
    assert not storage.expired()
