"""Two ranks give what one gives, through the whole engine."""

from __future__ import annotations

import asyncio
import json
import operator
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import msgspec
import pytest
import torch
import transformers

import jackfield
from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.protocols import Executor
from jackfield.core.registration.executor_choice import choose_executor
from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes as remote_processes
from jackfield.core.remote.frames import encode
from jackfield.core.sampling_params import OutputKind, StructuredOutputsParams
from jackfield.core.step import PrepareAhead
from jackfield.plugins.executors import messages, processes
from jackfield.plugins.executors.messages import Step
from jackfield.plugins.executors.processes import ProcessesExecutor

from helpers import at_once, make_checkpoint

EMBEDDED = Path(jackfield.__file__).parent / "plugins" / "models" / "embedded"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LONG = [10 + (i * i) % 190 for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with forked.processes_of(remote_processes):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen 3 with two key-value heads, and the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("ranks")
    sizes = json.loads((EMBEDDED / "config.json").read_text())
    config = transformers.Qwen3Config(
        vocab_size=sizes["vocab_size"], hidden_size=64, intermediate_size=96, head_dim=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, eos_token_id=sizes["eos_token_id"], pad_token_id=0,
        bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    transformers.set_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # Else all keys have the same norm.
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    settings = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "block_size": 4,
        "max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 48, **options,
    }  # fmt: skip
    return EngineConfig(**settings)


class Running:
    """An engine on a loop of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = AsyncEngine(config)
        self.run(self.engine.start())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 300))

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.close()


OFFLOAD = {
    "kv_connector": "cpu_offload", "kv_connector_extra_config": {"kv_offloading_size": 0.01},
}  # fmt: skip


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[Running]:
    running = Running(config(checkpoint))
    yield running
    running.close()


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Running]:
    """With a second tier in host memory, so that what was preempted is loaded."""
    made = config(checkpoint, tensor_parallel_size=2, kv_transfer_config=OFFLOAD)
    running = Running(made)
    yield running
    running.close()


async def outputs(engine: AsyncEngine, prompt: Any, **params: Any) -> list[Any]:
    settings = {"ignore_eos": True, "max_tokens": 24, "temperature": 0.0, **params}
    sampling = SamplingParams(output_kind=OutputKind.FINAL_ONLY, **settings)
    final = [output async for output in engine.generate(prompt, sampling)][-1]
    return [(out.token_ids, out.finish_reason) for out in final.outputs]


async def mixed(engine: AsyncEngine) -> list[Any]:
    """Serve requests of all kinds at once: chunked prompts, too few blocks for all of them, several
    completions, seeds, penalties, a grammar."""
    grammar = StructuredOutputsParams(json=SCHEMA)
    return await at_once(
        engine,
        outputs(engine, LONG),
        outputs(engine, LONG[:50], temperature=0.9, seed=7, top_p=0.9, top_k=40),
        outputs(engine, LONG[5:30], temperature=1.0, seed=11, n=2),
        outputs(engine, LONG[7:13], repetition_penalty=1.3, presence_penalty=0.5),
        outputs(engine, "A number:", structured_outputs=grammar, ignore_eos=False, seed=5,
                temperature=1.0, max_tokens=40),
    )  # fmt: skip


def test_tokens_are_those_of_one_rank(one: Running, two: Running) -> None:
    expected, preempted = one.run(mixed(one.engine)), one.engine.stats().num_preemptions
    assert preempted, "the requests of this test need more blocks than there are"
    assert two.run(mixed(two.engine)) == expected
    executor = two.engine.core.executor  # type: ignore[attr-defined]
    assert isinstance(executor, ProcessesExecutor)
    assert [follower.rank for follower in executor.followers] == [1]


def test_a_prefix_hit_gives_the_same_tokens(one: Running, two: Running) -> None:
    async def twice(engine: AsyncEngine) -> tuple[list[Any], int]:
        await engine.reset_prefix_cache()
        first = await outputs(engine, LONG)
        before = engine.stats().prefix_cache_hits
        second = await outputs(engine, LONG)
        assert first == second
        return first, engine.stats().prefix_cache_hits - before

    expected = one.run(twice(one.engine))
    assert expected[1] and two.run(twice(two.engine)) == expected


async def restored(engine: AsyncEngine) -> tuple[list[Any], int]:
    """What a prompt gives whose blocks are in host memory alone, and how many tokens of it came."""
    first = await outputs(engine, LONG)
    # Saves hold their blocks until they have ended.
    while not await engine.reset_prefix_cache() or engine.stats().kv_blocks_used:
        await asyncio.sleep(0.01)
    before = engine.stats().external_prefix_cache_hits
    assert await outputs(engine, LONG) == first
    return first, engine.stats().external_prefix_cache_hits - before


def test_blocks_come_back_from_host_memory_on_all_ranks(one: Running, two: Running) -> None:
    found, loaded = two.run(restored(two.engine))
    assert found == one.run(outputs(one.engine, LONG))
    assert loaded == len(LONG) // 4 * 4 - 4 * (len(LONG) % 4 == 0)
    assert two.engine.stats().num_kv_load_failures == 0


def test_log_probabilities_and_health(one: Running, two: Running) -> None:
    async def scored(engine: AsyncEngine) -> list[dict[int, float]]:
        await engine.check_health()
        params = SamplingParams(
            temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2,
            output_kind=OutputKind.FINAL_ONLY,
        )  # fmt: skip
        final = [output async for output in engine.generate(LONG[:9], params)][-1]
        return [
            {token_id: each.logprob for token_id, each in position.items()}
            for position in final.outputs[0].logprobs
        ]

    for there, here in zip(two.run(scored(two.engine)), one.run(scored(one.engine)), strict=True):
        assert there == pytest.approx(here, abs=1e-4)


def test_metrics_tell_of_each_rank(one: Running, two: Running) -> None:
    """The smaller part of a rank, and the steps that it has done, whichever executor."""
    two.run(outputs(two.engine, LONG[:5]))
    two.run(two.engine.check_health())

    def value(name: str, rank: int, **labels: str) -> float:
        labels |= {"model_name": two.engine.config.served_names[0], "rank": str(rank)}
        labels["host"] = socket.gethostname()
        return two.engine.metrics_registry.get_sample_value(f"jackfield:{name}", labels) or 0

    steps = [value("rank_steps_total", rank) for rank in (0, 1)]
    assert min(steps) >= 24 and abs(steps[0] - steps[1]) <= 2
    info = one.engine.core.info  # type: ignore[attr-defined]
    for rank in (0, 1):
        weights = value("rank_memory_bytes", rank, kind="weights")
        assert info.weight_bytes / 3 < weights < info.weight_bytes
        cache = value("rank_memory_bytes", rank, kind="kv_cache")
        assert cache == info.kv_cache_bytes / 2
    assert "rank_steps" not in {metric.name for metric in one.engine.metrics_registry.collect()}


def test_an_abort_in_mid_stream_leaves_the_ranks_alike(one: Running, two: Running) -> None:
    async def aborted(engine: AsyncEngine) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        other = asyncio.create_task(outputs(engine, LONG[3:20]))
        async for output in engine.generate(LONG[:30], params):
            if len(output.outputs[0].token_ids) >= 5:
                break
        tokens = await other
        return [tokens, await outputs(engine, LONG[2:40])]

    assert two.run(aborted(two.engine)) == one.run(aborted(one.engine))


def test_a_plan_is_encoded_once_for_all_ranks(
    two: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = two.engine.core.executor  # type: ignore[attr-defined]
    sent: list[list[bytes]] = [[], []]
    encoded = []

    def count(message: Any) -> bytes:
        encoded.append(message)
        return encode(message)

    class Elsewhere:
        """Two more ranks, which only look."""

        def __init__(self, frames: list[bytes]) -> None:
            self.rank, self.send = 1, frames.append

    for module in (processes, messages):
        monkeypatch.setattr(module, "encode", count)
    with monkeypatch.context() as more:
        more.setattr(executor, "followers", [*executor.followers, *map(Elsewhere, sent)])
        two.run(outputs(two.engine, LONG[:5]))
    steps = [message.plan.step for message in encoded if isinstance(message, Step)]
    assert steps == sorted(set(steps)) and len(steps) >= 24
    assert len(sent[0]) == len(encoded)
    assert all(left is right for left, right in zip(*sent, strict=True))


def test_a_step_that_fails_on_all_ranks_ends_its_requests_alone(one: Running, two: Running) -> None:
    """Other requests go on, on all ranks."""

    async def fail(engine: AsyncEngine) -> list[Any]:
        executor: Any = engine.core.executor  # type: ignore[attr-defined]
        submit = executor.submit

        def broken(plan: Any, in_process: Any) -> Any:
            if len(plan.slots) and not plan.starts:
                executor.submit = submit
                plan = msgspec.structs.replace(plan, slots=(10_000,) * len(plan.slots))
            return submit(plan, in_process)

        executor.submit = broken
        [(_, reason)] = await outputs(engine, LONG[:7])
        assert reason == "error" and engine.dead_reason is None
        return await outputs(engine, LONG[:9])

    assert two.run(fail(two.engine)) == one.run(fail(one.engine))


def test_a_request_that_cannot_be_sent_is_refused_alone(two: Running) -> None:
    huge = StructuredOutputsParams(json={"type": "integer", "maximum": 2**70})

    async def serve() -> None:
        other = asyncio.create_task(outputs(two.engine, LONG[:8]))
        with pytest.raises(InvalidRequest, match="other ranks"):
            await outputs(two.engine, "A number:", structured_outputs=huge)
        assert (await other)[0][1] == "length"

    two.run(serve())


@pytest.mark.parametrize(
    "options", [{"kv_compression_ratio": 0.5}, {"kv_compression_levels": "8@8,4:0.4@24"}], ids=str
)
def test_kv_compression_drops_the_same_tokens(checkpoint: Path, options: dict[str, Any]) -> None:
    """Each rank chooses for its own heads, by the plan's numbers, and rounds them."""

    async def serve(ranks: int) -> tuple[list[Any], int]:
        made = config(
            checkpoint, tensor_parallel_size=ranks, kv_compression="key_norm",
            skip_tokenizer_init=True, **options,
        )  # fmt: skip
        async with AsyncEngine(made) as engine:
            return await outputs(engine, LONG), engine.stats().kv_compactions

    expected = asyncio.run(serve(1))
    assert expected[1] and asyncio.run(serve(2)) == expected


@pytest.mark.parametrize("policy", [pytest.param("key_norm", marks=pytest.mark.slow), "snap_kv"])
def test_windows_are_compacted_on_two_ranks(policy: str, tmp_path: Path) -> None:
    """Of Gemma 3's tables, each rank shifts those of windows, and moves its heads of the others."""
    folder = make_checkpoint("gemma3", tmp_path)
    prompt = [3 + 7 * n % 120 for n in range(60)]

    async def serve(ranks: int) -> tuple[list[Any], int]:
        made = config(
            folder, tensor_parallel_size=ranks, kv_compression=policy, max_model_len=96,
            kv_compression_ratio=0.4, kv_compression_interval=6, skip_tokenizer_init=True,
        )  # fmt: skip
        async with AsyncEngine(made) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
            *_, last = [output async for output in engine.generate(prompt, params)]
            return last.outputs[0].token_ids, engine.stats().kv_compactions

    expected = asyncio.run(serve(1))
    assert expected[1] > 1 and asyncio.run(serve(2)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_tokens_of_one(checkpoint: Path) -> None:
    """In float32, with recorded steps; then a rank is lost while it replays. GPUs round sums of
    other shapes otherwise, so one request in ten may differ."""

    async def serve(ranks: int) -> list[Any]:
        made = config(checkpoint, device="cuda", tensor_parallel_size=ranks)
        async with AsyncEngine(made) as engine:
            first = await mixed(engine)
            while await engine.core.executor.ask(PrepareAhead()):  # type: ignore[attr-defined]
                pass
            return [*first, *await mixed(engine)]

    async def lose() -> str:
        engine = AsyncEngine(config(checkpoint, device="cuda", tensor_parallel_size=2))
        await engine.start()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        async for _ in engine.generate(LONG[:5], params):
            engine.core.executor.followers[0].process.kill()  # type: ignore[attr-defined]
        await asyncio.wait_for(engine.stop(), 120)
        return engine.dead_reason or ""

    expected, found = asyncio.run(serve(1)), asyncio.run(serve(2))
    assert sum(map(operator.eq, found, expected)) >= len(expected) - 1 > 8
    assert "rank 1 of 2 was ended by SIGKILL" in asyncio.run(lose())


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({}, "inprocess"),
        ({"tensor_parallel_size": 2}, "processes"),
        ({"pipeline_parallel_size": 2}, "processes"),
        ({"executor": "mp"}, "processes"),
        ({"distributed_executor_backend": "uni"}, "inprocess"),
    ],
)
def test_the_number_of_ranks_chooses_the_executor(options: Any, executor: str) -> None:
    made = EngineConfig.from_options({"device": "cpu", **options})
    assert choose_executor(made, load_plugins()["executor"]) == executor


BALANCED = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}


class Larger:
    """An executor of many ranks that leaves out all that is optional, and subclasses nothing."""

    jackfield_api = 3
    tensor_parallel = True
    start = submit = ask = stop = None

    def __init__(self, *_: Any) -> None:
        pass

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("larger", Larger, priority=15, aliases=("big", "mp"))


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({}, "inprocess"),
        ({"tensor_parallel_size": 2}, "larger"),
        ({"pipeline_parallel_size": 2}, "processes"),
        ({"tensor_parallel_size": 2, "executor": "processes"}, "processes"),
        ({"executor": "big"}, "larger"),
        (BALANCED, "processes"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "processes"),
    ],
)
def test_auto_takes_the_first_executor_that_does_what_is_asked(options: Any, executor: str) -> None:
    executors = load_plugins(extra=[Larger()])["executor"]
    assert choose_executor(EngineConfig(device="cpu", **options), executors) == executor


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"executor": "larger", "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"executor": "larger", **BALANCED}, "enable_eplb"),
        ({"executor": "larger", "data_parallel_size": 2}, "data_parallel_size"),
    ],
)
async def test_what_an_executor_does_not_do_is_refused_by_name(options: Any, field: str) -> None:
    """At the start of an engine, and before processes of several are started."""
    engine = AsyncEngine(
        EngineConfig(device="cpu", **options), plugins=load_plugins(extra=[Larger()])
    )
    with pytest.raises(ConfigError, match=f"{field}: executor '{options['executor']}'") as refusal:
        await engine.start()
    assert refusal.value.param == field


def test_choosing_an_executor_imports_no_torch() -> None:
    """The other ranks' processes start before this one has imported it."""
    code = (
        "import sys; from jackfield.core.config import EngineConfig; "
        "from jackfield.core.registration.executor_choice import choose_executor; "
        "from jackfield.core.registry import load_plugins; "
        "choose_executor(EngineConfig(tensor_parallel_size=2), load_plugins()['executor']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_executor_that_subclasses_nothing_gets_what_is_optional() -> None:
    executor = load_plugins(extra=[Larger()])["executor"].load("larger")
    assert issubclass(executor, Larger) and issubclass(executor, Executor)
    assert executor.tensor_parallel and executor.start is None
    config = EngineConfig(device="cpu")
    assert executor.start_ahead(config) is None
    assert executor.initialize_device(config, load_plugins()) is None
    made = executor()
    assert made.watch_failure(print) is None
    with pytest.raises(NotImplementedError, match="Larger"):
        made.watch_transfers(print)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"executor": "inprocess"}, "tensor_parallel_size"),
        ({"executor": "uni"}, "tensor_parallel_size"),
        ({"executor": "slurm"}, "executor"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        (
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "executor": "uni"},
            "pipeline_parallel_size",
        ),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 3}, "pipeline_parallel_size"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(
    checkpoint: Path, options: Any, field: str
) -> None:
    async def start() -> None:
        made = config(checkpoint, **{"tensor_parallel_size": 2, **options})
        async with AsyncEngine(made):
            pass

    with pytest.raises(ConfigError) as refusal:
        asyncio.run(start())
    assert refusal.value.param == field


async def test_kv_connectors_of_one_rank_are_refused() -> None:
    made = EngineConfig(
        device="cpu", tensor_parallel_size=2, kv_transfer_config={"kv_connector": "multi"}
    )
    with pytest.raises(ConfigError, match="'multi' serves one rank") as refusal:
        await AsyncEngine(made).start()
    assert refusal.value.param == "kv_transfer_config"
