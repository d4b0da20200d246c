"""Stages that each have some of a model's layers serve what one rank serves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import save_decoder
from rank_executor import Plugin, RankThreads
from test_worker_ranks import Recording, config, requests, tokens

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.loading.weight_map import ParameterFiller
from jackfield.core.parallel.join import exchange, join, leave, listen
from jackfield.core.parallel.ranks import Pipeline, Ranks
from jackfield.core.registry import load_plugins
from jackfield.core.step import StepPlan
from jackfield.core.worker.batch import LogitRows, PersistentBatch, StepRows
from jackfield.core.worker.parts.pipeline import PipelineStage
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_groups, thread_ranks

from helpers import interpreted, make_checkpoint


def staged(folder: Path, num_stages: int, size: int = 1, **options: Any) -> EngineConfig:
    stages = {"pipeline_parallel_size": num_stages, "executor": "rank_threads"}
    return config(folder, size, **{**stages, **options})


# ---------------------------------------------------------------- division


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (4, 1, [4]), (4, 2, [2, 2]), (5, 2, [2, 3]), (5, 3, [1, 2, 2]), (3, 3, [1, 1, 1]),
        (10, 4, [2, 3, 3, 2]), (11, 4, [2, 3, 3, 3]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
    ],
)  # fmt: skip
def test_layers_are_divided_as_evenly_as_possible(
    layers: int, stages: int, sizes: list[int]
) -> None:
    parts = [Pipeline(stage, stages).layers(layers) for stage in range(stages)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_layers_are_divided_as_asked() -> None:
    parts = [Pipeline(stage, 3, partition=(4, 1, 2)).layers(7) for stage in range(3)]
    assert parts == [range(4), range(4, 5), range(5, 7)]
    for given in ("4,1,2", "4, 1,2", ["4,1,2"], ["4", "1", "2"], [4, 1, 2]):
        made = EngineConfig.from_options(
            {"pipeline_layer_partition": given, "pipeline_parallel_size": 3}
        )
        assert made.pipeline_layer_partition == (4, 1, 2)


def test_stages_without_a_layer_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(0, 4).layers(3)
    assert caught.value.param == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("4,3", "layers of 2 stages, and pipeline_parallel_size is 3"), ("4,0,3", ">= 1"),
        ("4,x,3", "Expected `int`"), (True, "Expected `array"),
        ("4,1,3", "8 layers, and this model has 7"),
    ],
)  # fmt: skip
def test_a_partition_that_does_not_fit_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        made = EngineConfig(pipeline_layer_partition=given, pipeline_parallel_size=3)
        Pipeline(0, 3, partition=made.pipeline_layer_partition).layers(7)
    assert caught.value.param == "pipeline_layer_partition"


def test_rank_0_belongs_to_the_last_stage() -> None:
    places = [(ranks.pipeline.stage, ranks.tensor.rank) for ranks in thread_ranks(2, 3)]
    assert places == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]


def test_states_of_decode_rows_wait_for_the_step_s_inputs() -> None:
    """By a copy: without one, kernels of the first layer that begin early could be between."""
    batch = PersistentBatch(
        max_num_seqs=2, max_model_len=16, block_size=4, device=torch.device("cpu")
    )
    stage = PipelineStage(
        Pipeline(1, 2), batch.table, max_tokens=8, incoming_size=3, dtype=torch.float32,
        device=batch.device,
    )  # fmt: skip
    assert stage.incoming is not None
    stage.incoming.normal_()
    for lengths, copied in (((1, 1), True), ((1, 3), False)):
        counts = np.asarray(lengths, dtype=np.int32)
        slots = np.asarray([0, 1], dtype=np.int32)
        inputs = batch.lay_out(
            rows := StepRows.of(slots, np.zeros(2, dtype=np.int32), counts, slots),
            LogitRows.sampled(rows, (True, True)),
        )
        states = stage.context(inputs)
        assert states is not None and torch.equal(states, stage.incoming[: sum(lengths)])
        assert (states.data_ptr() != stage.incoming.data_ptr()) is copied


# ---------------------------------------------------------------- joining


def joined(num_stages: int, size: int, work: Any) -> list[Any]:
    """What `work` returns on each rank, threads over gloo."""
    settings = EngineConfig(
        device="cpu", tensor_parallel_size=size, pipeline_parallel_size=num_stages,
        distributed_timeout_seconds=30,
    )  # fmt: skip
    plugins, listener = load_plugins(), listen()
    address = listener.getsockname()[:2]

    def run(rank: int) -> Any:
        ranks = join(
            settings, plugins, rank=rank, address=address, listener=None if rank else listener
        )
        try:
            return work(ranks)
        finally:
            leave(ranks)

    return run_ranks([lambda rank=rank: run(rank) for rank in range(num_stages * size)])


def test_each_stage_adds_by_itself_and_states_go_through_all_of_them() -> None:
    def work(ranks: Ranks) -> tuple[int, int, float, float]:
        stages, number = ranks.pipeline, torch.zeros(1)
        if not stages.first:
            stages.receive_hidden(number).wait()
        number = ranks.tensor.all_reduce(number + 1)
        if stages.last:
            stages.send_tokens(number)
            back = 0.0
        else:
            stages.send_hidden(number)
            into = torch.zeros(1)
            if stages.first:
                stages.receive_tokens(into).wait()
            back = float(into)
        smallest = ranks.minimum_of_stages(10 * stages.stage + 5, torch.device("cpu"))
        assert smallest == 5 and ranks.minimum(stages.stage, torch.device("cpu")) == stages.stage
        return stages.stage, ranks.tensor.rank, float(number), back

    assert joined(3, 2, work) == [
        (2, 0, 14.0, 0.0), (2, 1, 14.0, 0.0), (1, 0, 6.0, 0.0), (1, 1, 6.0, 0.0),
        (0, 0, 2.0, 14.0), (0, 1, 2.0, 14.0),
    ]  # fmt: skip


def test_ranks_exchange_what_they_have_to_say() -> None:
    told = [["a", 1], None, {"long": "x" * 300}]
    groups, cpu = thread_groups(3), torch.device("cpu")
    calls = [lambda g=group: exchange(g, told[g.rank], cpu) for group in groups]
    assert run_ranks(calls) == [told] * 3


# ---------------------------------------------------------------- serving


@pytest.mark.parametrize(
    ("family", "num_stages", "size", "options"),
    [
        ("qwen3", 2, 1, {"pipeline_layer_partition": "2,1"}),
        pytest.param("qwen3", 3, 1, {}, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, 2, {}, marks=pytest.mark.slow),
        ("gemma3", 3, 1, {}),
        pytest.param("gpt-oss", 2, 1, {}, marks=pytest.mark.slow),
        ("llama4", 2, 1, {}), ("gemma4", 2, 2, {}),
        ("gemma3n", 3, 1, {"pipeline_layer_partition": "1,1,3"}),
    ],
)  # fmt: skip
async def test_stages_serve_the_tokens_of_one_rank(
    family: str, num_stages: int, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of requests of all kinds, some of them preempted, some in parts; with windows and chunks,
    whose layers are in stages of unlike sizes; with inputs of each layer, which stages pass on."""
    folder = make_checkpoint(family, tmp_path)
    want = await tokens(config(folder, 1), requests())
    assert await tokens(staged(folder, num_stages, size, **options), requests()) == want


async def test_all_stages_have_a_step_in_steady_decode(tmp_path: Path) -> None:
    """And one more waits at the first, so that none waits for the host."""
    settings = staged(make_checkpoint("qwen3", tmp_path), 3)
    params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    in_flight: list[int] = []
    rows: list[set[int]] = []
    async with AsyncEngine(settings, plugins=load_plugins(extra=[Plugin()])) as engine:
        executor: Any = engine.core.executor  # type: ignore[attr-defined]
        submit = executor.submit

        def watched(plan: StepPlan, *more: Any) -> Any:
            if plan.total_tokens == len(plan.slots):
                in_flight.append(engine.core.scheduler.in_flight)  # type: ignore[attr-defined]
                rows.append(set(plan.slots))
            return submit(plan, *more)

        executor.submit = watched

        async def serve(number: int) -> None:
            async for _ in engine.generate([5 + number, 7, 9], params):
                pass

        await asyncio.gather(*map(serve, range(4)))
        engine.core.check_idle()  # type: ignore[attr-defined]
    steady = slice(10, -10)
    assert set(in_flight[steady]) == {4}
    assert all(
        not a & b and not a & c
        for a, b, c in zip(rows[8:-10], rows[9:-9], rows[10:-8], strict=True)
    )


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"model_impl": "transformers"}, lambda folder: make_checkpoint("qwen3", folder)),
        ({"runner": "pooling"}, lambda folder: save_decoder(folder, "Qwen3", "Model")),
        ({"pipeline_parallel_size": 4}, lambda folder: make_checkpoint("qwen3", folder)),
        ({"pipeline_parallel_size": 3}, lambda folder: make_checkpoint("gemma3n", folder)),
    ],
)
async def test_what_stages_cannot_serve_is_refused_by_name(
    options: dict[str, Any], made: Any, tmp_path: Path
) -> None:
    settings = staged(made(tmp_path), 2, **{"num_gpu_blocks_override": None, **options})
    with pytest.raises(ConfigError) as caught:
        async with AsyncEngine(settings, plugins=load_plugins(extra=[Plugin()])):
            pass
    assert caught.value.param == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("architecture", "divided"),
    [
        ("LlamaForCausalLM", True), ("GPT2LMHeadModel", True), ("BloomForCausalLM", True),
        ("Gemma4ForCausalLM", True), ("Zamba2ForCausalLM", False),
        ("BartForConditionalGeneration", False), ("T5ForConditionalGeneration", False),
        ("BertModel", False),
    ],
)  # fmt: skip
def test_a_model_says_whether_its_layers_can_be_divided(architecture: str, divided: bool) -> None:
    model = load_plugins()["model"].load(architecture)
    assert getattr(model, "pipeline_parallel", False) == divided


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("qwen3", 1, {"quantization": "int8"}),
        ("qwen3", 1, {"kv_cache_dtype": "int4"}),
        ("mistral-window", 1, {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}),
        ("qwen3", 1, {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}),
        ("qwen3-moe", 2, {"enable_expert_parallel": True}),
    ],
    ids=str,
)
async def test_stages_take_what_one_rank_takes(
    family: str, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    alone = {name: value for name, value in options.items() if name != "enable_expert_parallel"}
    want = await tokens(config(folder, 1, **alone), requests())
    assert await tokens(staged(folder, 2, size, **options), requests()) == want


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_its_own_tensors_alone(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3" if tied else "olmo2", tmp_path)
    read: list[str] = []
    fill = ParameterFiller.fill

    def watched(filler: ParameterFiller, name: str, tensor: torch.Tensor) -> None:
        read.append(name)
        fill(filler, name, tensor)

    monkeypatch.setattr(ParameterFiller, "fill", watched)
    named = []
    for stage in range(3):
        read.clear()
        PagedModel(folder, "float32", ranks=Ranks(pipeline=Pipeline(stage, 3)))
        assert {name.split(".")[2] for name in read if ".layers." in name} == {str(stage)}
        named.append({name for name in read if ".layers." not in name})
    embedding, head = {"model.embed_tokens.weight"}, {"model.norm.weight"}
    head |= embedding if tied else {"lm_head.weight"}
    assert named == [embedding, set(), head]


class RecordingStages(Recording):
    """Steps are recorded as far as a CPU can."""

    delays = (0.0,) * 3


async def test_stages_record_their_steps(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    want = await tokens(config(folder, 1), requests())
    settings = staged(folder, 3, attention_backend="static")
    assert await tokens(settings, requests(), RecordingStages) == want
    assert min(Recording.replays.pop()) > 10


class TwoRecordingStages(Recording):
    """As `RecordingStages`, with two of them."""

    delays = (0.0,) * 2


@interpreted
async def test_the_first_stage_gets_the_tokens_of_the_rows_that_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of recorded steps, whose rows that do not sample are between them."""
    from triton.runtime.interpreter import GridExecutor

    lock, launch = threading.RLock(), GridExecutor.__call__

    def launch_alone(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:  # The interpreter has one grid at a time.
            return launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch_alone)
    sent: list[tuple[list[int], int]] = []
    send = PipelineStage.send_tokens

    def watched(stage: PipelineStage, chosen: torch.Tensor, rows: Any) -> None:
        sent.append((list(rows), len(chosen)))
        send(stage, chosen, rows)

    monkeypatch.setattr(PipelineStage, "send_tokens", watched)
    folder = make_checkpoint("qwen3", tmp_path)
    options = {
        "long_prefill_token_threshold": 5, "max_model_len": 64, "attention_backend": "triton",
        "operations": "torch",
    }  # fmt: skip
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)

    async def rounds(settings: EngineConfig, executor: type) -> list[list[int]]:
        """Long prompts first, then short ones. Steps of the first round are recorded after it."""
        plugins = load_plugins(extra=[Plugin(executor)])
        async with AsyncEngine(settings, plugins=plugins) as engine:

            async def one(prompt: list[int]) -> list[int]:
                async for output in engine.generate(prompt, params):
                    last = output
                return list(last.outputs[0].token_ids)

            return [
                chosen
                for first in (3, 30, 60)
                for chosen in await asyncio.gather(
                    *(one([first + n] * (14 if n < 2 else 3)) for n in range(4))
                )
            ]

    want = await rounds(config(folder, 1, **options), RankThreads)
    assert await rounds(staged(folder, 2, **options), TwoRecordingStages) == want
    assert any(rows != list(range(len(rows))) and count > len(rows) for rows, count in sent), sent
